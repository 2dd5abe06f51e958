"""Shards for the sake of memory alone: each variable on the dim that suits it best."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_spmd.layouts._pairs import Axes


def add_shares(axes: Axes, variables: Sequence[Any], axis: str, count: int, min_size: int) -> None:
    """Shard each variable over `axis`, on its largest dim that is free and divides evenly."""
    for names, variable in zip(axes, variables, strict=True):
        dim = _best_dim(names, variable.shape, count, min_size)
        if dim is not None:
            names[dim] = axis


def _best_dim(
    names: Sequence[str | None], shape: Sequence[int], count: int, min_size: int
) -> int | None:
    if np.prod(shape, dtype=np.int64) < min_size:
        return None
    free = [i for i, size in enumerate(shape) if names[i] is None and size % count == 0]
    # The first of equals: parts along the first dim are in one piece.
    return max(free, key=lambda i: shape[i], default=None)
