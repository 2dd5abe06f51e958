"""Concatenation: sharded on any other dim, or of pending sums.

`cat` keeps the order in which its inputs' dims lie in memory, and torch foretells that order for
the whole tensor. Where dims have size 1 a shard can lie otherwise, and a view that fits the whole
doesn't fit the shard. Here the whole is said to lie as the shards do.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import local_as, mesh_of, wrap


@handler("aten.cat.default")
def cat(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    mesh = mesh_of(tensors)
    # torch ignores empty tensors of shape (0,) among others.
    parts = [x for x in tensors if tuple(x.shape) != (0,)] or list(tensors)
    dim %= parts[0].ndim
    placements = [_choice(parts, mesh, axis, dim) for axis in range(mesh.ndim)]
    result = op([local_as(x, mesh, placements) for x in parts], dim)
    shape = list(parts[0].shape)
    shape[dim] = sum(x.shape[dim] for x in parts)
    return wrap(result, mesh, placements, shape)


def _choice(parts: list, mesh: DeviceMesh, axis: int, dim: int) -> Placement:
    found: list[Placement] = [
        x.placements[axis] if isinstance(x, DTensor) and x.device_mesh == mesh else Replicate()
        for x in parts
    ]
    if found[0].is_partial() and all(p == found[0] for p in found):
        return found[0]
    sizes: dict[Placement, int] = {}
    for x, placement in zip(parts, found, strict=True):
        if isinstance(placement, Shard) and placement.dim != dim:
            sizes[placement] = sizes.get(placement, 0) + x.numel()
    return max(sizes, key=lambda p: (sizes[p], -p.dim)) if sizes else Replicate()
