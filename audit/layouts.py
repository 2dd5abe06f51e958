"""How the audit lays the inputs of a call out on a mesh of 2 x 2."""

from collections.abc import Iterator
from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

Layout = tuple[Placement, Placement]
Variant = list[Layout | None]


class ShardEverything(keras.distribution.ModelParallel):
    """Every variable on the last dim that divides evenly, which no pattern of names can say."""

    def get_variable_layout(self, variable: Any) -> keras.distribution.TensorLayout:
        even = [dim for dim, size in enumerate(variable.shape) if size and size % 2 == 0]
        axes = ["model" if even and dim == even[-1] else None for dim in range(len(variable.shape))]
        return keras.distribution.TensorLayout(axes, self.device_mesh)


def layouts(x: torch.Tensor) -> Iterator[Layout]:
    """Every dim over one axis and over both, two dims, and pending sums."""
    whole = Replicate()
    for dim in range(x.ndim):
        yield Shard(dim), whole
    for dim in range(x.ndim):
        yield Shard(dim), Shard(dim)
    if x.ndim > 1:
        yield Shard(0), Shard(1)
        yield Shard(x.ndim - 1), Shard(0)
    if x.is_floating_point():
        yield Partial(), whole
        if x.ndim:
            yield Shard(0), Partial()


def few_layouts(x: torch.Tensor) -> Iterator[Layout]:
    """Enough to see that a dtype makes no difference: the first dim, the last, both, a sum."""
    if x.ndim:
        yield Shard(0), Replicate()
    if x.ndim > 1:
        yield Shard(x.ndim - 1), Replicate()
        yield Shard(0), Shard(x.ndim - 1)
    if x.dtype != torch.bool:
        yield Replicate(), Partial()


def variants(tensors: list[torch.Tensor], is_brief: bool) -> Iterator[Variant]:
    """Which placement each input has: none, one at a time, and all alike."""
    yield [None] * len(tensors)
    for i, x in enumerate(tensors):
        for layout in few_layouts(x) if is_brief else layouts(x):
            yield [layout if i == k else None for k in range(len(tensors))]
    if len(tensors) > 1:
        for dim in (0, -1):
            yield [(Shard(dim % x.ndim), Replicate()) if x.ndim else None for x in tensors]


def placed(x: torch.Tensor, mesh: Any, placements: Layout) -> DTensor:
    """With these placements; what is Partial has a part of the value on each rank."""
    replicated = [Replicate() if p.is_partial() else p for p in placements]
    result = DTensor.from_local(x, mesh, [Replicate()] * 2).redistribute(mesh, replicated)
    local = result.to_local()
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            # These add up to the very same number, whatever the dtype.
            local = local * (2 if mesh.get_local_rank(axis) == 0 else -1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def describe(variant: Variant) -> str:
    def one(layout: Layout | None) -> str:
        if layout is None:
            return "R"
        return "".join(
            f"S{p.dim}" if isinstance(p, Shard) else "P" if p.is_partial() else "R" for p in layout
        )

    return " ".join(one(layout) for layout in variant)
