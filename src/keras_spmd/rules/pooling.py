"""Pooling and windows: sharded on batch and channels. torch has rules for some of them only."""

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from keras_spmd.rules._registry import sharding


def _before_windows(x: Any, spatial: int) -> list:
    """On every dim but the last ones, over which a window goes."""
    return [Replicate(), *map(Shard, range(len(x.shape) - spatial))]


@sharding("aten.avg_pool2d_backward.default")
def average_pool_backward(grad: Any, x: Any, *window: Any) -> list:
    rest = [None] * len(window)
    return [([p], [p, p, *rest]) for p in _before_windows(x, 2)]


@sharding("aten.avg_pool3d_backward.default")
def average_pool_3d_backward(grad: Any, x: Any, *window: Any) -> list:
    rest = [None] * len(window)
    return [([p], [p, p, *rest]) for p in _before_windows(x, 3)]


@sharding("aten.max_pool3d_with_indices_backward.default")
def max_pool_3d_backward(grad: Any, x: Any, *rest: Any) -> list:
    window = [None] * (len(rest) - 1)
    return [([p], [p, p, *window, p]) for p in _before_windows(x, 3)]


@sharding("aten.adaptive_max_pool2d_backward.default")
def adaptive_max_pool_backward(grad: Any, x: Any, indices: Any) -> list:
    return [([p], [p, p, p]) for p in _before_windows(x, 2)]


@sharding("aten.adaptive_max_pool3d_backward.default")
def adaptive_max_pool_3d_backward(grad: Any, x: Any, indices: Any) -> list:
    return [([p], [p, p, p]) for p in _before_windows(x, 3)]


@sharding("aten.im2col.default", "aten.col2im.default")
def windows(x: Any, *sizes: Any) -> list:
    """Not on channels, which lie between the parts of a window."""
    rest = [None] * len(sizes)
    batched = len(x.shape) == (3 if len(sizes) == 5 else 4)
    return [([p], [p, *rest]) for p in ([Replicate(), Shard(0)] if batched else [Replicate()])]
