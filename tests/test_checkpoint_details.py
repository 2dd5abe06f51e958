"""Sharded checkpoints in the hands of users: names, numbers, errors, and what else a folder has."""

import os
import signal

import keras
import numpy as np
import pytest
from keras import callbacks, layers

import keras_spmd
import training
from bench import on_ranks
from files import shared_folder
from keras_spmd.distribution_lib import process_id
from meshes import line, model_parallel, whole


def stacked(names=(None, None, None)):
    """Layers of one shape, so that only their names tell them apart."""
    x = inputs = keras.Input((4,))
    for name in names:
        x = layers.Dense(4, name=name)(x)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_layers_whose_numbers_have_moved(tmp_path):
    """Another layer was made before them: `dense_1` is what was called `dense_2`."""
    keras.utils.clear_session()
    layers.Dense(1)
    saved = stacked()
    for i, v in enumerate(saved.optimizer.variables):
        v.assign(np.full(v.shape, i))
    keras_spmd.save_checkpoint(saved, tmp_path, step=1)
    keras.utils.clear_session()
    loaded = stacked()
    assert [a.name for a in loaded.layers[2:]] == [a.name for a in saved.layers[1:-1]]
    keras_spmd.load_checkpoint(loaded, tmp_path)
    for a, b in zip(training.values(loaded), training.values(saved), strict=True):
        np.testing.assert_array_equal(a, b)


def test_names_that_were_given_are_not_exchanged(tmp_path):
    keras_spmd.save_checkpoint(stacked(["part_1", "part_2", "part_3"]), tmp_path, step=1)
    with pytest.raises(ValueError, match="not one of the model") as info:
        keras_spmd.load_checkpoint(stacked(["part_1", "part_3", "part_4"]), tmp_path)
    missing, unexpected = str(info.value).split("Not in the model")
    assert "model/part_4/kernel" in missing
    assert "model/part_2/kernel" in unexpected


class Numbered(layers.Layer):
    def get_config(self):
        return {**super().get_config(), "table": {2: "a", 10: "b"}}

    def call(self, x):
        return x


def test_a_configuration_with_numbers_as_keys(tmp_path):
    model = keras.Sequential([keras.Input((4,)), Numbered(), layers.Dense(2)])
    keras_spmd.save_checkpoint(model, tmp_path, step=3)
    assert keras_spmd.load_checkpoint(model, tmp_path) == 3


def steps(folder):
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(folder))


def test_checkpoints_of_another_training_stay(tmp_path):
    for step in (10, 20):
        keras_spmd.save_checkpoint(training.make(), tmp_path, step=step)
    training.fit([keras_spmd.ShardedCheckpoint(tmp_path, keep=1, restore=False)])
    assert steps(tmp_path) == [10, 20, 38]
    assert keras_spmd.latest_checkpoint(tmp_path).name == "step-00000038"


def damage(folder):
    (file,) = folder.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 1]))


def test_good_checkpoints_are_kept_beside_a_damaged_one(tmp_path):
    saver = lambda **options: keras_spmd.ShardedCheckpoint(  # noqa: E731
        tmp_path, every_steps=2, keep=1, asynchronous=False, **options
    )
    with pytest.raises(InterruptedError):
        training.fit([saver(), training.Crash(4)])
    other = training.make()
    other.fit(*training.arrays(), verbose=0)
    damage(keras_spmd.save_checkpoint(other, tmp_path, step=9))
    with (
        pytest.warns(keras_spmd.ShardingWarning, match="an older one is tried"),
        pytest.raises(InterruptedError),
    ):
        training.fit([saver(), training.Crash(2)])
    assert set(steps(tmp_path)) >= {6, 9}
    training.assert_equal(training.fit([saver()]), training.fit())


def test_nothing_of_a_damaged_checkpoint_is_used(tmp_path):
    model = training.make()
    before = training.values(model)
    other = training.make()
    other.fit(*training.arrays(), verbose=0)
    damage(keras_spmd.save_checkpoint(other, tmp_path, step=1))
    with pytest.raises(keras_spmd.CheckpointError, match="damaged"):
        keras_spmd.load_checkpoint(model, tmp_path)
    for a, b in zip(training.values(model), before, strict=False):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(keras_spmd.CheckpointError, match=r"No checkpoint in .* can be used"):
        model.fit(*training.arrays(), callbacks=[keras_spmd.ShardedCheckpoint(tmp_path)])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Two(keras.Model):
    """Each half has an optimizer of its own, which is built in the first step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(6, name="first"), layers.Dense(5, name="second")
        self.of_first = keras.optimizers.Adam(0.01)
        self.of_second = keras.optimizers.Adam(0.02)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        loss.backward()
        for part, optimizer in ((self.first, self.of_first), (self.second, self.of_second)):
            variables = part.trainable_weights
            optimizer.apply([v.value.grad for v in variables], variables)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


def fit_two(callbacks=()):
    keras.utils.set_random_seed(1)
    model = Two()
    model.compile(loss="mse")
    x, y = training.arrays()
    model(x[:1])
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=list(callbacks))
    assert int(model.of_first.iterations) == 18
    state = [*model.variables, *model.of_first.variables, *model.of_second.variables]
    return history.history, [whole(v) for v in state]


@on_ranks(1, 2)
def test_optimizers_of_the_models_own_go_on_too():
    with shared_folder() as folder, model_parallel({".*kernel": ("model", None)}, line()).scope():
        expected = fit_two()
        make = lambda: keras_spmd.ShardedCheckpoint(folder / "saved", every_steps=4)  # noqa: E731
        with pytest.raises(InterruptedError):
            fit_two([make(), training.Crash(9)])
        training.assert_equal(fit_two([make()]), expected)


def normalizing():
    model = keras.Sequential(
        [keras.Input((6,)), layers.Normalization(name="norm", dtype="mixed_bfloat16")]
    )
    return model


@on_ranks(1, 2)
def test_layers_that_derive_numbers_from_their_variables():
    x = training.arrays()[0] * 3 + 5
    with shared_folder() as folder, training.of_ranks("data").scope():
        model = normalizing()
        model.layers[0].adapt(x)
        keras_spmd.save_checkpoint(model, folder, step=1)
        loaded = normalizing()
        keras_spmd.load_checkpoint(loaded, folder)
        np.testing.assert_array_equal(
            loaded.predict(x, verbose=0), model.predict(x, verbose=0), strict=True
        )


@on_ranks(1, 2)
def test_a_variable_without_elements():
    with shared_folder() as folder, training.of_ranks("data").scope():
        layer = layers.Dense(2)
        model = keras.Sequential([keras.Input((6,)), layer])
        layer._tracker.unlock()
        layer.add_weight(shape=(0, 3), name="nothing")
        layer.bias.assign([1.0, 2.0])
        keras_spmd.save_checkpoint(model, folder, step=1)
        layer.bias.assign([0.0, 0.0])
        keras_spmd.load_checkpoint(model, folder)
        np.testing.assert_array_equal(whole(layer.bias), [1.0, 2.0])
        assert any(0 in v.shape for v in model.variables)


@on_ranks(2)
def test_an_error_of_any_kind_on_one_rank_is_one_on_all():
    from keras_spmd.checkpoints import _index, _loading, _saving

    def failing(*args, **kwargs):
        raise KeyError("on this rank only")

    with shared_folder() as folder, training.of_ranks("rows").scope():
        model = training.make()
        keras_spmd.save_checkpoint(model, folder, step=1)
        for module, name, call in (
            (_saving, "write", lambda: keras_spmd.save_checkpoint(model, folder, step=2)),
            (_loading, "_part", lambda: keras_spmd.load_checkpoint(model, folder)),
            (_index, "_parsed", lambda: keras_spmd.load_checkpoint(model, folder)),
        ):
            original = getattr(module, name)
            if process_id() == 1:
                setattr(module, name, failing)
            try:
                with pytest.raises((keras_spmd.CheckpointError, KeyError), match="this rank only"):
                    call()
            finally:
                setattr(module, name, original)
        assert keras_spmd.load_checkpoint(model, folder) == 1


@pytest.mark.parametrize("kind", ["table", "model", "backup"])
@on_ranks(2)
def test_a_callback_that_cannot_write_fails_on_all_ranks(kind):
    with shared_folder() as folder, training.of_ranks("rows").scope():
        nowhere = folder / "file" / "x"
        if process_id() == 0:
            (folder / "file").write_text("")
        make = {
            "table": lambda: callbacks.CSVLogger(nowhere),
            "model": lambda: callbacks.ModelCheckpoint(str(nowhere / "m.keras")),
            "backup": lambda: callbacks.BackupAndRestore(str(nowhere)),
        }
        model, (x, y) = training.make(), training.arrays()
        with pytest.raises(NotADirectoryError):
            model.fit(x, y, verbose=0, callbacks=[make[kind]()])
        # Nobody is left waiting.
        assert np.isfinite(model.evaluate(x, y, verbose=0)[0])


def test_the_best_epoch(tmp_path):
    """A number that is none is never best, and epochs that were not validated don't count."""
    callback = keras_spmd.ShardedCheckpoint(tmp_path, best="val_loss")
    callback.set_model(training.make())
    found = []
    for value in (float("nan"), 3.0, None, 2.0):
        callback.step += 1
        callback.on_epoch_end(0, {"loss": 1.0} | ({} if value is None else {"val_loss": value}))
        found.append(callback.best_step)
    assert found == [None, 2, 2, 4]
    with pytest.raises(ValueError, match="'val_loss'` is not a metric"):
        callback.on_epoch_end(0, {"loss": 1.0, "val_mae": 2.0})


def test_a_training_that_was_stopped_and_then_saved_stays_stopped(tmp_path):
    class Stop(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    def run():
        model, (x, y) = training.make(), training.arrays()
        saver = keras_spmd.ShardedCheckpoint(tmp_path)
        history = model.fit(x, y, epochs=5, verbose=0, callbacks=[saver, Stop()])
        keras_spmd.save_checkpoint(model, tmp_path)
        return history.epoch

    for _ in range(3):
        assert run() == [0, 1]


def test_a_number_counts_batches_as_the_callback_does(tmp_path):
    model, (x, y) = training.make(), training.arrays()
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=4), "mse")
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[keras_spmd.ShardedCheckpoint(tmp_path)])
    keras_spmd.save_checkpoint(model, tmp_path)
    assert steps(tmp_path) == [6]


def test_an_address_is_not_a_folder():
    with pytest.raises(ValueError, match="not to addresses, got 'gs://"):
        keras_spmd.save_checkpoint(training.make(), "gs://bucket/run")
