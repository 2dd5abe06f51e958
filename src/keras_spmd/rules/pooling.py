"""Pooling and windows: sharded on batch and channels.

torch has rules for some of them only, and older versions for none. Kernels refuse a tensor without
channels, which a rank may have by torch's rules.
"""

from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from keras_spmd._layouts import local_shape_and_offset
from keras_spmd.rules._registry import handler, sharding
from keras_spmd.rules._specs import is_shardable, local_as, wrap


def _before_windows(x: Any, spatial: int) -> list:
    """On every dim but the last ones, over which a window goes, if each rank has a part."""
    dims = range(len(x.shape) - spatial)
    return [Replicate(), *(Shard(d) for d in dims if is_shardable(x.shape[d], x.mesh))]


@sharding("aten.avg_pool2d.default", "aten._adaptive_avg_pool2d.default")
def average_pool(x: Any, *window: Any) -> list:
    return [([p], [p, *[None] * len(window)]) for p in _before_windows(x, 2)]


@sharding("aten.avg_pool3d.default", "aten._adaptive_avg_pool3d.default")
def average_pool_3d(x: Any, *window: Any) -> list:
    return [([p], [p, *[None] * len(window)]) for p in _before_windows(x, 3)]


@sharding("aten.max_pool2d_with_indices.default", "aten.adaptive_max_pool2d.default")
def max_pool(x: Any, *window: Any) -> list:
    return [([p, p], [p, *[None] * len(window)]) for p in _before_windows(x, 2)]


@sharding("aten.max_pool3d_with_indices.default", "aten.adaptive_max_pool3d.default")
def max_pool_3d(x: Any, *window: Any) -> list:
    return [([p, p], [p, *[None] * len(window)]) for p in _before_windows(x, 3)]


@sharding("aten.avg_pool2d_backward.default", "aten._adaptive_avg_pool2d_backward.default")
def average_pool_backward(grad: Any, x: Any, *window: Any) -> list:
    return [([p], [p, p, *[None] * len(window)]) for p in _before_windows(x, 2)]


@sharding("aten.avg_pool3d_backward.default", "aten._adaptive_avg_pool3d_backward.default")
def average_pool_3d_backward(grad: Any, x: Any, *window: Any) -> list:
    return [([p], [p, p, *[None] * len(window)]) for p in _before_windows(x, 3)]


@sharding(
    "aten.max_pool2d_with_indices_backward.default", "aten.adaptive_max_pool2d_backward.default"
)
def max_pool_backward(grad: Any, x: Any, *rest: Any) -> list:
    """The last argument is the indices, which count within a channel."""
    window = [None] * (len(rest) - 1)
    return [([p], [p, p, *window, p]) for p in _before_windows(x, 2)]


@sharding(
    "aten.max_pool3d_with_indices_backward.default", "aten.adaptive_max_pool3d_backward.default"
)
def max_pool_3d_backward(grad: Any, x: Any, *rest: Any) -> list:
    window = [None] * (len(rest) - 1)
    return [([p], [p, p, *window, p]) for p in _before_windows(x, 3)]


@sharding("aten.unfold.default", "aten.unfold_copy.default")
def unfold(x: Any, dim: int, size: int, step: int) -> list:
    rank = len(x.shape)
    others = [Shard(d) for d in range(rank) if d != dim % max(rank, 1)]
    return [([p], [p, None, None, None]) for p in (Replicate(), *others)]


@handler("aten.unfold_backward.default")
def unfold_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Not a matter of placements alone: it is told the sizes of the whole."""
    grad, sizes, dim, *window = args
    mesh, rank = grad.device_mesh, len(sizes)
    placements: list[Placement] = [
        p if isinstance(p, Shard) and p.dim < rank and p.dim != dim % rank else Replicate()
        for p in grad.placements
    ]
    local_sizes, _ = local_shape_and_offset(sizes, mesh, placements)
    result = op(local_as(grad, mesh, placements), local_sizes, dim, *window)
    return wrap(result, mesh, placements, sizes)


@sharding("aten.im2col.default", "aten.col2im.default")
def windows(x: Any, *sizes: Any) -> list:
    """Not on channels, which lie between the parts of a window."""
    rest = [None] * len(sizes)
    batched = len(x.shape) == (3 if len(sizes) == 5 else 4)
    return [([p], [p, *rest]) for p in ([Replicate(), Shard(0)] if batched else [Replicate()])]
