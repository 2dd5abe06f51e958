"""What callbacks know outlives a crash: patience, best values, rows of a table."""

import csv

import keras
import numpy as np
import pytest
from keras import callbacks

import keras_spmd
import training
from bench import on_ranks, sample
from files import meet, shared_folder
from keras_spmd.distribution_lib import process_id

SAVERS = {
    "every second batch": lambda path: keras_spmd.ShardedCheckpoint(path, every_steps=2),
    "every epoch": keras_spmd.ShardedCheckpoint,
    "backups of epochs": callbacks.BackupAndRestore,
    "backups of batches": lambda path: callbacks.BackupAndRestore(path, save_freq=4),
}
# One of each kind with `make test`.
SOME = ["every second batch", "backups of epochs"]
ALL = sample(SAVERS, *SOME)


class CrashAfter(keras.callbacks.Callback):
    """Ends a training as soon as something was saved after so many updates."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.after:
            raise InterruptedError

    def on_test_begin(self, logs=None):
        raise InterruptedError


class CrashAtEnd(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        raise InterruptedError


def fit(callbacks, **options):
    return training.fit(callbacks, **{"epochs": 20, "rate": training.RATE, **options})


def crashing(make, saver, path, crashes=(9, 14), **options):
    """A training that crashes after so many batches of each of its lives, but the last one.

    The one that saves is the first of the callbacks in one life, and the last in another.
    """
    for i, after in enumerate(crashes):
        ours = [*make(), training.Crash(after)]
        ours.insert(len(ours) * (i % 2), SAVERS[saver](path))
        with pytest.raises(InterruptedError):
            fit(ours, **options)
    return fit([SAVERS[saver](path), *make()], **options)


@pytest.mark.parametrize("saver", ALL)
@on_ranks(2, timeout=180, exhaustive=(1,))
def test_patience_and_the_best_weights(saver):
    with shared_folder() as folder, training.of_ranks("rows").scope():
        expected = fit(training.patient())
        assert 4 < len(expected[0]["epoch"]) < 20, "it is stopped"
        assert len(set(expected[0]["learning_rate"])) > 1, "the rate is reduced"
        training.assert_equal(crashing(training.patient, saver, folder / "saved"), expected)


def test_patience_without_a_distribution(tmp_path):
    expected = fit(training.patient())
    training.assert_equal(crashing(training.patient, "every second batch", tmp_path), expected)


@pytest.mark.parametrize("saver", ["every epoch", "backups of epochs"])
@on_ranks(2, timeout=180, exhaustive=(1,))
def test_a_training_that_was_stopped_stays_stopped(saver):
    """It crashes between its last epoch and its end."""
    with shared_folder() as folder, training.of_ranks("rows").scope():
        expected = fit(training.patient())
        with pytest.raises(InterruptedError):
            fit([SAVERS[saver](folder / "saved"), *training.patient(), CrashAtEnd()])
        again = fit([SAVERS[saver](folder / "saved"), *training.patient()])
        training.assert_equal(again, expected)


class StopAt(keras.callbacks.Callback):
    """Stops in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) >= 10:
            self.model.stop_training = True


@on_ranks(2, timeout=180, exhaustive=(1,))
def test_a_training_that_was_stopped_in_the_middle_of_an_epoch():
    with shared_folder() as folder, training.of_ranks("rows").scope():
        expected = fit([StopAt()])
        assert expected[0]["epoch"] == [0, 1]
        make = lambda: [StopAt(), SAVERS["every second batch"](folder / "saved")]  # noqa: E731
        with pytest.raises(InterruptedError):
            fit([*make(), training.Crash(10)])
        training.assert_equal(fit(make()), expected)


class StopOnOneRank(keras.callbacks.Callback):
    """The others hear of it one step later."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        if process_id() == 1 and int(self.model.optimizer.iterations) == self.after:
            self.model.stop_training = True


@pytest.mark.parametrize("crash", [4, 5])
@pytest.mark.parametrize("saver", sample(["backups", "checkpoints"], "checkpoints"))
@on_ranks(2, timeout=180)
def test_a_stop_that_one_rank_wanted_before_the_crash(saver, crash):
    """It is saved with the votes not counted yet, and with them counted but not acted upon."""
    make = {
        "backups": lambda path: callbacks.BackupAndRestore(path, save_freq=1),
        "checkpoints": lambda path: keras_spmd.ShardedCheckpoint(path, every_steps=1),
    }[saver]
    with shared_folder() as folder, training.of_ranks("rows").scope():
        expected = fit([StopOnOneRank(4)], epochs=3)
        assert expected[0]["epoch"] == [0]
        with pytest.raises(InterruptedError):
            fit([StopOnOneRank(4), CrashAfter(crash), make(folder / "saved")], epochs=3)
        training.assert_equal(fit([make(folder / "saved")], epochs=3), expected)


def falling(epoch, rate):
    return rate * 0.8


@pytest.mark.parametrize("saver", ALL)
@on_ranks(2, timeout=180, exhaustive=(1,))
def test_a_schedule_that_goes_on_from_the_rate_before(saver):
    with shared_folder() as folder, training.of_ranks("rows").scope():
        make = lambda: [callbacks.LearningRateScheduler(falling)]  # noqa: E731
        expected = fit(make(), epochs=4)
        training.assert_equal(crashing(make, saver, folder / "saved", (9, 8), epochs=4), expected)


def rows(file):
    with open(file) as opened:
        return list(csv.reader(opened))


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("saver", SOME)
@on_ranks(2, timeout=180, exhaustive=(1,))
def test_a_table_has_each_row_once(saver, append):
    with shared_folder() as folder, training.of_ranks("rows").scope():
        make = lambda file: lambda: [callbacks.CSVLogger(folder / file, append=append)]  # noqa: E731
        fit(make("expected")(), epochs=4)
        crashing(make("rows"), saver, folder / "saved", epochs=4)
        meet()
        found = rows(folder / "rows")
        assert found == rows(folder / "expected")
        assert [row[0] for row in found] == ["epoch", "0", "1", "2", "3"]
        # Another training in the same file, which does not go on.
        fit([*make("rows")(), keras_spmd.ShardedCheckpoint(folder / "other")], epochs=1)
        meet()
        assert len(rows(folder / "rows")) == (6 if append else 2)


@on_ranks(2, timeout=180)
def test_the_best_model_so_far_is_known():
    with shared_folder() as folder, training.of_ranks("rows").scope():

        def make(path):
            file = folder / path
            return callbacks.ModelCheckpoint(
                file / "{epoch:02d}.keras", save_best_only=True, monitor="val_loss"
            )

        expected, found = make("expected"), []
        fit([expected], epochs=6)
        crashing(
            lambda: found.append(make("found")) or [found[-1]],
            "every epoch",
            folder / "saved",
            epochs=6,
        )
        meet()
        assert found[-1].best == expected.best
        names = [{p.name for p in (folder / kind).iterdir()} for kind in ("found", "expected")]
        assert names[0] == names[1]


class Largest(keras.callbacks.Callback):
    """A callback that someone wrote."""

    def __init__(self):
        super().__init__()
        self.largest, self.batches = None, 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.largest = max(logs["loss"], self.largest or 0.0)

    def get_state(self):
        return {"largest": self.largest, "batches": self.batches}

    def set_state(self, state):
        self.largest, self.batches = state["largest"], state["batches"]


@pytest.mark.parametrize("saver", ALL)
@on_ranks(2, timeout=180, exhaustive=(1,))
def test_callbacks_that_say_what_they_know(saver):
    with shared_folder() as folder, training.of_ranks("rows").scope():
        expected = [Largest(), Largest()]
        fit(expected, epochs=4)
        made = []

        def make():
            made.append([Largest(), Largest()])
            return made[-1]

        crashing(make, saver, folder / "saved", epochs=4)
        for found, callback in zip(made[-1], expected, strict=True):
            assert found.get_state() == callback.get_state()


class Strange(Largest):
    def get_state(self):
        return {"numbers": np.ones(3)}


@on_ranks(1, 2)
def test_a_state_must_be_json():
    with shared_folder() as folder, training.of_ranks("rows").scope():
        saver = keras_spmd.ShardedCheckpoint(folder)
        with pytest.raises(TypeError, match=r"get_state\(\) of the callback Strange.*ndarray"):
            fit([Strange(), saver], epochs=1)
