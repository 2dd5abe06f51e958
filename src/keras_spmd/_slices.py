"""`ops.slice_update` at a place that is a tensor, as a cache of keys and values is written to.

Keras writes element by element then, by their indices, for which a sharded cache would be gathered
at each token. The place is one number for each dim, so it is read, and every rank writes into its
own part.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keras_spmd._capturing import is_capturing


def slice_update_or(original: Callable) -> Callable:
    @functools.wraps(original)
    def slice_update(inputs: Any, start_indices: Any, updates: Any) -> Any:
        if is_capturing() or not isinstance(inputs, DTensor) or not torch.is_tensor(updates):
            return original(inputs, start_indices, updates)
        starts = [int(start) for start in start_indices]
        dims = [d for d, size in enumerate(updates.shape) if size != inputs.shape[d]]
        room = [inputs.shape[d] - updates.shape[d] for d in range(inputs.ndim)]
        if not dims or not all(0 <= s <= most for s, most in zip(starts, room, strict=True)):
            return original(inputs, start_indices, updates)
        return _written(inputs, starts, updates.to(inputs.dtype), dims)

    return slice_update


def _written(x: torch.Tensor, starts: list[int], updates: torch.Tensor, dims: list[int]) -> Any:
    """`x` with the updates at their place along each of `dims`."""
    dim, *rest = dims
    start, length = starts[dim], updates.shape[dim]
    part = _written(x.narrow(dim, start, length), starts, updates, rest) if rest else updates
    return torch.slice_scatter(x, part, dim, start, start + length)
