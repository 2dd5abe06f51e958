"""All stock callbacks on any mesh: the logs of one device, files written once, one decision."""

import contextlib
import csv
import io
import os
import tempfile
import warnings
from importlib.util import find_spec

import keras
import numpy as np
import pytest
import torch.distributed as dist
from keras import callbacks, distribution, layers

import keras_spmd
from bench import on_ranks
from keras_spmd.distribution_lib import num_processes, process_id
from meshes import grid, model_parallel

X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 22)


def make_model(learning_rate=0.1):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(learning_rate, momentum=0.9), loss, metrics=["accuracy"])
    return model


def both_distributions():
    yield distribution.DataParallel()
    yield model_parallel({".*kernel": (None, "model")}, grid())


def shared_folder():
    """A folder that all ranks know."""
    name = [tempfile.mkdtemp() if process_id() == 0 else None]
    if num_processes() > 1:
        dist.broadcast_object_list(name, src=0)
    return name[0]


def fit(make_callbacks, model=None, **options):
    model = model or make_model()
    options = {"epochs": 6, "batch_size": 8, "verbose": 0, "validation_data": (X, Y), **options}
    history = model.fit(X, Y, callbacks=make_callbacks(), **options)
    return history, model


def assert_same_on_all_meshes(make_callbacks, **options):
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    expected, _ = fit(make_callbacks, **options)
    for dist_ in both_distributions():
        with dist_.scope():
            got, _ = fit(make_callbacks, **options)
        assert got.epoch == expected.epoch
        assert list(got.history) == list(expected.history)
        for key, values in expected.history.items():
            assert all(type(value) is float for value in got.history[key]), key
            np.testing.assert_allclose(got.history[key], values, 1e-5, 1e-6, err_msg=key)
    return expected


class Scheduled(callbacks.Callback):
    """Changes the learning rate by hand."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (epoch + 1)


class Seen(callbacks.Callback):
    """Every log must be made of plain numbers."""

    def check(self, number, logs=None):
        assert all(type(value) is float for value in (logs or {}).values()), logs

    on_epoch_end = on_train_batch_end = on_test_batch_end = check

    def on_test_end(self, logs=None):
        self.check(0, logs)


CALLBACKS = {
    "EarlyStopping": lambda: [
        callbacks.EarlyStopping("loss", patience=1, min_delta=0.2, restore_best_weights=True)
    ],
    "ReduceLROnPlateau": lambda: [
        callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=0, min_delta=0.3)
    ],
    "LearningRateScheduler": lambda: [
        callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    ],
    "the learning rate by hand": lambda: [Scheduled()],
    "LambdaCallback": lambda: [
        callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: float(logs["loss"]))
    ],
    "TerminateOnNaN": lambda: [callbacks.TerminateOnNaN()],
    "logs": lambda: [Seen()],
    "History": lambda: [callbacks.History()],
}


@pytest.mark.parametrize("name", CALLBACKS)
@on_ranks(2, exhaustive=(1, 4))
def test_callbacks(name):
    history = assert_same_on_all_meshes(CALLBACKS[name])
    if name == "EarlyStopping":
        assert len(history.epoch) < 6
    if name in ("ReduceLROnPlateau", "LearningRateScheduler"):
        assert history.history["learning_rate"][-1] < 0.1


@on_ranks(2)
def test_terminate_on_nan():
    with distribution.DataParallel().scope():
        model = make_model(learning_rate=1e30)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            history, _ = fit(lambda: [callbacks.TerminateOnNaN()], model, validation_data=None)
        assert len(history.epoch) == 1
        assert ("Invalid loss" in said.getvalue()) == (process_id() == 0)


@on_ranks(2)
def test_swap_ema_weights():
    def run():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        optimizer = keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        history, _ = fit(lambda: [callbacks.SwapEMAWeights(swap_on_epoch=True)], model)
        return history.history["val_loss"]

    expected = run()
    with distribution.DataParallel().scope():
        np.testing.assert_allclose(run(), expected, 1e-5)


@on_ranks(2, exhaustive=(1, 4))
def test_csv_logger():
    folder = shared_folder()
    for i, dist_ in enumerate(both_distributions()):
        path = os.path.join(folder, f"log{i}.csv")
        with dist_.scope():
            for append in (False, True):
                history, _ = fit(
                    lambda path=path, append=append: [callbacks.CSVLogger(path, append=append)],
                    epochs=2,
                )
        if process_id() == 0:
            with open(path) as file:
                rows = list(csv.DictReader(file))
            assert [row["epoch"] for row in rows] == ["0", "1", "0", "1"]
            np.testing.assert_allclose(float(rows[-1]["loss"]), history.history["loss"][-1], 1e-6)


@on_ranks(2, exhaustive=(1, 4))
def test_model_checkpoint():
    """The best weights, in a file that a model without a distribution reads."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    folder = shared_folder()
    for i, dist_ in enumerate(both_distributions()):
        path = os.path.join(folder, f"{i}", "best.weights.h5")
        every = os.path.join(folder, f"{i}", "model{epoch}.keras")
        with dist_.scope():
            _, model = fit(
                lambda path=path, every=every: [
                    callbacks.ModelCheckpoint(path, save_weights_only=True),
                    callbacks.ModelCheckpoint(every, save_freq=3),
                ],
                epochs=2,
            )
            predictions = model.predict(X, verbose=0)
            assert sorted(os.listdir(os.path.dirname(path))) == [
                "best.weights.h5",
                "model1.keras",
                "model2.keras",
            ]
        plain = make_model()
        plain.optimizer.build(plain.trainable_variables)
        plain.load_weights(path)
        np.testing.assert_allclose(plain.predict(X, verbose=0), predictions, 1e-5, 1e-6)
        again = keras.saving.load_model(every.format(epoch=2))
        np.testing.assert_allclose(again.predict(X, verbose=0), predictions, 1e-5, 1e-6)
        with dist_.scope():
            again = keras.saving.load_model(every.format(epoch=2))
            np.testing.assert_allclose(again.predict(X, verbose=0), predictions, 1e-5, 1e-6)


@on_ranks(1, 2)
def test_backup_and_restore():
    """An interrupted run goes on, and ends where an undisturbed one ends."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)

    class Interrupt(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("interrupted")

    folder = shared_folder()
    options = {"epochs": 4, "shuffle": False}
    for i, dist_ in enumerate(both_distributions()):
        backup = os.path.join(folder, f"backup{i}")
        with dist_.scope():
            expected, _ = fit(list, **options)
            with pytest.raises(RuntimeError, match="interrupted"):
                fit(
                    lambda backup=backup: [callbacks.BackupAndRestore(backup), Interrupt()],
                    **options,
                )
            assert os.path.exists(backup)
            history, _ = fit(lambda backup=backup: [callbacks.BackupAndRestore(backup)], **options)
        assert history.epoch == [0, 1, 2, 3]
        np.testing.assert_allclose(history.history["loss"], expected.history["loss"], 1e-5, 1e-6)
        assert not os.path.exists(backup)


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="tensorflow is not installed")
@on_ranks(1, 2)
def test_tensorboard():
    """Keras writes its event files with TensorFlow."""
    warnings.simplefilter("ignore")
    folder = shared_folder()
    with distribution.DataParallel().scope():
        fit(lambda: [callbacks.TensorBoard(folder, histogram_freq=1)], epochs=2)
        if num_processes() > 1:
            dist.barrier()
    files = [name for _, _, names in os.walk(folder) for name in names]
    assert len([name for name in files if name.startswith("events")]) == 2


@pytest.mark.skipif(find_spec("orbax") is None, reason="orbax-checkpoint is not installed")
@on_ranks(1, 2)
def test_orbax():
    """What rank 0 writes is what one device would, and any mesh loads it."""
    warnings.simplefilter("ignore")
    folder = shared_folder()

    def make():
        # Orbax's files find variables by their paths, which a Sequential changes when it is loaded.
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6,))
        outputs = layers.Dense(4, name="b")(layers.Dense(8, name="a")(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def saving(name, **options):
        path = os.path.join(folder, name)
        return lambda: [callbacks.OrbaxCheckpoint(path, max_to_keep=2, **options)]

    expected, _ = fit(saving(f"alone{process_id()}"), make(), epochs=3)
    for i, dist_ in enumerate(both_distributions()):
        with dist_.scope():
            got, model = fit(saving(str(i), save_on_background=bool(i)), make(), epochs=3)
            np.testing.assert_allclose(got.history["loss"], expected.history["loss"], 1e-5)
            assert sorted(filter(str.isdigit, os.listdir(f"{folder}/{i}"))) == ["1", "2"]
            loaded = keras.models.load_model(f"{folder}/{i}")
            for a, b in zip(loaded.weights, model.weights, strict=True):
                np.testing.assert_array_equal(a, b)
            for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
                np.testing.assert_array_equal(a, b)
        alone = make()
        alone.load_weights(f"{folder}/{i}")
        with dist_.scope():
            for a, b in zip(alone.weights, model.weights, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(find_spec("orbax") is None, reason="orbax-checkpoint is not installed")
@on_ranks(2)
def test_orbax_that_cannot_write():
    folder = shared_folder()
    with distribution.DataParallel().scope():
        callback = callbacks.OrbaxCheckpoint(folder, save_on_background=False)

        def full(*args):
            raise OSError(28, "No space left on device")

        callback.checkpointer.save_checkpointables = full
        with pytest.raises(OSError, match="No space left on device"):
            fit(lambda: [callback], epochs=1)


@on_ranks(2, 4)
def test_stop_training_on_one_rank_stops_all():
    class Stop(callbacks.Callback):
        def __init__(self, rank, batch=None, epoch=None):
            super().__init__()
            self.rank, self.batch, self.epoch, self.seen = rank, batch, epoch, 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.rank in (None, process_id()) and batch == self.batch:
                self.model.stop_training = True

        def on_epoch_end(self, epoch, logs=None):
            if self.rank in (None, process_id()) and epoch == self.epoch:
                self.model.stop_training = True

    def steps(**options):
        stop = Stop(**options)
        fit(lambda: [stop], batch_size=4, validation_data=None)
        return stop.seen

    for dist_ in both_distributions():
        with dist_.scope():
            assert steps(rank=None, batch=2) == 3, "all ranks want to: at once, as on one device"
            assert steps(rank=1, batch=2) == 4, "the others have begun the next step"
            assert steps(rank=0, batch=5) == 6, "the last batch of the epoch"
            assert steps(rank=1, epoch=1) == 12
            assert steps(rank=None, epoch=1) == 12


@on_ranks(2)
def test_stop_evaluating_and_stop_predicting_on_one_rank():
    class Stop(callbacks.Callback):
        seen = 0

        def on_test_batch_end(self, batch, logs=None):
            Stop.seen += 1
            self.model.stop_evaluating = process_id() == 1 and batch == 1

        def on_predict_batch_end(self, batch, logs=None):
            Stop.seen += 1
            self.model.stop_predicting = process_id() == 1 and batch == 1

    with distribution.DataParallel().scope():
        model = make_model()
        model.evaluate(X, Y, batch_size=4, callbacks=[Stop()], verbose=0)
        assert Stop.seen == 3
        Stop.seen = 0
        assert len(model.predict(X, batch_size=4, callbacks=[Stop()], verbose=0)) == 12
        assert Stop.seen == 3


@on_ranks(2)
def test_warnings_and_summaries_appear_once():
    warnings.resetwarnings()
    warnings.simplefilter("always")
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        with distribution.DataParallel().scope():
            model = make_model()
            model.summary()
            model.fit(iter_batches(), steps_per_epoch=2, shuffle=True, verbose=0)
        warnings.warn("the user's own", stacklevel=1)
    text = said.getvalue()
    assert ("Total params" in text) == (process_id() == 0)
    assert ("shuffle=True" in text) == (process_id() == 0)
    assert "the user's own" in text


def iter_batches():
    while True:
        yield X[:8], Y[:8]
