"""Sharded checkpoints: whole on any mesh, exact to go on from, and never half of one."""

import gc
import json
import os
import pickle
import resource
import shutil
import threading
import time
import warnings
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from keras import callbacks
from safetensors import safe_open

import keras_spmd
import training
from bench import bench_of, on_ranks, sample
from files import meet, shared_folder
from keras_spmd import cli
from keras_spmd.checkpoints import _callback, _saving
from keras_spmd.checkpoints._index import Checkpoint
from keras_spmd.distribution_lib import num_processes, process_id


def save_on_ranks(path, kind):
    with training.of_ranks(kind).scope():
        model = training.make()
        x, y = training.arrays()
        model.fit(x, y, batch_size=8, verbose=0)
        found = keras_spmd.save_checkpoint(model, path)
        assert found == Path(path) / "step-00000006"
    return training.values(model)


def load_on_ranks(path, kind):
    with training.of_ranks(kind).scope():
        model = training.make()
        assert keras_spmd.load_checkpoint(model, path) == 6
        assert int(model.optimizer.iterations) == 6
    return training.values(model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "data"), (4, "rows")),
        ((4, "both"), (3, "fsdp")),
        ((4, "fsdp"), (1, "data")),
        ((3, "rows"), (2, "both")),
    ],
)
def test_a_checkpoint_fits_any_mesh(tmp_path, before, after):
    (ranks, kind), (ranks_after, kind_after) = before, after
    saved = bench_of(ranks).run(save_on_ranks, {"path": str(tmp_path), "kind": kind}, 180)
    files = [file for file in os.listdir(tmp_path / "step-00000006") if file != "index.json"]
    assert len(files) == ranks
    options = {"path": str(tmp_path), "kind": kind_after}
    for loaded in bench_of(ranks_after).run(load_on_ranks, options, 180):
        for a, b in zip(loaded, saved[0], strict=True):
            np.testing.assert_array_equal(a, b)


@on_ranks(1, 2)
def test_others_can_read_it():
    """The files are plain safetensors, and torch.distributed.checkpoint reads them."""
    with shared_folder() as folder, training.of_ranks("rows").scope():
        model = training.make()
        path = keras_spmd.save_checkpoint(model, folder, step=3)
        name = "model/dense/kernel"
        parts = []
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                parts += [opened.get_tensor(name)] if name in opened.keys() else []  # noqa: SIM118
        kernel = training.whole(model.layers[1].kernel)
        np.testing.assert_array_equal(torch.cat(parts), kernel)
        state = {name: torch.zeros(kernel.shape)}
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
        np.testing.assert_array_equal(state[name], kernel)


@on_ranks(1, 2)
def test_nothing_is_pickled():
    def refuse(*args, **kwargs):
        raise AssertionError("pickled")

    with shared_folder() as folder, training.of_ranks("rows").scope():
        model = training.make()
        kept = pickle.dumps, pickle.loads, pickle.Pickler, pickle.Unpickler
        pickle.dumps = pickle.loads = pickle.Pickler = pickle.Unpickler = refuse
        try:
            keras_spmd.save_checkpoint(model, folder, step=1)
            keras_spmd.load_checkpoint(model, folder)
        finally:
            pickle.dumps, pickle.loads, pickle.Pickler, pickle.Unpickler = kept


def test_a_changed_model_is_refused(tmp_path):
    keras_spmd.save_checkpoint(training.make(), tmp_path, step=0)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, name="dense")(inputs)
    x = keras.layers.LayerNormalization(name="layer_normalization")(x)
    model = keras.Model(inputs, x, name="other")
    with pytest.raises(ValueError) as info:
        keras_spmd.load_checkpoint(model, tmp_path)
    message = str(info.value)
    assert "not one of the model 'other'" in message
    assert "model/layer_normalization/gamma" in message.split("Not in the model")[0]
    assert "model/norm/gamma" in message.split("Not in the model")[1]
    assert "model/dense/kernel: (6, 9) was saved, the model has (6, 8)" in message


def test_layers_that_keras_numbered_again(tmp_path):
    def make():
        inner = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((3,)), *inner])

    model, other = make(), make()
    keras_spmd.save_checkpoint(model, tmp_path, step=0)
    assert other.layers[0].name != model.layers[0].name
    keras_spmd.load_checkpoint(other, tmp_path)
    for a, b in zip(other.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_bad_arguments(tmp_path):
    model = training.make()
    for step in (-1, 1.5, "3"):
        with pytest.raises(ValueError, match="`step` must be"):
            keras_spmd.save_checkpoint(model, tmp_path, step=step)
    with pytest.raises(ValueError, match="has no variables yet"):
        keras_spmd.save_checkpoint(keras.Sequential([keras.layers.Dense(2)]), tmp_path)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        keras_spmd.load_checkpoint(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="not a folder"):
        keras_spmd.load_checkpoint(model, tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        keras_spmd.load_checkpoint(model, tmp_path, step=3)
    for name in ("every_steps", "every_seconds", "keep"):
        with pytest.raises(ValueError, match=name):
            keras_spmd.ShardedCheckpoint(tmp_path, **{name: 0})
    with pytest.raises(ValueError, match="mode"):
        keras_spmd.ShardedCheckpoint(tmp_path, mode="least")


def test_without_its_index_it_does_not_exist(tmp_path):
    model = training.make()
    old = keras_spmd.save_checkpoint(model, tmp_path, step=1)
    new = keras_spmd.save_checkpoint(model, tmp_path, step=2)
    (new / "index.json").unlink()
    assert keras_spmd.latest_checkpoint(tmp_path) == old
    assert keras_spmd.load_checkpoint(model, tmp_path) == 1
    # What a save left behind that never ended is removed by the next one.
    keras_spmd.save_checkpoint(model, tmp_path, step=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_the_same_step_again_replaces_it(tmp_path):
    model = training.make()
    keras_spmd.save_checkpoint(model, tmp_path, step=1)
    model.layers[1].kernel.assign(np.ones((6, 9)))
    path = keras_spmd.save_checkpoint(model, tmp_path, step=1)
    assert len(list(path.iterdir())) == 2
    assert bool((Checkpoint(path).read("model/dense/kernel") == 1).all())


def damage(path, how):
    (file,) = path.glob("*.safetensors")
    index = path / "index.json"
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 8)
    elif how == "tampered":
        data = bytearray(file.read_bytes())
        data[-4] ^= 1
        file.write_bytes(data)
    elif how == "header":
        data = bytearray(file.read_bytes())
        data[20] ^= 1
        file.write_bytes(data)
    elif how == "missing":
        file.unlink()
    elif how == "index":
        index.write_text(index.read_text().replace('"step": 2', '"step": 7'))
    elif how == "half an index":
        index.write_text(index.read_text()[:200])


DAMAGES = ["truncated", "tampered", "header", "missing", "index", "half an index"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_older_one_is_there(tmp_path, how):
    model = training.make()
    keras_spmd.save_checkpoint(model, tmp_path, step=1)
    damage(keras_spmd.save_checkpoint(model, tmp_path, step=2), how)
    with pytest.raises(keras_spmd.CheckpointError, match=r"damaged|missing|cut off"):
        keras_spmd.load_checkpoint(model, tmp_path)
    assert keras_spmd.load_checkpoint(model, tmp_path, step=1) == 1
    callback = keras_spmd.ShardedCheckpoint(tmp_path)
    callback.set_model(model)
    with pytest.warns(keras_spmd.ShardingWarning, match="an older one is tried"):
        callback.on_train_begin()
    callback._give_back()
    assert callback.step == 1


@on_ranks(2)
def test_damage_that_one_rank_sees_is_an_error_on_all():
    with shared_folder() as folder, training.of_ranks("rows").scope():
        model = training.make()
        path = keras_spmd.save_checkpoint(model, folder, step=1)
        if process_id() == 1:
            (file,) = path.glob("*-00001-of-00002.safetensors")
            os.truncate(file, 100)
            model.layers[1].kernel  # noqa: B018
        with pytest.raises(keras_spmd.CheckpointError, match="cut off"):
            keras_spmd.load_checkpoint(model, folder)


@on_ranks(1, 2)
def test_a_rank_that_cannot_write():
    """A full disk: all ranks hear of it, nothing is left behind, and the older one stays."""
    with shared_folder() as folder, training.of_ranks("rows").scope():
        model = training.make()
        old = keras_spmd.save_checkpoint(model, folder, step=1)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if process_id() == num_processes() - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            with pytest.raises(keras_spmd.CheckpointError, match="File too large"):
                keras_spmd.save_checkpoint(model, folder, step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert keras_spmd.latest_checkpoint(folder) == old
        assert not list(folder.glob("step-00000002/*"))
        keras_spmd.save_checkpoint(model, folder, step=2)
        assert keras_spmd.load_checkpoint(model, folder) == 2


def test_a_folder_that_cannot_be_written_to(tmp_path):
    model = training.make()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(keras_spmd.CheckpointError, match="was not saved"):
        keras_spmd.save_checkpoint(model, file, step=1)


@on_ranks(2)
def test_ranks_that_save_different_things():
    with shared_folder() as folder, training.of_ranks("rows").scope():
        model = training.make()
        os.environ["KERAS_SPMD_TIMEOUT"] = "2"
        match = "saves step 1 in" if process_id() == 1 else "waited 2 s for rank 1"
        with pytest.raises((ValueError, TimeoutError), match=match):
            keras_spmd.save_checkpoint(model, folder, step=process_id())
        assert not list(folder.glob("*/index.json"))


@on_ranks(1, 2)
def test_an_asynchronous_save_does_not_wait_for_the_disk():
    go_on = threading.Event()
    original = _saving.write

    def slow(*args):
        go_on.wait()
        return original(*args)

    with shared_folder() as folder, training.of_ranks("rows").scope():
        model = training.make()
        _saving.write = slow
        try:
            expected = training.whole(model.layers[1].kernel)
            saving = keras_spmd.save_checkpoint(model, folder, step=1, asynchronous=True)
            assert not saving.done()
            model.layers[1].kernel.assign(np.zeros((6, 9)))
            go_on.set()
            path = saving.wait()
        finally:
            _saving.write = original
        np.testing.assert_array_equal(Checkpoint(path).read("model/dense/kernel"), expected)
        assert keras_spmd.latest_checkpoint(folder) == path


def test_an_asynchronous_save_that_fails_says_so(tmp_path):
    model = training.make()
    file = tmp_path / "file"
    file.write_text("")
    saving = keras_spmd.save_checkpoint(model, file, step=1, asynchronous=True)
    with pytest.raises(keras_spmd.CheckpointError, match="was not saved"):
        saving.wait()
    keras_spmd.save_checkpoint(model, file, step=2, asynchronous=True)
    with pytest.raises(keras_spmd.CheckpointError, match="was not saved"):
        keras_spmd.save_checkpoint(model, tmp_path, step=3)


def interrupted(make_callback, after, **options):
    """A training that dies after some batches and is begun again, twice."""
    for i in (after, 4):
        with pytest.raises(InterruptedError):
            training.fit([make_callback(), training.Crash(i)], **options)
    return training.fit([make_callback()], **options)


@pytest.mark.parametrize("kind", sample(training.KINDS, "arrays", "loader", "generator"))
@on_ranks(2, timeout=180, exhaustive=(1,))
def test_a_training_goes_on_exactly_where_it_was(kind):
    with shared_folder() as folder, training.of_ranks("rows").scope():
        expected = training.fit(kind=kind)
        # In the middle of an epoch, after its last batch, and after an epoch.
        for i, (every, after) in enumerate([(1, 2), (3, 3), (None, 10), (5, 11)]):
            path = folder / f"{i}"

            def make(path=path, every=every):
                return keras_spmd.ShardedCheckpoint(path, every_steps=every)

            training.assert_equal(interrupted(make, after, kind=kind), expected)


@on_ranks(2, timeout=180, exhaustive=(1,))
def test_a_compiled_training_goes_on_exactly():
    with shared_folder() as folder, training.of_ranks("data").scope():
        expected = training.fit(jit_compile=True)

        def make():
            return keras_spmd.ShardedCheckpoint(folder, every_steps=2)

        training.assert_equal(interrupted(make, 9, jit_compile=True), expected)


def test_a_training_goes_on_without_a_distribution(tmp_path):
    expected = training.fit()
    make = lambda: keras_spmd.ShardedCheckpoint(tmp_path, every_steps=4)  # noqa: E731
    training.assert_equal(interrupted(make, 5), expected)


@pytest.mark.parametrize("freq", ["epoch", 4])
@on_ranks(1, 2, timeout=180)
def test_backup_and_restore_goes_on_exactly(freq):
    """Keras's own callback keeps neither the order of batches nor seeds, metrics and history."""
    with shared_folder() as folder, training.of_ranks("rows").scope():
        expected = training.fit()

        def make():
            return callbacks.BackupAndRestore(folder / "backup", save_freq=freq)

        training.assert_equal(interrupted(make, 8), expected)
        assert not (folder / "backup").exists()


def test_a_model_does_not_keep_the_data_it_was_trained_with():
    model = training.make()
    x, y = training.arrays()
    alive = weakref.ref(x)
    model.fit(x, y, verbose=0)
    del x
    gc.collect()
    assert alive() is None


def test_a_finished_training_that_is_started_again(tmp_path):
    make = lambda: keras_spmd.ShardedCheckpoint(tmp_path)  # noqa: E731
    expected = training.fit([make()])
    training.assert_equal(training.fit([make()]), expected)
    more = training.fit([make()], epochs=4)
    training.assert_equal(more, training.fit(epochs=4))


@on_ranks(1, 2)
def test_which_checkpoints_are_kept():
    with shared_folder() as folder, training.of_ranks("data").scope():
        callback = keras_spmd.ShardedCheckpoint(
            folder, every_steps=2, keep=2, best="loss", mode="max", asynchronous=False
        )
        history, _ = training.fit([callback])
        # The loss was highest in the first epoch.
        assert np.argmax(history["loss"]) == 0
        assert callback.best_path == folder / "step-00000006"
        meet()
        steps = [Checkpoint(path).step for path in sorted(folder.iterdir())]
        assert steps == [6, 16, 18]


@on_ranks(2)
def test_ranks_save_at_the_same_step_when_their_clocks_differ():
    with shared_folder() as folder, training.of_ranks("data").scope():
        callback = keras_spmd.ShardedCheckpoint(folder, every_seconds=1e4, keep=None)
        real = time.monotonic
        count = [0]

        def clock():
            count[0] += 1
            return real() + (2e4 * count[0] if process_id() == 1 and count[0] < 8 else 0)

        _callback.time = type("clock", (), {"monotonic": staticmethod(clock)})
        try:
            training.fit([callback], epochs=1)
        finally:
            _callback.time = time
        assert len(list(folder.iterdir())) >= 2
        for path in folder.iterdir():
            Checkpoint(path).verify()


def test_an_unknown_metric_is_refused(tmp_path):
    callback = keras_spmd.ShardedCheckpoint(tmp_path, best="val_los")
    with pytest.raises(ValueError, match=r"'val_los'.*not a metric.*val_loss"):
        training.fit([callback])


def test_the_index_is_plain_json(tmp_path):
    path = keras_spmd.save_checkpoint(training.make(), tmp_path, step=4)
    index = json.loads((path / "index.json").read_text())
    assert index["step"] == 4
    assert index["variables"]["model/dense/kernel"]["shape"] == [6, 9]
    (part,) = index["variables"]["model/dense/kernel"]["parts"]
    assert part["start"] == [0, 0]
    assert set(index["files"]) == {part["file"]}
    shutil.copytree(path, tmp_path / "moved")
    assert keras_spmd.load_checkpoint(training.make(), tmp_path / "moved") == 4


def command(*words):
    return cli.main(["convert", *map(str, words)])


def test_conversions(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    model = training.make()
    x, y = training.arrays()
    model.fit(x, y, batch_size=8, verbose=0)
    expected = training.values(model)
    keras_spmd.save_checkpoint(model, tmp_path / "run", step=40)
    assert command(tmp_path / "run", tmp_path / "m.keras") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    # Keras keeps no states of seeds in its files.
    for a, b in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    assert command(tmp_path / "run", tmp_path / "m.weights.h5", "--step", 40) == 0
    again = ["--model", "training:make"]
    assert command(tmp_path / "m.weights.h5", tmp_path / "back", "--step", 3, *again) == 0
    other = training.make()
    assert keras_spmd.load_checkpoint(other, tmp_path / "back") == 3
    for a, b in zip(other.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    assert command(tmp_path / "m.keras", tmp_path / "from keras") == 0
    assert keras_spmd.load_checkpoint(other, tmp_path / "from keras") == 6
    assert len(training.values(other)) == len(expected)


@pytest.mark.parametrize("is_inside", [False, True], ids=["alone", "inside of a model"])
def test_a_sequence_of_layers_is_converted(tmp_path, is_inside):
    """Made from its config, it has other paths."""
    dense = [keras.layers.Dense(3, name="first"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *dense])
    if is_inside:
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.Dense(2)(model(x)))
    model.compile("adam", "mse")
    x = np.ones((8, 4), "float32")
    model.fit(x, x[:, : model.output_shape[-1]], verbose=0)
    keras_spmd.save_checkpoint(model, tmp_path / "run", step=1)
    assert command(tmp_path / "run", tmp_path / "m.keras") == 0
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    for a, b in zip(training.values(loaded), training.values(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_conversions_that_cannot_be(tmp_path, capsys):
    keras_spmd.save_checkpoint(training.make(), tmp_path / "run", step=0)
    (tmp_path / "text.txt").write_text("")
    (tmp_path / "m.weights.h5").write_text("")
    for words, message in [
        (["absent", tmp_path / "m.keras"], "There is no 'absent'"),
        ([tmp_path / "text.txt", tmp_path / "m.keras"], "neither a checkpoint"),
        ([tmp_path / "run", tmp_path / "m.h5"], "must end with .weights.h5"),
        ([tmp_path / "m.weights.h5", tmp_path / "m.keras"], "--model module:function"),
        ([tmp_path / "run", tmp_path / "m.keras", "--step", 9], "no complete checkpoint"),
        ([tmp_path / "run", tmp_path / "m.keras", "--model", "training"], "MODULE:FUNCTION"),
        ([tmp_path / "run", tmp_path / "m.keras", "--model", "no:make"], "can't be imported"),
    ]:
        assert command(*words) == 2
        assert message in capsys.readouterr().err
