"""Embedding lookups in a table that is sharded on its rows (the vocabulary) or its columns.

torch marks what a rank doesn't have with a mask that only fits the very shape of the lookup, so any
reshape after it fails. Here a rank gives zeros for the rows that it doesn't have, and the result is
an ordinary pending sum.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from keras_spmd._layouts import local_shape_and_offset
from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import has_no_empty_shard, local_as, mesh_of, without_partial, wrap

ROWS, COLUMNS = Shard(0), Shard(1)


def _sharded(x: Any, mesh: DeviceMesh) -> list[Placement]:
    if not isinstance(x, DTensor):
        return [Replicate()] * mesh.ndim
    return [p if isinstance(p, Shard) else Replicate() for p in without_partial(x.placements)]


def _plan(mesh: DeviceMesh, table: Any, indices: Any) -> tuple[list, list, list]:
    """Placements of the table, the indices and the result."""
    of_table, of_indices = _sharded(table, mesh), _sharded(indices, mesh)
    result: list[Placement] = []
    for axis in range(mesh.ndim):
        if of_table[axis] == ROWS and not has_no_empty_shard(table.shape[0], mesh):
            of_table[axis] = Replicate()
        if of_table[axis] != Replicate() and of_indices[axis] != Replicate():
            # Both on one axis: gather the smaller, the table or what would be looked up.
            if table.numel() <= indices.numel() * table.shape[1]:
                of_table[axis] = Replicate()
            else:
                of_indices[axis] = Replicate()
        if of_table[axis] == ROWS:
            result.append(Partial())
        elif of_table[axis] == COLUMNS:
            result.append(Shard(indices.ndim))
        else:
            result.append(of_indices[axis])
    return of_table, of_indices, result


@handler("aten.embedding.default")
def embedding(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    table, indices, *rest = args
    mesh = mesh_of(table, indices)
    of_table, of_indices, of_result = _plan(mesh, table, indices)
    local_table = local_as(table, mesh, of_table)
    local_indices = local_as(indices, mesh, of_indices)
    if ROWS in of_table:
        _check_range(local_indices, table.shape[0])
        (count, _), (start, _) = local_shape_and_offset(table.shape, mesh, of_table)
        local_indices = local_indices - start
        is_mine = (local_indices >= 0) & (local_indices < count)
        found = op(local_table, torch.where(is_mine, local_indices, 0), -1)
        local = torch.where(
            is_mine[..., None], found, torch.zeros((), dtype=found.dtype, device=found.device)
        )
    else:
        local = op(local_table, local_indices, *rest)
    return wrap(local, mesh, of_result, (*indices.shape, table.shape[1]))


def _check_range(indices: torch.Tensor, count: int) -> None:
    """What no rank has is a mistake, as it is without a mesh; a GPU would have to be waited for."""
    is_real = indices.device.type == "cpu" and not isinstance(indices, torch._subclasses.FakeTensor)
    if is_real and indices.numel() and not (indices.min() >= 0 and indices.max() < count):
        raise IndexError(
            f"index out of range in an embedding of {count} rows: the indices reach from "
            f"{int(indices.min())} to {int(indices.max())}"
        )
