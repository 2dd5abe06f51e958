"""Embedding lookups in a table that is sharded on its rows (the vocabulary) or its columns.

torch marks what a rank doesn't have with a mask that only fits the very shape of the lookup, so any
reshape after it fails. Here a rank gives zeros for the rows that it doesn't have, and the result is
an ordinary pending sum.

Backward, torch doesn't know how the table lies, and every rank gets a gradient of all rows. Here it
is that of the rank's own rows.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from keras_spmd._layouts import local_shape_and_offset
from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import (
    local_as,
    mesh_of,
    replicated,
    without_empty_shards,
    without_partial,
    wrap,
)

ROWS, COLUMNS = Shard(0), Shard(1)


def _sharded(x: Any, mesh: DeviceMesh) -> list[Placement]:
    if not isinstance(x, DTensor):
        return [Replicate()] * mesh.ndim
    return [p if isinstance(p, Shard) else Replicate() for p in without_partial(x.placements)]


def _plan(mesh: DeviceMesh, table: Any, indices: Any) -> tuple[list, list, list]:
    """Placements of the table, the indices and the result."""
    of_table = without_empty_shards(_sharded(table, mesh), table.shape, mesh, 0)
    of_indices = _sharded(indices, mesh)
    result: list[Placement] = []
    for axis in range(mesh.ndim):
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
    if isinstance(indices, DTensor):
        _tables_of(indices)[table.shape[0]] = of_table
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


def _tables_of(indices: DTensor) -> dict[int, list[Placement]]:
    """How the tables lie that these indices were looked up in, by the number of their rows."""
    if not hasattr(indices, "_keras_spmd_tables"):
        indices._keras_spmd_tables = {}
    return indices._keras_spmd_tables


def _plan_backward(mesh: DeviceMesh, grad: Any, indices: Any, rows: list[bool]) -> list[tuple]:
    """For each mesh axis the placements of the gradient, the indices and the table's gradient."""
    columns = grad.ndim - 1
    choices: list[tuple[Placement, Placement, Placement]] = []
    for axis in range(mesh.ndim):
        of_grad = grad.placements[axis] if isinstance(grad, DTensor) else Replicate()
        of_indices = _sharded(indices, mesh)[axis]
        batch = next((p for p in (of_grad, of_indices) if _is_shard_before(p, columns)), None)
        if rows[axis]:
            choices.append((Replicate(), Replicate(), ROWS))
        elif of_grad == Shard(columns):
            choices.append((of_grad, Replicate(), COLUMNS))
        elif batch is not None:
            choices.append((batch, batch, Partial()))
        elif of_grad == Partial():
            choices.append((of_grad, Replicate(), Partial()))
        else:
            choices.append((Replicate(),) * 3)
    return choices


def _is_shard_before(p: Placement, dim: int) -> bool:
    return isinstance(p, Shard) and p.dim < dim


@handler("aten.embedding_dense_backward.default")
def embedding_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    grad, indices, count, padding, by_frequency = args
    mesh = mesh_of(grad, indices)
    if by_frequency:
        # How often an index comes is known of all indices only.
        whole = op(*(local_as(x, mesh, replicated(mesh)) for x in (grad, indices)), *args[2:])
        return wrap(whole, mesh, replicated(mesh))
    of_table = _tables_of(indices).get(count) if isinstance(indices, DTensor) else None
    rows = [p == ROWS for p in of_table or replicated(mesh)]
    of_grad, of_indices, of_result = zip(*_plan_backward(mesh, grad, indices, rows), strict=True)
    local_grad, local_indices = local_as(grad, mesh, of_grad), local_as(indices, mesh, of_indices)
    shape = (count, grad.shape[-1])
    if not any(rows):
        local = op(local_grad, local_indices, count, padding, False)
        return wrap(local, mesh, of_result, shape)
    (own, _), (start, _) = local_shape_and_offset(shape, mesh, of_result)
    mine = local_indices - start
    is_mine = (mine >= 0) & (mine < own) & (local_indices != padding)
    # What belongs to no row of this rank goes to one more, as torch's padding does.
    local = op(local_grad, torch.where(is_mine, mine, own), own + 1, own, False)[:own]
    return wrap(local, mesh, of_result, shape)


def _check_range(indices: torch.Tensor, count: int) -> None:
    """What no rank has is a mistake, as it is without a mesh; a GPU would have to be waited for."""
    is_real = indices.device.type == "cpu" and not isinstance(indices, torch._subclasses.FakeTensor)
    if is_real and indices.numel() and not (indices.min() >= 0 and indices.max() < count):
        raise IndexError(
            f"index out of range in an embedding of {count} rows: the indices reach from "
            f"{int(indices.min())} to {int(indices.max())}"
        )
