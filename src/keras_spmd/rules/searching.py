"""Places of numbers in a sorted row: each number is looked up by itself. torch has no rule."""

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from keras_spmd.rules._registry import sharding


@sharding("aten.searchsorted.Tensor")
def searchsorted(row: Any, numbers: Any, **options: Any) -> list:
    """One row for all numbers; a row for each of them stays with its numbers."""
    choices: list = [([Replicate()], [Replicate(), Replicate()])]
    for dim in range(len(numbers.shape)):
        if len(row.shape) == 1:
            choices.append(([Shard(dim)], [Replicate(), Shard(dim)]))
        elif dim < len(row.shape) - 1:
            choices.append(([Shard(dim)], [Shard(dim), Shard(dim)]))
    return choices


@sharding("aten.bucketize.Tensor")
def bucketize(numbers: Any, row: Any, **options: Any) -> list:
    return [
        ([placement], [placement, Replicate()])
        for placement in (Replicate(), *map(Shard, range(len(numbers.shape))))
    ]
