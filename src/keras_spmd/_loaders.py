"""Reading this rank's rows of each global batch.

A loader that can be indexed (arrays, and a `DataLoader` over a map-style dataset) is asked for this
rank's rows alone: all ranks walk through the same order of indices, and each fetches its part of
every batch. Any other loader is read as it is, and each batch is cut when it comes out.

A custom `collate_fn` may look at all samples of a batch, to pad them to the longest, say. So its
batches are read whole.
"""

import contextlib
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import optree
import torch
from keras.src.trainers.data_adapters import (
    ArrayDataAdapter,
    GeneratorDataAdapter,
    PyDatasetAdapter,
    TorchDataLoaderAdapter,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

# Which of the rows of a batch with this many rows this rank reads.
RowsOf = Callable[[int], slice]


class Part(NamedTuple):
    """This rank's rows of a batch of `size` rows."""

    rows: Any
    size: int


class _Request(NamedTuple):
    """What a sampler asks of a dataset: this rank's indices in a batch of `size`.

    `number` says how many rows the epoch had before the first of them, and `seed` is the epoch's.
    """

    indices: list
    size: int
    number: int
    seed: int

    def seed_of(self, position: int) -> int:
        return zlib.crc32(f"{self.seed}/{self.number + position}".encode())


class _Requests:
    """A batch sampler that asks for this rank's rows of what another one asks for."""

    def __init__(self, batches: Any, rows_of: RowsOf) -> None:
        self.batches = batches
        self.rows_of = rows_of

    def __iter__(self) -> Iterator[_Request]:
        # A function of the random state, which is the same on all ranks. Nothing is drawn from it:
        # shuffles must stay those of one device.
        seed = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        start = 0
        for batch in self.batches:
            indices = list(batch)
            rows = self.rows_of(len(indices))
            yield _Request(indices[rows], len(indices), start + rows.start, seed)
            start += len(indices)

    def __len__(self) -> int:
        return len(self.batches)


class _Rows(Dataset):
    """A map-style dataset that is asked with a `_Request`.

    Each row has random numbers of its own, so that a dataset that draws some (to augment images,
    say) draws the same ones on every mesh, and leaves the random states of all ranks alike.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, request: _Request) -> Part:
        in_batches = getattr(self.dataset, "__getitems__", None)
        with _restored_random_state():
            if in_batches:
                _seed_everything(request.seed_of(0))
                return Part(in_batches(request.indices), request.size)
            samples = []
            for position, index in enumerate(request.indices):
                _seed_everything(request.seed_of(position))
                samples.append(self.dataset[index])
        return Part(samples, request.size)


class _ArrayRows:
    """Keras's arrays, read batch by batch in the order of its sampler.

    As its DataLoader does it, random draws included, but without the DataLoader: that takes longer
    than a step of a small model. The rows stay where they are: on the host, or on a device.
    """

    def __init__(self, adapter: Any, rows_of: RowsOf) -> None:
        self.loader = adapter.get_torch_dataloader()
        self.rows_of = rows_of
        self.arrays, self.structure = optree.tree_flatten(self.loader.dataset.array)

    def __iter__(self) -> Iterator[Part]:
        # What a DataLoader draws for its workers, at once.
        torch.empty((), dtype=torch.int64).random_()
        return self._parts()

    def _parts(self) -> Iterator[Part]:
        for request in _Requests(self.loader.batch_sampler, self.rows_of):
            indices = np.asarray(request.indices, dtype=np.int64)
            rows = [_taken(array, indices) for array in self.arrays]
            yield Part(self.structure.unflatten(rows), request.size)


# Arrays of these are tensors as they are; what else there is, Keras knows how to convert.
_AS_THEY_ARE = frozenset(np.dtype(name) for name in ("float32", "int32", "int64", "uint8", "bool"))


def _taken(array: Any, indices: np.ndarray) -> Any:
    rows = array[indices]
    if isinstance(rows, np.ndarray) and rows.dtype in _AS_THEY_ARE:
        return torch.from_numpy(rows)
    return array.convert_to_torch_compatible(rows)


class _Collate:
    def __init__(self, collate: Callable) -> None:
        self.collate = collate

    def __call__(self, part: Part) -> Part:
        return Part(self.collate(part.rows), part.size)


def _seed_everything(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextlib.contextmanager
def _restored_random_state() -> Iterator[None]:
    if get_worker_info() is not None:
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def array_batches(adapter: Any) -> Iterable[Any] | None:
    """Whole batches of arrays; None if the data is of another kind."""
    if type(adapter) is not ArrayDataAdapter:
        return None
    return (part.rows for part in _ArrayRows(adapter, lambda count: slice(0, count)))


def parts_of(adapter: Any, rows_of: RowsOf) -> Iterable[Part] | None:
    """This rank's rows of each batch, read alone; None if the data can't be indexed."""
    if type(adapter) is ArrayDataAdapter:
        return _ArrayRows(adapter, rows_of)
    if type(adapter) is TorchDataLoaderAdapter and _can_be_indexed(adapter._dataloader):
        return _reading_rows(adapter._dataloader, rows_of)
    return None


def _can_be_indexed(loader: DataLoader) -> bool:
    return (
        type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and loader.collate_fn is default_collate
    )


# Workers may be persistent, so a user's loader keeps its counterpart.
_counterparts: "WeakKeyDictionary[DataLoader, tuple[Any, DataLoader]]" = WeakKeyDictionary()


def _reading_rows(loader: Any, rows_of: RowsOf) -> DataLoader:
    known = _counterparts.get(loader)
    if known is not None and known[0] == rows_of:
        return known[1]
    requests: Any = _Requests(loader.batch_sampler, rows_of)
    collate: Any = _Collate(loader.collate_fn)
    ours: DataLoader = DataLoader(
        _Rows(loader.dataset),
        batch_sampler=requests,
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    _counterparts[loader] = (rows_of, ours)
    return ours


def whole_batches(adapter: Any) -> Iterable[Any]:
    """The batches as the user's loader makes them, before Keras moves them to a device."""
    if type(adapter) is PyDatasetAdapter:
        return adapter._get_iterator()
    if type(adapter) is GeneratorDataAdapter:
        return adapter.generator()
    return adapter.get_torch_dataloader()


def can_look_ahead(adapter: Any) -> bool:
    """Whether a batch may be read before its turn.

    Not from a generator: it would be missing when the user goes on with the generator.
    """
    return type(adapter) is not GeneratorDataAdapter
