"""Triangular systems: sharded on a batch dim. torch's rule doesn't shard both sides alike."""

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from keras_spmd.rules._registry import sharding


@sharding("aten.linalg_solve_triangular.default")
def solve_triangular(matrix: Any, right: Any, **options: Any) -> list:
    choices: list = [([Replicate()], [Replicate(), Replicate()])]
    if tuple(matrix.shape[:-2]) == tuple(right.shape[:-2]):
        batch = range(len(matrix.shape) - 2)
        choices += [([Shard(dim)], [Shard(dim), Shard(dim)]) for dim in batch]
    if options.get("left", True):
        columns = Shard(len(right.shape) - 1)
        choices.append(([columns], [Replicate(), columns]))
    return choices
