"""The public name of `graph._explain`, which imports the compiler."""

import os
from typing import Any


def explain(model: Any, graph_file: str | os.PathLike | None = None) -> list[Any]:
    """Say what the compiled steps of a model do: ops, communication, memory, time.

    Call it after a step has run, on all ranks; rank 0 prints.

    Example:

    >>> import keras, numpy as np, keras_spmd
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile("adamw", "mse", jit_compile=True)
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    >>> (training,) = keras_spmd.explain(model)                            # prints a table
    Training step of ...
    >>> training.kind, len(training.graphs), training.reason
    ('train', 1, None)

    With `graph_file="step.txt"` the graph is written there.

    Args:
        model: A model that was compiled with `jit_compile=True`.
        graph_file: Where to write the graphs as text, if at all: a line for each op, with its
            shape, its layer, and whether it belongs to the forward pass, the backward pass or the
            update.

    Returns:
        The same as numbers: a `StepReport` for each step that has run.
    """
    from keras_spmd.graph import _explain

    return _explain.explain(model, graph_file)
