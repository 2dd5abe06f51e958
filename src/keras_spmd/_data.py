"""This rank's slice of each global batch.

What a user passes is global and the same on every rank, so a rank takes its rows out of every batch
without asking anybody. With `auto_shard_dataset=False` what it has is its own rows already.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import optree
import torch
from keras.src import tree
from torch.distributed.tensor import DTensor

from keras_spmd import (
    _feeds,
    _layouts,
    _loaders,
    _own_rows,
    _promotion,
    _random_state,
    _settings,
    _whereabouts,
)
from keras_spmd._transfer import as_tensor, one_ahead, to_device

_ARGUMENTS = ("x", "y", "sample_weight")


def distribute_batch(batch: Any) -> Any:
    """Lay a batch out over the active mesh: the batch dim is sharded over the data axis.

    Example:

    >>> import numpy as np, keras, keras_spmd
    >>> keras.distribution.set_distribution(keras.distribution.DataParallel())
    >>> batch = np.ones((8, 4), "float32"), np.ones(8)                # the global one
    >>> x, y = keras_spmd.distribute_batch(batch)                     # this rank has its rows
    >>> x.shape[0], y.shape[0]
    (8, 8)

    Args:
        batch: An array, a tensor, or a structure of them with None at places. DTensors stay as they
            are, and so does what has no rows (numbers, strings).

    Returns:
        The same structure. Without a distribution it is returned as it is.
    """
    distribution = _layouts.active_distribution()
    if distribution is None or _layouts.is_mesh_of_one(distribution.device_mesh):
        return batch
    _whereabouts.note()
    if not distribution.auto_shard_dataset:
        return _own_rows.join(batch, distribution)
    return tree.map_structure(lambda leaf: _cut(leaf, distribution), batch)


def _cut(leaf: Any, distribution: Any) -> Any:
    """This rank's part of a global leaf, as a DTensor."""
    tensor = as_tensor(leaf)
    if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
        return leaf
    mesh = _layouts.compute_mesh(distribution.device_mesh)
    assert mesh is not None
    if isinstance(tensor, DTensor):
        return _checked(tensor, mesh)
    _promotion.check_promoted(tensor, "a batch")
    placements = _batch_placements(tuple(tensor.shape), distribution)
    local = to_device(_layouts.local_slice(tensor, mesh, placements))
    return _layouts.wrap_local(local, mesh, placements, tensor.shape)


def _checked(x: DTensor, mesh: Any) -> DTensor:
    if x.device_mesh != mesh:
        raise ValueError(
            f"A batch holds a DTensor of shape {tuple(x.shape)} on the mesh {x.device_mesh}, but "
            f"the active distribution has the mesh {mesh}. Pass plain tensors or arrays, or lay it "
            "out on the active mesh with keras_spmd.distribute_batch."
        )
    return x


def _batch_placements(shape: tuple[int, ...], distribution: Any) -> tuple:
    return _layouts.placements_of(distribution.get_data_layout(shape), shape, what="a batch")


def _wrap_rows(leaf: Any, size: int, distribution: Any) -> Any:
    """This rank's rows of a leaf of a batch of `size` rows."""
    tensor = as_tensor(leaf)
    if not isinstance(tensor, torch.Tensor):
        return leaf
    local = to_device(tensor)
    mesh = _layouts.compute_mesh(distribution.device_mesh)
    if mesh is None or tensor.ndim == 0:
        return local
    shape = (size, *tensor.shape[1:])
    return _layouts.wrap_local(local, mesh, _batch_placements(shape, distribution), shape)


# Whether the step that was made last is a graph. Without a distribution only such steps get arrays
# from here: they are so fast that Keras's loader would take longer.
for_graph = False


class _RowsOfRank:
    """Which rows of a batch this rank computes. Equal for equal distributions."""

    def __init__(self, distribution: Any) -> None:
        self.distribution = distribution

    def __call__(self, count: int) -> slice:
        mesh = _layouts.compute_mesh(self.distribution.device_mesh)
        if mesh is None:
            return slice(0, count)
        placements = _batch_placements((count,), self.distribution)
        (size,), (start,) = _layouts.local_shape_and_offset((count,), mesh, placements)
        return slice(start, start + size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RowsOfRank) and other.distribution is self.distribution

    def __hash__(self) -> int:
        return id(self.distribution)


def get_iterator_or(original: Callable) -> Callable:
    """`TorchEpochIterator._get_iterator`: batches come out laid out, each rank reading its rows."""

    def _get_iterator(self: Any) -> Any:
        feed = _feeds.feed_of(self)
        if feed is None:
            return batches_of(self)
        return feed.counted(lambda: batches_of(self), self.data_adapter)

    def batches_of(self: Any) -> Any:
        distribution = _layouts.active_distribution()
        if distribution is None:
            arrays = _loaders.array_batches(self.data_adapter) if for_graph else None
            if arrays is None:
                return original(self)
            return one_ahead(_map(to_device, batch) for batch in arrays)
        batches = _batches(self.data_adapter, distribution, self.steps_per_epoch)
        return one_ahead(batches) if _loaders.can_look_ahead(self.data_adapter) else batches

    return _get_iterator


def _batches(adapter: Any, distribution: Any, steps: int | None) -> Iterable[Any]:
    alone = _layouts.is_mesh_of_one(distribution.device_mesh)
    if not distribution.auto_shard_dataset and not alone:
        return _own_rows.batches(adapter, distribution, steps)
    # To find out whether ranks have the same data, all of it must be read.
    parts = None if _settings.check() else _loaders.parts_of(adapter, _RowsOfRank(distribution))
    if parts is None:
        return _cut_batches(adapter, distribution, alone)
    wrap = functools.partial(_wrap_rows, distribution=distribution)
    return (_map(functools.partial(wrap, size=part.size), part.rows) for part in parts)


def _map(function: Callable, batch: Any) -> Any:
    leaves, structure = optree.tree_flatten(batch, namespace="keras")
    return structure.unflatten([function(leaf) for leaf in leaves])


def _cut_batches(adapter: Any, distribution: Any, alone: bool) -> Iterator[Any]:
    for batch in _loaders.whole_batches(adapter):
        if alone:
            yield tree.map_structure(lambda leaf: to_device(as_tensor(leaf)), batch)
        else:
            yield tree.map_structure(lambda leaf: _cut(leaf, distribution), batch)


def iter_or(original: Callable) -> Callable:
    """`TorchEpochIterator.__iter__`: an epoch begins with one random state on all ranks."""

    def __iter__(self: Any) -> Any:
        distribution = _layouts.active_distribution()
        if distribution is not None and not _layouts.is_mesh_of_one(distribution.device_mesh):
            _random_state.keep_equal(warn=distribution.auto_shard_dataset)
        _feeds.begin_iterating(self)
        original(self)
        _feeds.pass_over(self)
        return self

    return __iter__


def get_data_adapter_or(original: Callable) -> Callable:
    """`get_data_adapter`: Keras takes only tf.data on a job of several processes."""

    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        distribution = _layouts.active_distribution()
        if distribution is None or not distribution._is_multi_process:
            return original(*args, **kwargs)
        if distribution.auto_shard_dataset:
            _check_is_global(args, kwargs)
        # Batches are cut when they come out, so for the adapter there is one process.
        distribution._is_multi_process = False
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            if "Unrecognized data type" not in str(error):
                raise
            raise ValueError(
                f"Unrecognized data type: {type(_given(args, kwargs)['x']).__name__}. Pass NumPy "
                "arrays, tensors or data frames (or lists and dicts of them), a PyDataset, a "
                "torch DataLoader, a generator of batches, a grain dataset or a tf.data.Dataset."
            ) from error
        finally:
            distribution._is_multi_process = True

    return get_data_adapter


def _given(args: tuple, kwargs: dict) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}


def _check_is_global(args: tuple, kwargs: dict) -> None:
    given = _given(args, kwargs)
    loader = given.get("x")
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, torch.utils.data.distributed.DistributedSampler):
        raise ValueError(
            "The DataLoader has a DistributedSampler, which gives each rank rows of its own, but "
            "with this distribution data is global: every rank passes all of it and computes its "
            "rows of each batch. Leave the sampler away, or set auto_shard_dataset=False on the "
            "distribution and make the batch size that of one rank."
        )
    if not _settings.check():
        return
    for name in _ARGUMENTS:
        for leaf in tree.flatten(given.get(name)):
            if isinstance(as_tensor(leaf), torch.Tensor) and not isinstance(leaf, DTensor):
                _promotion.check_promoted(as_tensor(leaf), f"the argument `{name}`")
