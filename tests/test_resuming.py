"""A `fit` that goes on: what it takes for its data, what it leaves behind, and how it is told to
end."""

import os
import signal
import time

import keras
import pytest

import keras_spmd
import training
from bench import on_ranks
from files import shared_folder
from jobs import outcomes, start


def saver(path, **options):
    return keras_spmd.ShardedCheckpoint(path, **{"every_steps": 2, **options})


def crash(path, after=3, **options):
    with pytest.raises(InterruptedError):
        training.fit([saver(path), training.Crash(after)], **options)


class Evaluates(keras.callbacks.Callback):
    """Iterates over other data, and changes metrics, before each epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        x, y = training.arrays()
        self.model.evaluate(x, y, batch_size=4, verbose=0)


@on_ranks(1, 2)
def test_a_callback_that_evaluates_before_each_epoch():
    with shared_folder() as folder, training.of_ranks("rows").scope():
        expected = training.fit([Evaluates()])
        with pytest.raises(InterruptedError):
            # An evaluation of this callback is not the end that `Crash` waits for.
            training.fit([saver(folder), Evaluates(), CrashAt(9)])
        training.assert_equal(training.fit([saver(folder), Evaluates()]), expected)


class CrashAt(keras.callbacks.Callback):
    def __init__(self, updates):
        super().__init__()
        self.updates = updates

    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.updates:
            raise InterruptedError


@pytest.mark.parametrize("rows", [4, 16])
def test_batches_of_another_size_in_the_middle_of_an_epoch(tmp_path, rows):
    crash(tmp_path)
    model, (x, y) = training.make(), training.arrays()
    with pytest.raises(ValueError, match=r"had 8 rows of a batch, 6 batches.* now has \d+ rows"):
        model.fit(x, y, batch_size=rows, verbose=0, callbacks=[saver(tmp_path)])
    # Between epochs it doesn't matter.
    keras_spmd.load_checkpoint(model, tmp_path)
    model.fit(x, y, batch_size=rows, verbose=0, callbacks=[saver(tmp_path / "new")])


def test_fewer_batches_than_before(tmp_path):
    """Of a generator nobody knows how many it has."""

    def batches(count):
        x, y = training.arrays()
        for i in range(count):
            yield x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]

    def fit(count, *callbacks):
        ours = [saver(tmp_path), *callbacks]
        training.make().fit(batches(count), shuffle=False, verbose=0, callbacks=ours)

    with pytest.raises(InterruptedError):
        fit(5, training.Crash(4))
    with pytest.raises(ValueError, match="saved after 4 batches, but the data has only 3"):
        fit(3)


def test_a_resumed_training_that_fails_leaves_nothing_to_the_next_one(tmp_path):
    crash(tmp_path, after=9)
    model, (x, y) = training.make(), training.arrays()
    with pytest.raises(InterruptedError):
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[saver(tmp_path), CrashAt(11)])
    assert model.fit(x, y, batch_size=8, epochs=2, verbose=0).epoch == [0, 1]
    assert int(model.optimizer.iterations) == 11 + 12


def test_the_signal_is_given_back_when_a_training_fails(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    crash(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


class Told(keras.callbacks.Callback):
    """The scheduler announces the end, while an epoch is validated."""

    def on_test_begin(self, logs=None):
        os.kill(os.getpid(), signal.SIGTERM)


@on_ranks(1, 2)
def test_an_end_that_is_announced_in_the_last_validation():
    with shared_folder() as folder, training.of_ranks("rows").scope():
        expected = training.fit(epochs=1)
        with pytest.raises(SystemExit) as info:
            training.fit([saver(folder), Told()], epochs=1)
        assert info.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is not None
        training.assert_equal(training.fit([saver(folder)], epochs=1), expected)


SLOW_DISK = """
import sys, time
import keras, keras_spmd, training
from keras_spmd.checkpoints import _saving
from keras_spmd.distribution_lib import process_id
keras.distribution.set_distribution(training.of_ranks("rows"))
write = _saving.write
def slowly(*args):
    time.sleep(60 * (process_id() == 1))
    return write(*args)
_saving.write = slowly
keras_spmd.save_checkpoint(training.make(), sys.argv[1], step=1, asynchronous=True)
if process_id() == 0: raise RuntimeError("rank 0 is broken")
time.sleep(60)
"""


def test_an_error_while_a_checkpoint_is_being_written(tmp_path):
    """Nobody waits for the checkpoint, which the other rank will never complete."""
    begin = time.monotonic()
    codes, errors = outcomes(start(SLOW_DISK, 2, tmp_path, KERAS_SPMD_TIMEOUT="100"), 90)
    assert time.monotonic() - begin < 50
    assert codes == [1, 1]
    assert "rank 0 is broken" in errors[0]
    assert keras_spmd.latest_checkpoint(tmp_path) is None
