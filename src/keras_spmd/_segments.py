"""Reductions by segment, without asking how many rows there are.

Keras repeats the number of a segment for each element of its row, so many times as a tensor says:
torch then has to read it, which a graph can't, and a mesh gathers the numbers for it.
"""

from collections.abc import Callable
from typing import Any

import torch
from keras.src.backend.torch.core import get_device

from keras_spmd import _layouts
from keras_spmd._capturing import is_capturing

# What a segment without rows has.
_EMPTY = {"sum": 0.0, "prod": 1.0, "amax": -torch.inf, "amin": torch.inf}


def segment_reduction_or(original: Callable) -> Callable:
    """The same reduction, in a graph or on a mesh."""

    def segment_reduction(data: Any, segment_ids: Any, method: str, num_segments: Any) -> Any:
        if method not in _EMPTY or not (is_capturing() or _layouts.active_mesh() is not None):
            return original(data, segment_ids, method, num_segments)
        ids = segment_ids.long()
        if not num_segments:
            num_segments = int(ids.max()) + 1
        # Rows of no segment go to one more, which is dropped.
        is_known = (ids >= 0) & (ids < num_segments)
        ids = torch.where(is_known, ids, num_segments)
        ids = ids.reshape(-1, *(1 for _ in data.shape[1:])).expand(data.shape)
        shape = (num_segments + 1, *data.shape[1:])
        start = torch.full(shape, _EMPTY[method], device=get_device())
        found = start.scatter_reduce(0, ids, data.float(), method)
        return found[:-1].type(data.dtype)

    return segment_reduction
