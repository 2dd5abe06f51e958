"""`auto_shard_dataset=False`: what a rank reads is its own part of each global batch.

Nobody else knows how many rows that is, so ranks tell each other before each step. A rank that has
no batch left says so, and then all of them end with the same error.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from keras.src import tree

from keras_spmd import _loaders, distribution_lib
from keras_spmd._transfer import as_tensor


def join(batch: Any, distribution: Any) -> Any:
    """One global batch from the rows of all ranks."""

    def join_leaf(leaf: Any) -> Any:
        rows = as_tensor(leaf)
        if not isinstance(rows, torch.Tensor) or rows.ndim == 0:
            return leaf
        layout = distribution.get_data_layout(tuple(rows.shape))
        return distribution_lib.distribute_data_input(rows, layout, distribution.batch_dim_name)

    return tree.map_structure(join_leaf, batch)


def batches(adapter: Any, distribution: Any, steps: int | None) -> Iterator[Any]:
    """Global batches, as long as every rank has one. `steps` is how many Keras will take."""
    limits = [count for count in (steps, adapter.num_batches) if count]
    # A rank that knows its last batch doesn't come back to say that there is no other.
    planned = _tell_each_other(min(limits) if limits else None)
    if len(set(planned)) > 1:
        _refuse(["unknown" if count is None else str(count) for count in planned])
    number, nothing = 0, object()
    iterator = iter(_loaders.whole_batches(adapter))
    while True:
        batch = next(iterator, nothing)
        have = _tell_each_other(batch is not nothing)
        if len(set(have)) > 1:
            _refuse([f"at least {number + 1}" if has else str(number) for has in have])
        if batch is nothing:
            return
        number += 1
        yield join(batch, distribution)


def _tell_each_other(mine: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _refuse(counts: list[str]) -> None:
    had = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    raise ValueError(
        "With auto_shard_dataset=False every rank must have the same number of batches, because "
        f"they compute each step together. This epoch they have {had}. Give each rank equally "
        "many, or pass steps_per_epoch (steps, validation_steps) of what all of them have."
    )
