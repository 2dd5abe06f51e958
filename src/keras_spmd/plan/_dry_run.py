"""A training step, captured for a mesh that isn't there.

Building, capturing and all passes are those of a real run; only nothing has a value.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
from keras.src import tree
from keras.src.distribution import distribution_lib as keras_distribution
from torch._subclasses.fake_tensor import FakeTensorMode

from keras_spmd import _data, _layouts
from keras_spmd._notices import ShardingWarning
from keras_spmd._planning import planning
from keras_spmd.graph._capture import Batch, Captured, without_log_of_fake_tensors
from keras_spmd.graph._passes import improved
from keras_spmd.graph._step import Step, _without_garbage_collection
from keras_spmd.plan._arguments import Leaf, check_mesh, count_of, distribution_of, leaves_of
from keras_spmd.plan._keeping import process_kept
from keras_spmd.plan._meta import new_mode, without_values
from keras_spmd.plan._world import imagined_world


class DryRun:
    """A model on an imagined mesh, built and compiled but without values."""

    def __init__(self, model: Any, distribution: Any, batch: Batch, leaves: Any) -> None:
        self.model, self.distribution = model, distribution
        self.batch, self.leaves = batch, leaves

    @property
    def mesh(self) -> Any:
        """The torch mesh, without axes of size 1; None for a mesh of one device."""
        return _layouts.compute_mesh(self.distribution.device_mesh)

    @_without_garbage_collection()
    def capture(self) -> Captured:
        """The graph of a training step, as it would be compiled."""
        captured = Step(self.model, "train", _never)._capture(self.batch)
        captured.module = improved(captured.module)
        return captured


def _never(data: Any) -> Any:
    raise AssertionError("a dry run computes nothing")


@contextlib.contextmanager
def dry_run(
    model_fn: Callable,
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    layouts: Any,
    batch: Any,
    *,
    batch_axis: str | None = None,
    for_gpu: bool = True,
) -> Iterator[tuple[DryRun, list[str]]]:
    """Build the model on a mesh of that shape; also the messages that a user would get."""
    check_mesh(mesh_shape, axis_names)
    if not callable(model_fn):
        raise TypeError(
            "The model is given as a function that makes and compiles it, so that it can be made "
            f"without memory, got {type(model_fn).__name__}."
        )
    leaves = leaves_of(batch)
    messages: list[str] = []
    with (
        process_kept(),
        imagined_world(count_of(mesh_shape)),
        planning(for_gpu=for_gpu),
        _collecting(messages),
    ):
        mesh = keras_distribution.DeviceMesh(tuple(mesh_shape), tuple(axis_names))
        # Keras and torch look at its numbers, which must be real.
        _layouts.compute_mesh(mesh)
        keras_distribution.set_distribution(None)
        distribution = distribution_of(layouts, mesh, model_fn, batch_axis)
        keras_distribution.set_distribution(distribution)
        yield _built(model_fn, distribution, leaves, new_mode()), messages


def _built(model_fn: Callable, distribution: Any, leaves: Any, mode: FakeTensorMode) -> DryRun:
    with without_values(mode):
        model = model_fn()
        if getattr(model, "optimizer", None) is None:
            raise ValueError(
                "The function must return a compiled model: a training step is planned, which has "
                f"a loss and an optimizer. Received: {model!r}. Call model.compile(...) in it."
            )
        data = tree.map_structure(_tensor, leaves)
        with without_log_of_fake_tensors():
            # Keras tries without devices first, which fails with mixed precision.
            try:
                model._symbolic_build(data_batch=data)
            except ValueError as error:
                raise ValueError(_does_not_take(model, leaves, error)) from error
        parts, structure = optree.tree_flatten(_data.distribute_batch(data), namespace="keras")
    return DryRun(model, distribution, Batch(parts, structure), leaves)


def _does_not_take(model: Any, leaves: Any, error: ValueError) -> str:
    """That the model refuses the batch, why, and what its inputs are, as far as Keras knows."""
    given = tree.map_structure(lambda leaf: getattr(leaf, "shape", leaf), leaves)
    # Keras wraps the reason in what it was called with, and in bold letters.
    plain = re.sub(r"\x1b\[\d*m", "", str(error))
    parts = [part.strip() for part in plain.split("\n\n") if part.strip()]
    told = [p for p in parts if not p.startswith(("Exception encountered", "Arguments received"))]
    inputs = ", ".join(str(tuple(i.shape)) for i in getattr(model, "inputs", None) or [])
    expected = f" Its inputs are {inputs}." if inputs else ""
    reason = " ".join(told or parts)
    return f"'{model.name}' can't be trained with a batch of shapes {given}: {reason}{expected}"


def _tensor(leaf: Any) -> Any:
    return leaf.tensor() if isinstance(leaf, Leaf) else leaf


@contextlib.contextmanager
def _collecting(messages: list[str]) -> Iterator[None]:
    """Messages of keras-spmd become part of the plan; those of others are shown as ever."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardingWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, ShardingWarning):
            messages.append(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
