"""Every kind of data: the global batches of one device, each rank reading its rows of them."""

import os
import warnings
from importlib.util import find_spec

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import keras_spmd
from bench import on_ranks, same_on_ranks
from keras_spmd.distribution_lib import num_processes, process_id
from meshes import grid, model_parallel, whole

ROWS = 22
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, ROWS)
W = np.linspace(0.2, 2, ROWS).astype("float32")


def both_distributions():
    yield (
        "data parallel",
        distribution.DataParallel(distribution.DeviceMesh((num_processes(),), ("batch",))),
    )
    yield "2D", model_parallel({".*kernel": (None, "model")}, grid())


def make_model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(4)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, weighted_metrics=["accuracy"])
    return model


def train(make_data):
    """Three epochs: the losses, the final weights, and an evaluation."""
    model = make_model()
    data, options = make_data()
    options = {"epochs": 3, "verbose": 0, **options}
    history = model.fit(data, **options) if data is not None else model.fit(**options)
    return [*history.history.values()], [whole(v) for v in model.variables]


def assert_same_on_all_meshes(make_data):
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    expected = train(make_data)
    for label, dist in both_distributions():
        with dist.scope():
            got = train(make_data)
        for a, b in zip(got[0], expected[0], strict=True):
            assert all(type(v) is float for v in a)
            np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=label)
        for a, b in zip(got[1], expected[1], strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=label)


class Samples(torch.utils.data.Dataset):
    """A map-style dataset that notes which rows it was asked for."""

    def __init__(self, read=None):
        self.read = [] if read is None else read

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        self.read.append(i)
        return X[i], Y[i]


class Batched(Samples):
    def __getitems__(self, indices):
        self.read.extend(indices)
        return [(X[i], Y[i]) for i in indices]


class Iterable(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Batches(torch.utils.data.Dataset):
    """Each item is a batch: the loader doesn't make any."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return torch.tensor(X[i * 8 : i * 8 + 8]), torch.tensor(Y[i * 8 : i * 8 + 8])


class Backwards(torch.utils.data.Sampler):
    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(range(ROWS - 1, -1, -1))


def pad_to_longest(samples):
    """A collate function that looks at the whole batch."""
    shift = max(float(x[0]) for x, _ in samples)
    x = torch.stack([torch.tensor(x) + shift for x, _ in samples])
    return x, torch.tensor([y for _, y in samples])


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8]


class Weighted(Sequence):
    def __getitem__(self, i):
        return X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8], W[i * 8 : i * 8 + 8]


class Endless(Sequence):
    @property
    def num_batches(self):
        return None

    def __getitem__(self, i):
        return super().__getitem__(i % 3)


def batches(count=10**9):
    for i in range(count):
        i = i % 3
        yield X[i * 8 : i * 8 + 8], torch.tensor(Y[i * 8 : i * 8 + 8])


def loader(dataset, **options):
    return lambda: (DataLoader(dataset(), **options), {"shuffle": False})


def arrays(x, y, **options):
    return lambda: (None, {"x": x, "y": y, "batch_size": 8, **options})


DATA = {
    "numpy": arrays(X, Y),
    "numpy, not shuffled": arrays(X, Y, shuffle=False),
    "numpy, shuffled in batches": arrays(X, Y, shuffle="batch"),
    "float64 and int32": arrays(X.astype("float64"), Y.astype("int32")),
    "torch": arrays(torch.tensor(X), torch.tensor(Y)),
    "sample_weight": arrays(X, Y, sample_weight=W),
    "class_weight": arrays(X, Y, class_weight={0: 0.5, 1: 2.0, 2: 1.0, 3: 3.0}),
    "validation_split": arrays(X, Y, validation_split=0.3),
    "validation_data": arrays(X, Y, validation_data=(X[:7], Y[:7], W[:7]), validation_freq=2),
    "validation_steps": arrays(X, Y, validation_data=(X, Y), validation_steps=2),
    "steps_per_epoch": arrays(X, Y, steps_per_epoch=2, batch_size=4),
    "initial_epoch": arrays(X, Y, initial_epoch=1),
    "fewer rows than ranks": arrays(X[:3], Y[:3]),
    "one row": arrays(X[:1], Y[:1]),
    "batches of one row": arrays(X[:5], Y[:5], batch_size=1),
    "batches of fewer rows than ranks": arrays(X[:8], Y[:8], batch_size=3),
    "loader": loader(Samples, batch_size=8),
    "loader, shuffled": loader(Samples, batch_size=8, shuffle=True),
    "loader, drop_last": loader(Samples, batch_size=8, drop_last=True),
    "loader, two workers": loader(Samples, batch_size=5, num_workers=2, shuffle=True),
    "loader, persistent workers": loader(
        Samples, batch_size=5, num_workers=1, persistent_workers=True, prefetch_factor=3
    ),
    "loader, __getitems__": loader(Batched, batch_size=8, shuffle=True),
    "loader, sampler": lambda: (
        DataLoader(Samples(), batch_size=8, sampler=Backwards()),
        {"shuffle": False},
    ),
    "loader, batch sampler": lambda: (
        DataLoader(Samples(), batch_sampler=BatchSampler(SequentialSampler(X), 7, False)),
        {"shuffle": False},
    ),
    "loader, collate function": loader(Samples, batch_size=8, collate_fn=pad_to_longest),
    "loader, collate function and workers": loader(
        Samples, batch_size=8, collate_fn=pad_to_longest, num_workers=1
    ),
    "loader, seeded generator": lambda: (
        DataLoader(
            Samples(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5)
        ),
        {"shuffle": False},
    ),
    "loader, tensors": lambda: (
        DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=8),
        {"shuffle": False},
    ),
    "loader, iterable": loader(Iterable, batch_size=8),
    "loader, batches": loader(Batches, batch_size=None),
    "loader, validation": lambda: (
        DataLoader(Samples(), batch_size=8, shuffle=True),
        {"shuffle": False, "validation_data": DataLoader(Samples(), batch_size=6)},
    ),
    "PyDataset": lambda: (Sequence(), {}),
    "PyDataset, weights": lambda: (Weighted(), {"shuffle": False}),
    "PyDataset, class_weight": lambda: (Sequence(), {"class_weight": {1: 3.0}}),
    "PyDataset, threads": lambda: (Sequence(workers=2), {}),
    "PyDataset, processes": lambda: (
        Sequence(workers=2, use_multiprocessing=True),
        {"shuffle": False},
    ),
    "PyDataset, endless": lambda: (Endless(), {"steps_per_epoch": 4, "shuffle": False}),
    "generator": lambda: (batches(), {"steps_per_epoch": 4, "shuffle": False}),
}


@pytest.mark.parametrize("name", DATA)
@on_ranks(2, exhaustive=(1, 4), timeout=400)
def test_data(name):
    # Keras's own warning of forking a process with threads.
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded")
    # And of data whose length it doesn't know, at the end of the first epoch.
    warnings.filterwarnings("ignore", message="Your input ran out of data")
    assert_same_on_all_meshes(DATA[name])


@on_ranks(2, exhaustive=(1, 4))
def test_a_generator_that_ends():
    """Its number of batches is known after the first epoch."""
    warnings.filterwarnings("ignore", message="Your input ran out of data")
    assert_same_on_all_meshes(
        lambda: (batches(3), {"epochs": 1, "steps_per_epoch": None, "shuffle": False})
    )


@on_ranks(2)
def test_a_generator_is_not_read_ahead():
    """What one fit left over, the next one gets."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)

    def two_fits():
        model, data = make_model(), batches()
        for _ in range(2):
            model.fit(data, steps_per_epoch=4, verbose=0, shuffle=False)
        return int(next(data)[1][0]), [whole(v) for v in model.variables]

    expected = two_fits()
    with distribution.DataParallel().scope():
        got = two_fits()
    assert got[0] == expected[0]
    for a, b in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.parametrize("dataset", [Samples, Batched])
@on_ranks(2, 4)
def test_a_rank_reads_its_rows_only(dataset):
    for _label, dist in both_distributions():
        with dist.scope():
            data = dataset()
            model = make_model()
            # The first fit of a model looks at one batch more, to build what is not built.
            for _ in range(2):
                data.read.clear()
                model.fit(DataLoader(data, batch_size=8), verbose=0, shuffle=False)
            shards = dict(zip(dist.device_mesh.axis_names, dist.device_mesh.shape, strict=True))
            count = shards["batch"]
            expected = []
            for start in range(0, ROWS, 8):
                rows = np.arange(start, min(start + 8, ROWS))
                size = -(-len(rows) // count)
                mine = process_id() if count == num_processes() else process_id() // 2
                if size * (count - 1) >= len(rows):
                    expected.extend(rows)  # too few for all ranks: each computes all of them
                else:
                    expected.extend(rows[size * mine : size * (mine + 1)])
            assert data.read == expected


@on_ranks(2)
def test_arrays_are_indexed_by_this_ranks_rows_only():
    class Noting(np.ndarray):
        read = 0

        def __getitem__(self, indices):
            if isinstance(indices, (list, np.ndarray)):
                Noting.read += len(indices)
            return super().__getitem__(indices)

    with distribution.DataParallel().scope():
        model = make_model()
        model.fit(X, Y, batch_size=8, verbose=0)
        model.fit(X.view(Noting), Y, batch_size=8, verbose=0)
    assert Noting.read == ROWS / 2


@same_on_ranks(2, 4)
def test_random_augmentation_in_a_dataset_is_the_same_on_every_mesh():
    class Noisy(Samples):
        def __getitem__(self, i):
            noise = torch.rand(()).item() + np.random.rand()
            return X[i] + np.float32(noise), Y[i]

    results = []
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    for _, dist in both_distributions():
        with dist.scope():
            for workers in (0, 1):
                model = make_model()
                data = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers)
                history = model.fit(data, epochs=2, verbose=0, shuffle=False)
                results.append(history.history["loss"])
    return results


class Structured(keras.Model):
    """Takes a nested structure with None in it, and returns one."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, inputs):
        y = self.dense(inputs["a"]) + inputs["more"][0]
        return {"logits": y, "both": (y * 2, y.sum(-1))}


@on_ranks(2, exhaustive=(1, 4))
def test_nested_structures_with_none():
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    more = np.random.default_rng(2).normal(size=(ROWS, 4)).astype("float32")
    x = {"a": X, "more": [more, None]}

    def run():
        keras.utils.set_random_seed(3)
        model = Structured()
        model.compile("sgd", {"logits": "mse", "both": ("mse", None)})
        y = {"logits": more, "both": (more, X[:, 0])}
        history = model.fit(x, y, batch_size=8, verbose=0, epochs=2).history["loss"]
        return history, model.predict(x, batch_size=5, verbose=0), model.predict_on_batch(x)

    expected = run()
    for label, dist in both_distributions():
        with dist.scope():
            got = run()
        np.testing.assert_allclose(got[0], expected[0], 1e-5, err_msg=label)
        for ours, plain in zip(got[1:], expected[1:], strict=True):
            keras.tree.assert_same_structure(ours, plain)
            for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(plain), strict=True):
                assert type(a) is np.ndarray
                np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=label)


@on_ranks(2, 4)
def test_batches_of_dtensors():
    """A batch may be laid out already."""
    expected = make_model()
    want = [expected.train_on_batch(X, Y, return_dict=True) for _ in range(2)]
    want.append(expected.test_on_batch(X, Y, return_dict=True))
    for _, dist in both_distributions():
        with dist.scope():
            model = make_model()
            x, y = keras_spmd.distribute_batch((X, Y))
            got = [model.train_on_batch(x, y, return_dict=True) for _ in range(2)]
            got.append(model.test_on_batch(x, y, return_dict=True))
            assert all(type(v) is float for logs in got for v in logs.values())
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose([*a.values()], [*b.values()], 1e-5)

            def laid_out():
                for i in range(2):
                    rows = slice(i * 8, i * 8 + 8)
                    yield keras_spmd.distribute_batch((X[rows], Y[rows]))

            model.fit(laid_out(), steps_per_epoch=2, verbose=0, shuffle=False)


@on_ranks(2)
def test_adapter_iterators_keep_working():
    from keras.src.trainers.data_adapters import get_data_adapter

    with distribution.DataParallel().scope():
        for data in (X, DataLoader(Samples(), batch_size=8), Sequence(), batches(3)):
            options = {"batch_size": 8} if data is X else {}
            adapter = get_data_adapter(data, **options)
            first = keras.tree.flatten(next(iter(adapter.get_numpy_iterator())))[0]
            np.testing.assert_array_equal(first, X[:8])
            first = keras.tree.flatten(next(iter(adapter.get_torch_dataloader())))[0]
            np.testing.assert_array_equal(whole(first), X[:8])


@on_ranks(2)
def test_own_rows_with_different_numbers_of_batches():
    """All ranks end together, with an error that says which rank had how many."""
    dist = distribution.DataParallel(auto_shard_dataset=False)
    with dist.scope():
        rows = 12 if process_id() == 0 else 20
        for data in (
            {"x": X[:rows], "y": Y[:rows], "batch_size": 4},
            {"x": batches(rows // 4), "steps_per_epoch": 100},
        ):
            known = "x" in data and data["x"] is not None and isinstance(data["x"], np.ndarray)
            last = "rank 1: 5" if known else "rank 1: at least 4"
            with pytest.raises(ValueError, match=f"rank 0: 3, {last}"):
                make_model().fit(**data, verbose=0, shuffle=False)
        history = make_model().fit(
            X[:rows], Y[:rows], batch_size=4, steps_per_epoch=3, verbose=0, shuffle=False
        )
        assert np.isfinite(history.history["loss"][0])


@on_ranks(2)
def test_random_states_that_drifted_apart_are_set_right():
    with distribution.DataParallel().scope():
        model = make_model()
        if process_id() == 1:
            torch.rand(3)
            np.random.rand(2)
        with pytest.warns(keras_spmd.ShardingWarning, match="ranks \\[1\\]"):
            model.fit(X, Y, batch_size=8, verbose=0)
        model.fit(X, Y, batch_size=8, verbose=0)


@on_ranks(2)
def test_different_data_is_found_out():
    os.environ["KERAS_SPMD_CHECK"] = "1"
    with distribution.DataParallel().scope():
        model = make_model()
        other = X + process_id()
        with pytest.raises(RuntimeError, match=r"argument `x`.*not the same on all ranks"):
            model.fit(other, Y, verbose=0)
        with pytest.raises(RuntimeError, match=r"a batch.*not the same on all ranks"):
            model.train_on_batch(other, Y)


@on_ranks(2)
def test_a_distributed_sampler_is_refused():
    from torch.utils.data.distributed import DistributedSampler

    with distribution.DataParallel().scope():
        data = DataLoader(Samples(), batch_size=4, sampler=DistributedSampler(Samples()))
        with pytest.raises(ValueError, match="auto_shard_dataset=False"):
            make_model().fit(data, verbose=0, shuffle=False)


@on_ranks(2)
def test_unsupported_data_is_refused():
    with distribution.DataParallel().scope(), pytest.raises(ValueError, match="DataLoader"):
        make_model().fit({1, 2, 3}, verbose=0)


def needs(module):
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


@needs("pandas")
@on_ranks(2)
def test_pandas():
    import pandas

    frame, series = pandas.DataFrame(X), pandas.Series(Y)
    assert_same_on_all_meshes(arrays(frame, series))


@needs("grain")
@on_ranks(1, 2, 4)
def test_grain():
    import grain

    def make_data():
        data = grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(8)
        return data, {"shuffle": False, "epochs": 1}

    warnings.filterwarnings("ignore", message="Your input ran out of data")
    assert_same_on_all_meshes(make_data)


@needs("tensorflow")
@on_ranks(1, 2, 4)
def test_tf_data():
    import tensorflow as tf

    def make_data():
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(30, seed=3).batch(8)
        return data, {"shuffle": False}

    assert_same_on_all_meshes(make_data)
