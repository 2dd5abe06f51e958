"""`gather` along a sharded dim.

As with embeddings, torch marks what a rank doesn't have with a mask that it later can't apply. Here
a rank gives zeros for the elements that it doesn't have: an ordinary pending sum.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from keras_spmd._layouts import local_shape_and_offset
from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import local_as, mesh_of, without_empty_shards, wrap


def _dim_on(x: Any, axis: int) -> int | None:
    """The dim that a mesh axis shards, if it shards one."""
    if isinstance(x, DTensor) and isinstance(x.placements[axis], Shard):
        return x.placements[axis].dim
    return None


def _plan(mesh: DeviceMesh, x: Any, dim: int, index: Any) -> tuple[list, list, list]:
    """Placements of the source, the index and the result."""
    of_x: list[Placement] = []
    of_index: list[Placement] = []
    of_result: list[Placement] = []
    usable: list[Placement] = []
    if isinstance(x, DTensor):
        usable = without_empty_shards(x.placements, x.shape, mesh, dim)
    for axis in range(mesh.ndim):
        source, wanted = _dim_on(x, axis), _dim_on(index, axis)
        source_plan: tuple[Placement, Placement, Placement] = (Replicate(),) * 3
        if source == dim and usable[axis] == Shard(dim):
            source_plan = (Shard(dim), Replicate(), Partial())
        elif wanted == dim:
            source_plan = (Replicate(), Shard(dim), Shard(dim))
        else:
            other = source if source is not None and source != dim else wanted
            if other is not None and x.shape[other] == index.shape[other]:
                source_plan = (Shard(other),) * 3
        for plan, placement in zip((of_x, of_index, of_result), source_plan, strict=True):
            plan.append(placement)
    return of_x, of_index, of_result


@handler("aten.gather.default")
def gather(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, dim, index = args[:3]
    mesh = mesh_of(x, index)
    if x.ndim == 0 or index.ndim == 0:
        dim, of_x, of_index, of_result = 0, *([Replicate()] * mesh.ndim for _ in range(3))
    else:
        dim %= x.ndim
        of_x, of_index, of_result = _plan(mesh, x, dim, index)
    local_x, local_index = local_as(x, mesh, of_x), local_as(index, mesh, of_index)
    if Shard(dim) in of_x and x.ndim:
        shape, offset = local_shape_and_offset(x.shape, mesh, of_x)
        local_index = local_index - offset[dim]
        is_mine = (local_index >= 0) & (local_index < shape[dim])
        found = op(local_x, dim, torch.where(is_mine, local_index, 0))
        local = torch.where(is_mine, found, found.new_zeros(()))
    else:
        local = op(local_x, dim, local_index)
    return wrap(local, mesh, of_result, index.shape)
