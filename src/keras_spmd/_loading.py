"""Keras's own files, of which each rank reads what its shards need.

Keras reads a variable and assigns it. Under a distribution what it reads is a promise, and the
variable that gets it knows which part it wants.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import torch
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.saving import saving_lib
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch.distributed.tensor import DTensor

from keras_spmd import _layouts
from keras_spmd._progress import progress_of_bytes


class Stored(NDArrayOperatorsMixin):
    """An array in an h5 file, read when somebody asks for its numbers or computes with them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        is_bfloat16 = dataset.attrs.get("dtype") == "bfloat16"
        self.dtype = np.dtype(ml_dtypes.bfloat16) if is_bfloat16 else dataset.dtype
        self.shape, self.ndim = dataset.shape, len(dataset.shape)
        self._place = dataset.file.filename, dataset.name

    def __getitem__(self, index: Any) -> np.ndarray:
        if self._dataset.id.valid:
            return self._numbers(self._dataset[index])
        # Of weights in several files, Keras has closed this one again.
        file, name = self._place
        with h5py.File(file, "r") as opened:
            return self._numbers(opened[name][index])

    def _numbers(self, x: Any) -> np.ndarray:
        """What was read. To h5 files bfloat16 is two bytes without a meaning."""
        x = np.asarray(x)
        return x.view(self.dtype) if x.dtype.kind == "V" else np.array(x, dtype=self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[()], dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        arrays = [np.asarray(x) if isinstance(x, Stored) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # Such as where an array lies in memory, which this one doesn't.
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def like(self, x: DTensor) -> DTensor:
        """As a DTensor with the layout of `x`."""
        mesh, placements = x.device_mesh, x.placements
        shape, start = _layouts.local_shape_and_offset(self.shape, mesh, placements)
        part = self[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        if part.dtype == ml_dtypes.bfloat16:
            part = part.astype("float32")
        local = torch.as_tensor(part, dtype=x.dtype, device=x.device)
        return _layouts.wrap_local(local, mesh, placements, self.shape)


def get_item_or(original: Callable) -> Callable:
    """`store[key]`, with which Keras reads h5 files."""

    def __getitem__(self: Any, key: str) -> Any:
        if _layouts.active_mesh() is None or key not in self._h5_entry_group:
            return original(self, key)
        return Stored(saving_lib.safe_get_h5_dataset(self._h5_entry_group, key))

    return __getitem__


def bytes_held(variable: Any) -> int:
    """How large a variable is on this rank."""
    x = variable._value
    return 0 if x is None else getattr(x, "_local_tensor", x).nbytes


# Told of each variable that is read, while a file is.
_advance: Callable[[int], object] | None = None


@contextlib.contextmanager
def _shown(filepath: Any, total: int | None) -> Iterator[None]:
    global _advance
    if _advance is not None or _layouts.active_mesh() is None:
        yield
        return
    with progress_of_bytes(f"Loading '{filepath}'", total=total) as _advance:
        try:
            yield
        finally:
            _advance = None


def load_weights_or(original: Callable) -> Callable:
    """`load_weights`: with a bar."""

    def load_weights(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        with _shown(filepath, sum(bytes_held(v) for v in files_variables(model))):
            return original(model, filepath, *args, **kwargs)

    load_weights.__doc__ = original.__doc__
    return load_weights


def load_model_or(original: Callable) -> Callable:
    """`load_model`: with a bar. How much there is to read is not known yet."""

    def load_model(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        with _shown(filepath, None):
            return original(filepath, *args, **kwargs)

    load_model.__doc__ = original.__doc__
    return load_model


def files_variables(model: Any) -> list[Any]:
    """What is in a model's files."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.variables, *([] if optimizer is None else optimizer.variables)]


def assign_or(original: Callable) -> Callable:
    """`Variable.assign`: a sharded variable reads its part."""

    def assign(self: Any, value: Any) -> Any:
        if not isinstance(value, Stored):
            return original(self, value)
        if _advance is not None:
            _advance(bytes_held(self))
        is_sharded = isinstance(self._value, DTensor) and not in_stateless_scope()
        if not is_sharded or tuple(value.shape) != tuple(self.shape):
            return original(self, np.asarray(value))
        part = value.like(self._value)
        self._direct_assign(part)
        return part

    assign.__doc__ = original.__doc__
    return assign
