"""Whether this thread plans a run instead of doing it, for code that does something else then.

A dry run has tensors without values, on the host: a torch without CUDA can't differentiate tensors
of a GPU, not even such tensors. So whoever asks whether a tensor lies on a GPU asks here.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Here(threading.local):
    def __init__(self) -> None:
        self.is_planning = False
        self.for_gpu = False


_here = _Here()


def is_planning() -> bool:
    return _here.is_planning


def is_on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor lies on a GPU, or would in the run that is planned."""
    return x.is_cuda or _here.for_gpu


@contextlib.contextmanager
def planning(*, for_gpu: bool = False) -> Iterator[None]:
    """In this block variables get no values, and steps are captured for that kind of device."""
    before = _here.is_planning, _here.for_gpu
    _here.is_planning, _here.for_gpu = True, for_gpu
    try:
        yield
    finally:
        _here.is_planning, _here.for_gpu = before
