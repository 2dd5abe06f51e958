"""`auto_shard_dataset=False`: what a rank reads is its own part of each global batch.

Nobody else knows how many rows that is, so ranks tell each other before each step. A rank that has
no batch left says so, and then all of them end with the same error.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from keras.src import tree

from keras_spmd import _loaders, distribution_lib


def join(batch: Any, distribution: Any) -> Any:
    """One global batch from the rows of all ranks."""

    def join_leaf(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or len(leaf.shape) == 0:
            return leaf
        layout = distribution.get_data_layout(tuple(leaf.shape))
        return distribution_lib.distribute_data_input(leaf, layout, distribution.batch_dim_name)

    return tree.map_structure(join_leaf, batch)


def batches(adapter: Any, distribution: Any, as_tensor: Callable) -> Iterator[Any]:
    """Global batches, as long as every rank has one."""
    number, nothing = 0, object()
    iterator = iter(_loaders.whole_batches(adapter))
    while True:
        batch = next(iterator, nothing)
        _check_all_have(batch is not nothing, number, adapter.num_batches)
        if batch is nothing:
            return
        number += 1
        yield join(tree.map_structure(as_tensor, batch), distribution)


def _check_all_have(has_one: bool, so_far: int, total: int | None) -> None:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (has_one, so_far, total))
    if len({has for has, _, _ in everybody}) == 1:
        return
    counts = []
    for rank, (has, number, total) in enumerate(everybody):
        count = str(number) if not has else str(total) if total else f"at least {number + 1}"
        counts.append(f"rank {rank}: {count}")
    raise ValueError(
        "With auto_shard_dataset=False every rank must have the same number of batches, because "
        f"they compute each step together. This epoch they had {', '.join(counts)}. Give each rank "
        "equally many, or pass steps_per_epoch (steps, validation_steps) of what all of them have."
    )
