"""`scatter_add` and `scatter_reduce` of sharded rows, behind segment sums and many metrics.

torch has no rule for the latter. Each rank scatters the rows it has; what it started from counts on
one rank only, so that the results add up.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import local_as, mesh_of, only_if, wrap
from keras_spmd.rules.fallback import run_replicated

# What the results of the ranks are combined with, for each reduction.
_COMBINED_BY = {"sum": "sum", "prod": "product", "amax": "max", "amin": "min"}
# What ranks start from that don't have what the result starts from; None: all may have it.
_NEUTRAL = {"sum": 0, "prod": 1}


def _plan(mesh: DeviceMesh, target: Any, dim: int, index: Any, source: Any) -> tuple[list, list]:
    """Placements of the target, and of the index and the source."""
    of_target: list[Placement] = []
    of_source: list[Placement] = []
    for axis in range(mesh.ndim):
        shards = [
            x.placements[axis]
            for x in (source, index, target)
            if isinstance(x, DTensor) and isinstance(x.placements[axis], Shard)
        ]
        wanted: Placement = shards[0] if shards else Replicate()
        is_across = isinstance(wanted, Shard) and wanted.dim != dim
        if index.shape != source.shape or (
            is_across and target.shape[wanted.dim] != index.shape[wanted.dim]
        ):
            wanted = Replicate()
        of_source.append(wanted)
        of_target.append(wanted if is_across else Replicate())
    return of_target, of_source


def _scatter(
    op: torch._ops.OpOverload, args: tuple, kwargs: dict, combined_by: str, neutral: Any
) -> Any:
    target, dim, index, source, *rest = args
    mesh = mesh_of(args)
    dim = dim % target.ndim if target.ndim else 0
    of_target, of_source = _plan(mesh, target, dim, index, source)
    axes = [axis for axis, p in enumerate(of_source) if p == Shard(dim)]
    start = local_as(target, mesh, of_target)
    coordinate = mesh.get_coordinate()
    if axes and neutral is not None:
        start = only_if(not any(coordinate[axis] for axis in axes), start, neutral)
    local = op(
        start,
        dim,
        local_as(index, mesh, of_source),
        local_as(source, mesh, of_source),
        *rest,
        **kwargs,
    )
    pending = [Partial(combined_by) if axis in axes else p for axis, p in enumerate(of_target)]
    result = wrap(local, mesh, pending, target.shape)
    if combined_by == "sum":
        return result
    return wrap(local_as(result, mesh, of_target), mesh, of_target, target.shape)


@handler("aten.scatter_add.default")
def scatter_add(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    return _scatter(op, args, kwargs, "sum", 0)


@handler("aten.scatter_reduce.two")
def scatter_reduce(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    reduction = args[4]
    if reduction in _COMBINED_BY and kwargs.get("include_self", True):
        return _scatter(op, args, kwargs, _COMBINED_BY[reduction], _NEUTRAL.get(reduction))
    return run_replicated(op, args, kwargs)
