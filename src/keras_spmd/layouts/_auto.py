"""The fastest layouts that fit, found by dry runs of each recipe."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from keras import distribution

from keras_spmd import _processes
from keras_spmd.layouts import _recipes
from keras_spmd.layouts._choosing import chosen_by_rank_0


def auto(
    model_fn: Callable[[], Any],
    mesh: Any,
    *,
    batch: Any,
    device: Any = "H100",
    device_memory: int | None = None,
    candidates: Mapping[str, Callable] | None = None,
    verbose: bool = True,
) -> Any:
    """Choose layouts for a model: the fastest that fits, by dry runs of all recipes.

    Example:

    >>> import keras, keras_spmd
    >>> def make_model():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    ...     model.compile("adamw", "mse")
    ...     return model
    >>> mesh = keras.distribution.DeviceMesh((1,), ("batch",), ["cpu:0"])
    >>> layout_map = keras_spmd.layouts.auto(
    ...     make_model, mesh, batch=((32, 64), (32, 64)), verbose=False)
    >>> print(layout_map.why)  # doctest: +SKIP

    In a job of several ranks all of them call it. Rank 0 plans, and the others wait for its choice.

    Args:
        model_fn: A function without arguments that makes and compiles the model.
        mesh: The mesh. The batch is divided over the axis "batch", or over the first one; recipes
            that divide the model take the axis "model", or the last one.
        batch: The global batch, as for `keras_spmd.plan`.
        device: The figures of the devices, as for `keras_spmd.plan`.
        device_memory: Bytes that a step may take; by default what the device has.
        candidates: Functions of a model and a mesh that return a `LayoutMap`, by name; by default
            all recipes that the mesh has axes for.
        verbose: Whether to print the table of alternatives.

    Returns:
        A `LayoutMap`, whose attribute `why` is the table of alternatives.
    """
    names = tuple(mesh.axis_names)
    found = _recipes_for(names) if candidates is None else dict(candidates)

    def choose(after_each: Callable[[], object]) -> tuple[str, str]:
        from keras_spmd.plan._auto import auto as by_dry_runs

        choice = by_dry_runs(
            model_fn,
            tuple(mesh.shape),
            names,
            batch,
            candidates=found,
            device=device,
            device_memory=device_memory,
            batch_axis=_data_axis(names),
            after_each=after_each,
        )
        return choice.name, str(choice)

    name, why = chosen_by_rank_0(choose)
    layout_map = found[name](model_fn, mesh)
    layout_map.why = why
    if verbose and _processes.process_id() == 0:
        print(layout_map.why)
    return layout_map


def _data_axis(names: tuple[str, ...]) -> str:
    return "batch" if "batch" in names else names[0]


def _recipes_for(names: tuple[str, ...]) -> dict[str, Callable]:
    data = _data_axis(names)
    others = [name for name in names if name != data]
    found: dict[str, Callable] = {
        "data parallel": _replicated,
        "zero1": functools.partial(_recipes.zero1, axis=data),
        "fsdp": functools.partial(_recipes.fsdp, axis=data),
    }
    if others:
        model = "model" if "model" in others else others[-1]
        found["tensor parallel"] = functools.partial(_recipes.tensor_parallel, axis=model)
        found["sequence parallel"] = functools.partial(
            _recipes.sequence_parallel, axis=model, data_axis=data
        )
        found["hybrid"] = functools.partial(_recipes.hybrid, data_axis=data, model_axis=model)
    return found


def _replicated(model: Any, mesh: Any) -> Any:
    layout_map = distribution.LayoutMap(mesh)
    # Of variables only: a key that matches a layer's output would gather it.
    layout_map["(?!.*/output$).*"] = ()
    return layout_map
