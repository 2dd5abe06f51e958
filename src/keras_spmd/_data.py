"""This rank's slice of each global batch.

What a user passes is global and the same on every rank, so a rank takes its rows out of every batch
without asking anybody. With `auto_shard_dataset=False` what it has is its own rows already.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from keras.src import tree
from keras.src.backend.torch import core as keras_torch
from torch.distributed.tensor import DTensor

from keras_spmd import _layouts, distribution_lib


def distribute_batch(batch: Any) -> Any:
    """Lay a batch out over the active mesh: the batch dim is sharded over the data axis.

    Example:

    >>> for x, y in batches:                       # the global batch, on every rank
    ...     x, y = keras_spmd.distribute_batch((x, y))
    ...     loss = loss_fn(y, model(x, training=True))

    Args:
        batch: An array, a tensor, or a structure of them with None at places. DTensors stay as they
            are, and so does what has no rows (numbers, strings).

    Returns:
        The same structure. Without a distribution it is returned as it is.
    """
    distribution = _layouts.active_distribution()
    if distribution is None or _layouts.is_mesh_of_one(distribution.device_mesh):
        return batch
    return tree.map_structure(lambda leaf: _distribute(leaf, distribution), batch)


def _distribute(leaf: Any, distribution: Any) -> Any:
    if isinstance(leaf, DTensor) or not _has_rows(leaf):
        return leaf
    tensor = keras_torch.convert_to_tensor(leaf)
    layout = distribution.get_data_layout(tuple(tensor.shape))
    if distribution.auto_shard_dataset:
        return distribution_lib.distribute_tensor(tensor, layout)
    return distribution_lib.distribute_data_input(tensor, layout, distribution.batch_dim_name)


def _has_rows(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim > 0
    return isinstance(leaf, np.ndarray) and leaf.ndim > 0 and leaf.dtype.kind in "biufc"


def get_data_adapter_or(original: Callable) -> Callable:
    """`get_data_adapter`: Keras takes only tf.data on a job of several processes."""

    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        distribution = _layouts.active_distribution()
        if distribution is None or not distribution._is_multi_process:
            return original(*args, **kwargs)
        # Batches are cut when they come out, so for the adapter there is one process.
        distribution._is_multi_process = False
        try:
            return original(*args, **kwargs)
        finally:
            distribution._is_multi_process = True

    return get_data_adapter
