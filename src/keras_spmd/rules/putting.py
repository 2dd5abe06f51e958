"""`x[i, j] = values`: each rank writes what falls into its part.

torch gathers `x` where an indexed dim is sharded. Here all that belongs elsewhere is written into a
row beyond the end, which is cut off again: the same ops on every rank, whatever the indices are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from keras_spmd._layouts import local_shape_and_offset
from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import is_pending, local_as, mesh_of, replicated, wrap
from keras_spmd.rules.fallback import run_replicated
from keras_spmd.rules.pending import run_without_pending_sums
from keras_spmd.rules.writing import write_through


@handler("aten.index_put.default", "aten.index_put_.default")
def index_put(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, indices, values, *accumulate = args
    mesh, is_in_place = mesh_of(args), op is torch.ops.aten.index_put_.default
    if isinstance(x, DTensor) and is_pending(x):
        return run_without_pending_sums(op, args, kwargs)
    if isinstance(x, DTensor) and not _can_put(x, indices):
        return run_replicated(op, args, kwargs)
    whole = [local_as(index, mesh, replicated(mesh)) for index in indices]
    if not isinstance(x, DTensor):
        local = op(x, whole, local_as(values, mesh, replicated(mesh)), *accumulate, **kwargs)
        return local if is_in_place else wrap(local, mesh, replicated(mesh))
    part_of_values = local_as(values, mesh, _placements_of_values(x, indices, values))
    local = _put(op, x, mesh, whole, part_of_values, accumulate, kwargs)
    if not is_in_place:
        return wrap(local, mesh, x.placements, x.shape)
    if local is not x._local_tensor:
        x._local_tensor.copy_(local)
    write_through(x)
    return x


def _can_put(x: DTensor, indices: Sequence[Any]) -> bool:
    """Whether these are numbers of elements, and `x` is divided into plain parts."""
    given = [index for index in indices if index is not None]
    return (
        bool(given)
        and all(index.dtype not in (torch.bool, torch.uint8) for index in given)
        and not any(isinstance(p, _StridedShard) for p in x.placements)
    )


def _placements_of_values(x: DTensor, indices: Sequence[Any], values: Any) -> list[Placement]:
    """Sharded like `x` where a dim of both is, and whole along all others."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    new = len(torch.broadcast_shapes(*(indices[dim].shape for dim in given)))
    others = [dim for dim in range(x.ndim) if dim not in given]
    # As in numpy: what the indices give comes in their place if they stand together, else first.
    stand_together = given == list(range(given[0], given[-1] + 1))
    before = [dim for dim in others if stand_together and dim < given[0]]
    order = [*before, *[None] * new, *(dim for dim in others if dim not in before)]
    order = order[len(order) - values.ndim :] if values.ndim else []
    placements: list[Placement] = []
    for p in x.placements:
        place = order.index(p.dim) if isinstance(p, Shard) and p.dim in order else None
        is_whole = place is None or values.shape[place] == 1
        placements.append(Replicate() if is_whole else Shard(place))
    return placements


def _put(
    op: torch._ops.OpOverload,
    x: DTensor,
    mesh: DeviceMesh,
    indices: list[Any],
    values: torch.Tensor,
    accumulate: Sequence[bool],
    kwargs: dict,
) -> torch.Tensor:
    sharded = [
        dim for dim, index in enumerate(indices) if index is not None and Shard(dim) in x.placements
    ]
    if not sharded:
        return op(x._local_tensor, indices, values, *accumulate, **kwargs)
    shape, offset = local_shape_and_offset(x.shape, mesh, x.placements)
    is_mine: Any = True
    for dim in sharded:
        index = torch.where(indices[dim] < 0, indices[dim] + x.shape[dim], indices[dim])
        indices[dim] = index - offset[dim]
        is_mine = is_mine & (indices[dim] >= 0) & (indices[dim] < shape[dim])
    first, *rest = sharded
    indices[first] = torch.where(is_mine, indices[first], shape[first])
    for dim in rest:
        indices[dim] = torch.where(is_mine, indices[dim], 0)
    beyond = list(shape)
    beyond[first] = 1
    target = torch.cat([x._local_tensor, x._local_tensor.new_zeros(beyond)], first)
    return op(target, indices, values, *accumulate, **kwargs).narrow(first, 0, shape[first])
