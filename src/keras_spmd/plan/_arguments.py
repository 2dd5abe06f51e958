"""What a user gives to a dry run: a mesh, layouts, and what a batch looks like."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from keras.src.backend.common import standardize_dtype
from keras.src.backend.torch.core import to_torch_dtype
from keras.src.distribution import distribution_lib as keras_distribution

from keras_spmd.plan._keeping import process_kept
from keras_spmd.plan._meta import new_mode, without_values

_BATCH_HELP = (
    "A batch is a structure (x, y) of arrays, of keras.Input, of shapes such as (512, 4096), or of "
    'shapes with their dtypes, ((512, 4096), "int32"); the shapes are those of the global batch.'
)


@dataclass(frozen=True)
class Leaf:
    """The shape and dtype of an array of the global batch."""

    shape: tuple[int, ...]
    dtype: str

    def tensor(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=to_torch_dtype(self.dtype))


def check_mesh(mesh_shape: Sequence[int], axis_names: Sequence[str]) -> None:
    """Raise unless these are the shape and the axis names of a mesh."""
    if isinstance(mesh_shape, int) or isinstance(axis_names, str):
        raise TypeError(
            "The shape and the axis names of a mesh are sequences, e.g. (64, 8) and "
            f"('batch', 'model'), got {mesh_shape!r} and {axis_names!r}."
        )
    if not mesh_shape or any(not isinstance(n, int) or n < 1 for n in mesh_shape):
        raise ValueError(f"The shape of a mesh has numbers from 1 on, got {tuple(mesh_shape)}.")
    if len(mesh_shape) != len(axis_names) or len(set(axis_names)) != len(axis_names):
        raise ValueError(
            f"A mesh of shape {tuple(mesh_shape)} needs {len(mesh_shape)} different axis names, "
            f"got {tuple(axis_names)}."
        )


def leaves_of(batch: Any) -> Any:
    """The batch with a `Leaf` for each of its arrays."""
    if batch is None:
        return None
    if _is_shape(batch):
        return Leaf(tuple(batch), "float32")
    if _is_shape_with_dtype(batch):
        return Leaf(tuple(batch[0]), standardize_dtype(batch[1]))
    if isinstance(batch, Mapping):
        return {key: leaves_of(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(leaves_of(value) for value in batch)
    shape = getattr(batch, "shape", None)
    if shape is None:
        raise TypeError(f"{_BATCH_HELP} Received: {batch!r} of type {type(batch).__name__}.")
    if None in tuple(shape):
        raise ValueError(
            f"The shape {tuple(shape)} has a dim of unknown size. {_BATCH_HELP} "
            "keras.Input takes batch_size=."
        )
    dtype = getattr(batch, "dtype", None) or "float32"
    return Leaf(tuple(int(n) for n in shape), standardize_dtype(dtype))


def _is_shape(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and bool(x) and all(type(n) is int for n in x)


def _is_shape_with_dtype(x: Any) -> bool:
    return (
        isinstance(x, (list, tuple))
        and len(x) == 2
        and _is_shape(x[0])
        and isinstance(x[1], (str, torch.dtype, type))
    )


def distribution_of(
    layouts: Any, mesh: Any, model_fn: Callable, batch_axis: str | None = None
) -> Any:
    """The distribution that layouts stand for: None, a dict, a `LayoutMap`, or a function."""
    if batch_axis is not None and batch_axis not in mesh.axis_names:
        raise ValueError(f"The mesh has the axes {tuple(mesh.axis_names)}, not {batch_axis!r}.")
    if layouts is None and len(mesh.shape) == 1:
        return keras_distribution.DataParallel(device_mesh=mesh)
    if callable(layouts) and not isinstance(layouts, Mapping):
        # The model that is planned afterwards has the same names.
        with process_kept(), without_values(new_mode()):
            model = model_fn()
        layouts = layouts(model, mesh)
    return keras_distribution.ModelParallel(
        layout_map=_layout_map(layouts, mesh), batch_dim_name=batch_axis
    )


def _layout_map(layouts: Any, mesh: Any) -> Any:
    given = {} if layouts is None else layouts
    if not isinstance(given, Mapping):
        raise TypeError(
            "Layouts are None (data parallel), a dict of patterns and axes, a LayoutMap, or a "
            f"function (model, mesh) that makes one, got {given!r} of type {type(given).__name__}."
        )
    result = keras_distribution.LayoutMap(mesh)
    for key, layout in given.items():
        axes: Any = getattr(layout, "axes", layout)
        unknown = [a for a in axes if a is not None and a not in mesh.axis_names]
        if unknown:
            raise ValueError(
                f"The layout {tuple(axes)} of '{key}' names the axis {unknown[0]!r}, but the mesh "
                f"has the axes {tuple(mesh.axis_names)}."
            )
        result[key] = keras_distribution.TensorLayout(tuple(axes), mesh)
    return result


def count_of(mesh_shape: Sequence[int]) -> int:
    return math.prod(mesh_shape)
