"""Counts of numbers: each rank counts its own, and the counts add up. torch has no rules."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from keras_spmd._capturing import is_capturing
from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import local_as, mesh_of, reduce_over, replicated, wrap
from keras_spmd.rules.fallback import run_replicated


def _shards(mesh: DeviceMesh, *tensors: Any) -> list[Placement]:
    """For each axis how it shards the first of these that it shards."""
    found: list[Placement] = []
    for axis in range(mesh.ndim):
        placements = [x.placements[axis] for x in tensors if isinstance(x, DTensor)]
        found.append(next((p for p in placements if isinstance(p, Shard)), Replicate()))
    return found


def _added_up(shards: list[Placement]) -> list[Placement]:
    return [Partial() if isinstance(p, Shard) else p for p in shards]


@handler("aten.bincount.default")
def bincount(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    if is_capturing():  # How many counts there are depends on the numbers.
        return run_replicated(op, args, kwargs)
    names = dict(zip(("x", "weights", "minlength"), args, strict=False)) | kwargs
    x, weights = names["x"], names.get("weights")
    mesh = mesh_of(x, weights)
    shards = _shards(mesh, x, weights)
    mine = local_as(x, mesh, shards)
    count = mine.max() + 1 if mine.numel() else mine.new_zeros(())
    for axis, placement in enumerate(shards):
        if isinstance(placement, Shard):
            count = reduce_over(count, mesh, axis, "max")
    count = max(int(count), names.get("minlength", 0))
    return wrap(op(mine, local_as(weights, mesh, shards), count), mesh, _added_up(shards))


@handler("aten.histogram.bin_ct")
def histogram(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, weight = args[0], kwargs.get("weight")
    if kwargs.get("range") is None or kwargs.get("density"):
        return run_replicated(op, args, kwargs)
    mesh = mesh_of(x, weight)
    shards = _shards(mesh, x, weight)
    own = {**kwargs, "weight": local_as(weight, mesh, shards)}
    counts, edges = op(local_as(x, mesh, shards), *args[1:], **own)
    return wrap(counts, mesh, _added_up(shards)), wrap(edges, mesh, replicated(mesh))
