"""A model to look at: one that was given, or one made of shapes only.

What is made here leaves nothing behind: no memory, no numbers drawn, and no names taken, so that
the model that is made afterwards has the names that its layouts are written for.
"""

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend.common import global_state
from keras.src.backend.torch import core as keras_torch

from keras_spmd import _layouts


@contextlib.contextmanager
def model_at_hand(model: Any, inputs: Any = None) -> Iterator[keras.Model]:
    """The model with all its variables, for as long as the block lasts.

    Args:
        model: A model, or a function that makes one.
        inputs: What the model is called with, if it isn't built yet: arrays, `keras.Input`s.
    """
    with _leaving_no_traces():
        if isinstance(model, keras.layers.Layer) and model.built and model.weights:
            yield model
            return
        with keras_torch.device_scope("meta"):
            yield _of_shapes_only(model, inputs)


def _of_shapes_only(model: Any, inputs: Any) -> keras.Model:
    if isinstance(model, keras.layers.Layer):
        made = _copy_of(model)
    elif callable(model):
        made = model()
        if not isinstance(made, keras.layers.Layer):
            raise TypeError(
                f"The function {model!r} should return the model that it makes, but it returned "
                f"{made!r}."
            )
    else:
        raise TypeError(
            f"A layout recipe takes a model or a function that makes one, not {model!r}."
        )
    if inputs is not None and not made.built:
        made(symbols(inputs))
    if not made.built:
        raise ValueError(
            f"The model '{made.name}' has no variables yet, because nobody knows the shape of its "
            "inputs. Pass inputs=: a batch as the model gets it, or keras.Input(...)s like it."
        )
    return made


def _copy_of(model: keras.Model) -> keras.Model:
    """An unbuilt model of the same layers, so that the given one stays unbuilt."""
    try:
        return type(model).from_config(model.get_config())
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"The model '{model.name}' isn't built, and it can't be copied from its configuration "
            f"({error}). Pass the function that makes it instead, or build it first."
        ) from error


def symbols(inputs: Any, length: int = 16, device: str = "meta") -> Any:
    """Tensors without memory, of the shapes and dtypes of `inputs`. A batch has two rows."""

    def symbol(x: Any) -> torch.Tensor:
        sizes = tuple(x.shape)
        sizes = (2, *(length if size is None else size for size in sizes[1:])) if sizes else ()
        dtype = keras_torch.to_torch_dtype(keras.backend.standardize_dtype(x.dtype))
        return torch.empty(sizes, dtype=dtype, device=device)

    return keras.tree.map_structure(symbol, inputs)


@contextlib.contextmanager
def _leaving_no_traces() -> Iterator[None]:
    distribution = _layouts.active_distribution()
    state = {
        name: copy.copy(value) if isinstance(value, (dict, list)) else value
        for name, value in vars(global_state.GLOBAL_STATE_TRACKER).items()
    }
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.random.get_rng_state()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        tracker = vars(global_state.GLOBAL_STATE_TRACKER)
        tracker.clear()
        tracker.update(state)
        keras.distribution.set_distribution(distribution)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.random.set_rng_state(torch_state)
