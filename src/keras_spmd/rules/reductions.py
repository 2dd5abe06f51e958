"""argmax and argmin along a sharded dim.

torch's own fails on shapes where a shard of the other dims is as long as the mesh axis. Here each
rank finds its best element, and the best of those is the answer: one small gather.
"""

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from keras_spmd._layouts import local_shape_and_offset
from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import (
    local_as,
    replicated,
    stack_over,
    to_replicated,
    without_empty_shards,
    without_partial,
    wrap,
)


@handler("aten.argmax.default", "aten.argmin.default")
def arg_best(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, dim, keepdim = _arguments(args, kwargs)
    mesh = x.device_mesh
    if dim is None or x.ndim == 0:
        return wrap(op(to_replicated(x), dim, keepdim), mesh, replicated(mesh))
    dim %= x.ndim
    sharded = [p if isinstance(p, Shard) else Replicate() for p in without_partial(x.placements)]
    placements = without_empty_shards(sharded, x.shape, mesh, dim)
    local = local_as(x, mesh, placements)
    index = op(local, dim, True)
    axes = [axis for axis, p in enumerate(placements) if p == Shard(dim)]
    if axes:
        best = local.gather(dim, index)
        index = index + local_shape_and_offset(x.shape, mesh, placements)[1][dim]
        for axis in axes:
            candidates, indices = stack_over(best, mesh, axis), stack_over(index, mesh, axis)
            choice = op(candidates, 0, True)
            best, index = candidates.gather(0, choice)[0], indices.gather(0, choice)[0]
    shape = list(x.shape)
    shape[dim] = 1
    result_like = [Replicate() if p == Shard(dim) else p for p in placements]
    if not keepdim:
        index = index.squeeze(dim)
        del shape[dim]
        result_like = [
            Shard(p.dim - 1) if isinstance(p, Shard) and p.dim > dim else p for p in result_like
        ]
    return wrap(index, mesh, result_like, shape)


def _arguments(args: tuple, kwargs: dict) -> tuple[Any, int | None, bool]:
    x, *rest = args
    dim = rest[0] if rest else kwargs.get("dim")
    keepdim = rest[1] if len(rest) > 1 else kwargs.get("keepdim", False)
    return x, dim, keepdim
