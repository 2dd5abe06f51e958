"""Softmax along a sharded dim: each rank keeps its part of the classes.

torch gathers the whole tensor for it, which for the logits of a large vocabulary is the largest of
the model. Two numbers for each row are all that ranks have to tell each other.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import (
    Placements,
    local_as,
    reduce_over,
    without_empty_shards,
    without_partial,
    wrap,
)


def _placements(x: DTensor, dim: int) -> Placements:
    """As it lies, but for pending sums, and for shards of which some rank would have none."""
    placements = without_partial(x.placements)
    return tuple(without_empty_shards(placements, x.shape, x.device_mesh, dim))


def _over(x: torch.Tensor, mesh: DeviceMesh, axes: list[int], how: str) -> torch.Tensor:
    for axis in axes:
        x = reduce_over(x, mesh, axis, how)
    return x


@handler("aten._log_softmax.default", "aten._softmax.default")
def softmax(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, dim, half_to_float = args
    mesh, dim = x.device_mesh, dim % max(x.ndim, 1)
    placements = _placements(x, dim)
    local = local_as(x, mesh, placements)
    axes = [axis for axis, p in enumerate(placements) if p == Shard(dim)]
    if not axes:
        return wrap(op(local, dim, half_to_float), mesh, placements, x.shape)
    dtype = torch.float32 if half_to_float else local.dtype
    local = local.to(_precise(local.dtype))
    local = local - _over(local.amax(dim, keepdim=True), mesh, axes, "max")
    total = _over(local.exp().sum(dim, keepdim=True), mesh, axes, "sum")
    result = local - total.log() if "log" in op.__name__ else local.exp() / total
    return wrap(result.to(dtype).contiguous(), mesh, placements, x.shape)


@handler("aten._log_softmax_backward_data.default", "aten._softmax_backward_data.default")
def softmax_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    grad, output, dim, dtype = args
    like = output if isinstance(output, DTensor) else grad
    mesh, dim = like.device_mesh, dim % max(like.ndim, 1)
    placements = _placements(like, dim)
    local_grad, local = local_as(grad, mesh, placements), local_as(output, mesh, placements)
    axes = [axis for axis, p in enumerate(placements) if p == Shard(dim)]
    if not axes:
        return wrap(op(local_grad, local, dim, dtype), mesh, placements, like.shape)
    local_grad, local = (x.to(_precise(x.dtype)) for x in (local_grad, local))
    if "log" in op.__name__:
        total = _over(local_grad.sum(dim, keepdim=True), mesh, axes, "sum")
        result = local_grad - local.exp() * total
    else:
        weighted = local_grad * local
        total = _over(weighted.sum(dim, keepdim=True), mesh, axes, "sum")
        result = weighted - local * total
    return wrap(result.to(dtype).contiguous(), mesh, placements, like.shape)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Sums of half-precision numbers are made in single precision, as torch's own kernels do."""
    return torch.float32 if dtype.itemsize < 4 else dtype
