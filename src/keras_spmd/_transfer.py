"""From the host to the device: from pinned memory, one batch ahead of the step that needs it.

The right moment to read the next batch is when a step has been launched: the device is busy then,
and the host would only wait for the step's logs. `_trainer` calls `read_ahead` at that moment.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from keras.src import tree
from keras.src.backend.config import floatx
from keras.src.backend.torch import core as keras_torch
from keras.src.backend.torch.core import device_scope, get_device, to_torch_dtype
from keras.src.trainers.data_adapters import data_adapter_utils
from torch.distributed.tensor import DTensor

from keras_spmd import _layouts


def as_tensor(leaf: Any) -> Any:
    """An array of any library as a tensor, on the host unless it is on a device already."""
    if leaf is None or isinstance(leaf, torch.Tensor) or not _is_array(leaf):
        return leaf
    if data_adapter_utils.is_scipy_sparse(leaf):
        leaf = leaf.todense()
    with device_scope("cpu"):
        return keras_torch.convert_to_tensor(leaf)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in "biufcV"
    return hasattr(leaf, "__array__") or data_adapter_utils.is_scipy_sparse(leaf)


def to_device(x: Any) -> Any:
    """A tensor on the device; on CUDA the copy is only begun."""
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
        return x
    device = torch.device(get_device())
    if x.device.type == device.type:
        return x.contiguous()
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    pinned = x if x.is_pinned() else x.pin_memory()
    return pinned.to(device, non_blocking=True)


def convert_to_tensor_or(original: Callable) -> Callable:
    """`convert_to_tensor`: a number is written on the device, without a copy that waits for it."""

    def convert_to_tensor(
        x: Any, dtype: Any = None, sparse: bool | None = None, ragged: bool | None = None
    ) -> Any:
        if type(x) in (int, float, bool) and not (sparse or ragged) and _is_on_cuda():
            return torch.full((), x, dtype=_dtype_of(x, dtype), device=get_device())
        return original(x, dtype, sparse, ragged)

    convert_to_tensor.__doc__ = original.__doc__
    return convert_to_tensor


def _is_on_cuda() -> bool:
    return _layouts.active_distribution() is not None and get_device().startswith("cuda")


def _dtype_of(x: float, dtype: Any) -> torch.dtype:
    if dtype is not None:
        return to_torch_dtype(dtype)
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, int):
        return torch.int32 if -(2**31) <= x < 2**31 else torch.int64
    return to_torch_dtype(floatx())


def next_seed_or(original: Callable) -> Callable:
    """`SeedGenerator.next`: its increment is an array of the host, copied at each call."""

    def next(self: Any, ordered: bool = True) -> Any:
        if not ordered or not _is_on_cuda() or isinstance(self.state.value, DTensor):
            return original(self, ordered)
        state = self.state.value.clone()
        self.state.assign(state + torch.arange(2, dtype=state.dtype, device=state.device))
        return state

    return next


def one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; on CUDA the next one may be read and copied while a step computes."""
    if torch.device(get_device()).type != "cuda":
        return iter(batches)
    return _Ahead(iter(batches))


def read_ahead() -> None:
    """Read and copy the batch after the one that was given out last."""
    if _Ahead.in_use is not None:
        _Ahead.in_use.read()


class _Ahead:
    in_use: "_Ahead | None" = None

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.copying = torch.cuda.Stream()
        self.waiting: list[tuple[Any, Any]] = []
        self.has_ended = False

    def __iter__(self) -> "_Ahead":
        return self

    def __next__(self) -> Any:
        self.read()
        if not self.waiting:
            _Ahead.in_use = None
            raise StopIteration
        _Ahead.in_use = self
        batch, copied = self.waiting.pop()
        computing = torch.cuda.current_stream()
        computing.wait_event(copied)
        for leaf in tree.flatten(batch):
            if isinstance(leaf, torch.Tensor):
                # Its memory belongs to the copying stream, and must not be reused too early.
                local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
                if local.is_cuda:
                    local.record_stream(computing)
        return batch

    def read(self) -> None:
        if self.waiting or self.has_ended:
            return
        with torch.cuda.stream(self.copying):
            for batch in self.batches:
                self.waiting.append((batch, self.copying.record_event()))
                return
        self.has_ended = True
