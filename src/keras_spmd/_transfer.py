"""From the host to the device: from pinned memory, one batch ahead of the step that needs it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from keras.src import tree
from keras.src.backend.torch.core import get_device
from torch.distributed.tensor import DTensor


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


def one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; on CUDA the next one is read and copied while a step computes with this one."""
    if torch.device(get_device()).type != "cuda":
        yield from batches
        return
    copying = torch.cuda.Stream()
    iterator = iter(batches)
    ahead = _begin(iterator, copying)
    while ahead is not None:
        batch, copied = ahead
        computing = torch.cuda.current_stream()
        computing.wait_event(copied)
        for leaf in tree.flatten(batch):
            if isinstance(leaf, torch.Tensor):
                # Its memory belongs to the copying stream, and must not be reused too early.
                local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
                local.record_stream(computing)
        ahead = _begin(iterator, copying)
        yield batch


def _begin(iterator: Iterator[Any], copying: Any) -> tuple[Any, Any] | None:
    with torch.cuda.stream(copying):
        for batch in iterator:
            return batch, copying.record_event()
    return None
