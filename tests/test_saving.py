"""Keras's files: what a mesh writes is what one device writes, and fits any mesh."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from importlib.util import find_spec
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist
from keras import distribution, layers
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.utils import io_utils
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import keras_spmd
from bench import bench_of, on_ranks
from files import meet, shared_folder
from keras_spmd import _layouts
from keras_spmd._gathering import parts_of, whole_on_rank_0
from keras_spmd.distribution_lib import num_processes, process_id
from meshes import grid, line, model_parallel, whole


def make():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,), name="inputs")
    x = layers.Dense(8, activation="relu", name="first")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.Dropout(0.25, seed=3, name="dropout")(x)
    x = layers.Dense(6, name="short", dtype="bfloat16")(x)
    outputs = layers.Dense(5, name="last", dtype="mixed_bfloat16")(x)
    model = keras.Model(inputs, outputs, name="model")
    model.compile(keras.optimizers.AdamW(0.01, name="adam"), "mse", metrics=["mae"])
    return model


def train(model):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 5))
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    return model


def distributions():
    kinds = {
        "first/kernel": (None, "model"),
        "short/kernel": (None, "model"),
        "last/kernel": ("model", None),
        "last/bias": ("model",),
    }
    yield distribution.DataParallel()
    yield model_parallel(kinds, grid())
    yield model_parallel({".*kernel": ("model", None)}, line())


def state_of(model):
    """What is in its files. Keras keeps no states of seeds there."""
    return {v.path: whole(v) for v in [*model.weights, *model.optimizer.variables]}


def assert_same_state(a, b):
    for (path, x), (_, y) in zip(state_of(a).items(), state_of(b).items(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=path)


def members(path):
    """What is in a `.keras` file, without when it was written and where objects were in memory."""
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    metadata = json.loads(found.pop("metadata.json"))
    config = re.sub(rb'"shared_object_id": \d+', b"", found.pop("config.json"))
    return config, {**found, "version": metadata["keras_version"]}


@on_ranks(1, 2, 4, timeout=180)
def test_the_file_is_the_one_that_one_device_writes():
    with shared_folder() as folder:
        for i, dist_ in enumerate(distributions()):
            name = folder / f"{i}"
            with dist_.scope():
                model = train(make())
                model.save(f"{name}.keras")
                model.save_weights(f"{name}.weights.h5")
                model.save_weights(f"{name}-parts.weights.json", max_shard_size=1e-6)
            plain = keras.saving.load_model(f"{name}.keras")
            assert not any(isinstance(v._value, DTensor) for v in plain.variables)
            assert_same_state(plain, model)
            if process_id() == 0:
                other = folder / f"plain{i}"
                plain.save(f"{other}.keras")
                plain.save_weights(f"{other}.weights.h5")
                (folder / "p").mkdir()
                plain.save_weights(folder / "p" / f"{i}-parts.weights.json", max_shard_size=1e-6)
                config, contents = members(f"{name}.keras")
                assert contents == members(f"{other}.keras")[1]
                make().save(f"{other}.keras")
                assert config == members(f"{other}.keras")[0]
                assert (
                    Path(f"{name}.weights.h5").read_bytes()
                    == Path(f"{other}.weights.h5").read_bytes()
                )
                parts = sorted((folder / "p").iterdir())
                assert len(parts) > 2
                for part in parts:
                    assert part.read_bytes() == (folder / part.name).read_bytes(), part.name
                shutil.rmtree(folder / "p")
                assert not [f for f in os.listdir(folder) if f.startswith(".")]
            meet()


@on_ranks(2, 4, timeout=180)
def test_other_ranks_never_have_a_whole_variable():
    with shared_folder() as folder:
        with model_parallel({".*kernel": ("model", None)}, line()).scope():
            model = train(make())
            sent, send = [], dist.send

            def counting(x, *args, **kwargs):
                sent.append(x.numel())
                send(x, *args, **kwargs)

            def never(*args, **kwargs):
                raise AssertionError("a tensor was gathered on all ranks")

            before = DTensor.full_tensor, DTensor.redistribute
            dist.send, DTensor.full_tensor, DTensor.redistribute = counting, never, never
            try:
                model.save(folder / "m.keras")
            finally:
                dist.send = send
                DTensor.full_tensor, DTensor.redistribute = before
            own = sum(
                v.value.to_local().nbytes
                for v in [*model.variables, *model.optimizer.variables]
                if isinstance(v.value, DTensor) and Shard(0) in v.value.placements
            )
        assert sum(sent) == (own if process_id() else 0)


@on_ranks(1, 2, 4)
def test_parts_of_a_tensor():
    mesh = grid().backend_mesh
    rows = [[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)], [Partial()] * 2]
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int16):
        x = torch.arange(35).reshape(7, 5).to(dtype)
        for placements in rows:
            if Partial() in placements:
                zero = process_id() > 0
                laid_out = DTensor.from_local(x * (not zero), mesh, placements, run_check=False)
                if dtype in (torch.bool, torch.int16):
                    continue  # gloo can't add these
            else:
                mine = _layouts.local_slice(x, mesh, placements)
                laid_out = _layouts.wrap_local(mine, mesh, placements, x.shape)
                parts = list(parts_of(laid_out))
                assert len({str(part) for _, part in parts}) == len(parts)
            got = whole_on_rank_0(laid_out)
            assert (got is not None) == (process_id() == 0)
            if got is not None:
                torch.testing.assert_close(got, x, rtol=0, atol=0)


@on_ranks(1, 2, 4, timeout=180)
@pytest.mark.parametrize("when", ["open", "third variable", "close"])
def test_what_goes_wrong_on_rank_0_is_raised_everywhere_and_leaves_the_old_file(when):
    with shared_folder() as folder:
        path = folder / "m.weights.h5"
        with model_parallel({".*kernel": ("model", None)}, line()).scope():
            model = train(make())
            model.save_weights(path)
            old = path.read_bytes()
            train(model)
            store = saving_lib.H5IOStore
            names = {"open": "_get_h5_file", "third variable": "_create_h5_group", "close": "close"}
            original = getattr(store, names[when])
            calls = []

            def failing(self, *args, **kwargs):
                calls.append(None)
                if process_id() == 0 and (when != "third variable" or len(calls) == 3):
                    raise OSError(28, "No space left on device")
                return original(self, *args, **kwargs)

            setattr(store, names[when], failing)
            try:
                with pytest.raises(OSError, match="No space left on device"):
                    model.save_weights(path)
            finally:
                setattr(store, names[when], original)
            assert path.read_bytes() == old
            assert os.listdir(folder) == ["m.weights.h5"]
            meet()
            model.save_weights(path)
            meet()
            assert path.read_bytes() != old
            fresh = make()
            fresh.optimizer.build(fresh.trainable_variables)
            fresh.load_weights(path)
            assert_same_state(fresh, model)
            with pytest.raises(FileNotFoundError, match="No such file"):
                model.save_weights(folder / "nowhere" / "m.weights.h5")


def wrapping():
    """A model that has torch's modules in its configuration, as Keras keeps them."""
    keras.utils.set_random_seed(0)
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    )
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.TorchModuleWrapper(module, output_shape=(None, 4))(inputs))
    model.compile("sgd", "mse")
    return model


@on_ranks(1, 2)
def test_wrapped_torch_modules_are_saved_whole():
    x = np.linspace(-1, 1, 24).reshape(4, 6).astype("float32")
    with shared_folder() as folder:
        expected = wrapping().predict(x, verbose=0)
        with model_parallel({".*": ("model",)}, line()).scope():
            model = wrapping()
            np.testing.assert_allclose(model.predict(x, verbose=0), expected, 1e-5, 1e-6)
            model.save(folder / "m.keras")
            again = keras.saving.load_model(folder / "m.keras", safe_mode=False)
            np.testing.assert_allclose(again.predict(x, verbose=0), expected, 1e-5, 1e-6)
            keras_spmd.save_checkpoint(model, folder / "steps", step=1)
            model.export(folder / "m.pt2", format="torch", verbose=False)
        # Nothing of the mesh is in the file.
        alone = keras.saving.load_model(folder / "m.keras", safe_mode=False)
        np.testing.assert_allclose(alone.predict(x, verbose=0), expected, 1e-5, 1e-6)
        # Keras exports it for a batch of one.
        exported = torch.export.load(folder / "m.pt2").module()
        one = exported(torch.tensor(x[:1])).detach()
        np.testing.assert_allclose(one, expected[:1], 1e-5, 1e-6)


@on_ranks(1, 2)
def test_a_buffer_in_memory_has_the_file_on_all_ranks():
    with model_parallel({".*kernel": ("model", None)}, line()).scope():
        model, buffer = train(make()), io.BytesIO()
        saving_lib.save_model(model, buffer)
        buffer.seek(0)
        assert_same_state(saving_lib.load_model(buffer), model)


@on_ranks(2)
def test_functions_behind_the_public_ones_write_once():
    """Libraries call them, too."""
    with shared_folder() as folder:
        with model_parallel({".*kernel": ("model", None)}, line()).scope():
            model = train(make())
            saving_lib.save_model(model, str(folder / "m.keras"))
            assert_same_state(saving_lib.load_model(str(folder / "m.keras")), model)
            saving_lib.save_weights_only(model, str(folder / "m.weights.h5"))
            small = keras.Sequential([keras.Input((6,)), layers.Dense(8, name="kernel")])
            legacy_h5_format.save_model_to_hdf5(small, str(folder / "m.h5"))
            again = keras.saving.load_model(folder / "m.h5")
            np.testing.assert_array_equal(whole(again.weights[0]), whole(small.weights[0]))
        meet()
        assert sorted(os.listdir(folder)) == ["m.h5", "m.keras", "m.weights.h5"]


@on_ranks(2)
def test_a_file_that_is_not_to_be_overwritten():
    with shared_folder() as folder:
        path, ask, asked = folder / "m.keras", io_utils.ask_to_proceed_with_overwrite, []
        with distribution.DataParallel().scope():
            model = make()
            model.save(path)
            meet()
            old = path.read_bytes()
            io_utils.ask_to_proceed_with_overwrite = lambda name: asked.append(name) or False
            try:
                train(model).save(path, overwrite=False)
            finally:
                io_utils.ask_to_proceed_with_overwrite = ask
            meet()
            assert path.read_bytes() == old
            assert asked == ([str(path)] if process_id() == 0 else [])


@on_ranks(2)
def test_folders():
    with shared_folder() as folder:
        with model_parallel({".*kernel": ("model", None)}, line()).scope():
            model = train(make())
            for _ in range(2):
                model.save(folder / "unzipped", zipped=False)
            # Keras makes the folders above it.
            model.save(folder / "new" / "one", zipped=False)
        meet()
        for path in (folder / "unzipped", folder / "new" / "one"):
            assert "model.weights.h5" in os.listdir(path)
        assert sorted(os.listdir(folder)) == ["new", "unzipped"]
        assert os.listdir(folder / "new") == ["one"]


@on_ranks(1, 2, 4, timeout=180)
def test_any_mesh_loads_what_any_other_has_written():
    with shared_folder() as folder:
        plain = train(make())
        if process_id() == 0:
            plain.save(folder / "plain.keras")
            plain.save_weights(folder / "plain.weights.h5")
            plain.save_weights(folder / "plain.weights.json", max_shard_size=1e-6)
        meet()
        for i, dist_ in enumerate(distributions()):
            with dist_.scope():
                loaded = keras.saving.load_model(folder / "plain.keras")
                assert_same_state(loaded, plain)
                for end in ("weights.h5", "weights.json", "keras"):
                    model = make()
                    model.optimizer.build(model.trainable_variables)
                    model.load_weights(folder / f"plain.{end}")
                    assert_same_state(model, plain)
                train(loaded).save(folder / f"{i}.keras")
            for other in distributions():
                with other.scope():
                    assert_same_state(keras.saving.load_model(folder / f"{i}.keras"), loaded)


@on_ranks(2, 4, timeout=180)
def test_a_rank_reads_what_its_shards_need():
    with shared_folder() as folder:
        with model_parallel({".*kernel": ("model", None)}, line()).scope():
            model = train(make())
            model.save(folder / "m.keras")
            model.save_weights(folder / "m.weights.h5")
            read, original = [], h5py.Dataset.__getitem__

            def counting(self, *args, **kwargs):
                result = original(self, *args, **kwargs)
                read.append((self.shape, np.size(result)))
                return result

            h5py.Dataset.__getitem__ = counting
            try:
                keras.saving.load_model(folder / "m.keras")
                model.load_weights(folder / "m.weights.h5")
            finally:
                h5py.Dataset.__getitem__ = original
        kernels = [size for shape, size in read if shape == (8, 6)]
        assert len(kernels) == 2 * 3  # two files, a kernel with two slots of AdamW
        assert set(kernels) == {8 * 6 // num_processes()}


@on_ranks(2)
def test_files_that_do_not_fit():
    with shared_folder() as folder, model_parallel({".*kernel": ("model", None)}, line()).scope():
        make().save_weights(folder / "m.weights.h5")
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="kernel")])
        with pytest.raises(ValueError, match=r"could not be loaded|Layer"):
            model.load_weights(folder / "m.weights.h5")
        with pytest.raises(FileNotFoundError):
            model.load_weights(folder / "nothing.weights.h5")


@on_ranks(1, 2)
def test_layers_that_compute_with_what_they_load():
    class Doubled(layers.Dense):
        def load_own_variables(self, store):
            kernel = store["0"]
            assert (kernel.shape, kernel.ndim, len(kernel)) == ((6, 4), 2, 6)
            assert not np.isnan(kernel).any()
            self.kernel.assign(2 * kernel + kernel.mean() - np.mean(kernel))
            self.bias.assign(np.array(store["1"]))

    with shared_folder() as folder, model_parallel({".*kernel": ("model", None)}, line()).scope():
        model = keras.Sequential([keras.Input((6,)), Doubled(4)])
        model.save_weights(folder / "m.weights.h5")
        before = whole(model.layers[0].kernel)
        model.load_weights(folder / "m.weights.h5")
        np.testing.assert_allclose(whole(model.layers[0].kernel), 2 * before, 1e-6)


@on_ranks(1, 2, timeout=180)
def test_exports_are_those_of_one_device():
    warnings.simplefilter("ignore")
    with shared_folder() as folder:
        for i, dist_ in enumerate(distributions()):
            with dist_.scope():
                model = train(make())
                model.export(folder / f"{i}.pt2", format="torch", verbose=False)
                expected = whole(model(np.ones((1, 6), "float32")))
                assert num_processes() == 1 or isinstance(model.layers[1].kernel.value, DTensor)
                assert distribution.distribution() is dist_
                train(model)
            program = torch.export.load(folder / f"{i}.pt2").module()
            np.testing.assert_allclose(
                program(torch.ones(1, 6)).float().detach(), expected, 1e-2, 1e-2
            )


ONNX = ("onnx", "onnxscript", "onnxruntime")


def onnx_on_ranks():
    import onnxruntime

    warnings.simplefilter("ignore")
    x = np.random.default_rng(0).normal(size=(3, 6)).astype("float32")
    with shared_folder() as folder:
        for i, dist_ in enumerate(distributions()):
            file = folder / f"{i}.onnx"
            with dist_.scope():
                inputs = keras.Input((6,))
                first = layers.Dense(8, activation="relu", name="first")(inputs)
                last = layers.Dense(5, name="last")(layers.BatchNormalization()(first))
                model = keras.Model(inputs, last)
                expected = model.predict(x, verbose=0)
                model.export(file, format="onnx", verbose=False)
                np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
            meet()
            session = onnxruntime.InferenceSession(file)
            (found,) = session.run(None, {session.get_inputs()[0].name: x})
            np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


@pytest.mark.skipif(not all(map(find_spec, ONNX)), reason="onnx is not installed")
@pytest.mark.parametrize("ranks", [1, 2])
def test_onnx_computes_what_the_mesh_does(ranks):
    bench_of(ranks).run(onnx_on_ranks, {}, 180)


@on_ranks(2)
def test_an_export_that_fails_fails_on_all_ranks():
    with shared_folder() as folder, distribution.DataParallel().scope():
        model = make()
        with pytest.raises(ValueError, match="pt2"):
            model.export(folder / "model.zip", format="torch")
        assert isinstance(model.layers[1].kernel.value, DTensor)


@on_ranks(1, 2)
def test_weights_and_torch_state():
    """`get_weights` is whole on every rank; a `state_dict` can be taken from plain torch."""
    with model_parallel({".*kernel": ("model", None)}, line()).scope():
        model, other = make(), make()
        for v in other.weights:
            v.assign(np.zeros(v.shape))
        other.set_weights(model.get_weights())
        assert_same_state(other, model)
        state = model.state_dict()
        plain = {
            name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()
        }
        for v in other.weights:
            v.assign(np.zeros(v.shape))
        other.load_state_dict(dict(zip(other.state_dict(), plain.values(), strict=True)))
        assert_same_state(other, model)


WRITE = """
import os, sys
os.environ["KERAS_BACKEND"] = sys.argv[1]
import keras, numpy as np
from keras import layers
keras.utils.set_random_seed(1)
dense = [layers.Dense(8, name="first"), layers.Dense(5, name="last")]
model = keras.Sequential([keras.Input((6,)), *dense])
model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(8, 6))
model.fit(x, x[:, :5], verbose=0)
model.save(sys.argv[2] + ".keras")
model.save_weights(sys.argv[2] + ".weights.h5")
np.save(sys.argv[2] + ".npy", model.predict(x, verbose=0))
"""


def load_from_elsewhere(path):
    x = np.random.default_rng(0).normal(size=(8, 6))
    with model_parallel({".*kernel": ("model", None)}, line()).scope():
        model = keras.saving.load_model(f"{path}.keras")
        np.testing.assert_allclose(model.predict(x, verbose=0), np.load(f"{path}.npy"), 1e-4, 1e-5)
        assert int(model.optimizer.iterations) == 1
        for v in model.weights:
            v.assign(np.zeros(v.shape))
        model.load_weights(f"{path}.weights.h5")
        np.testing.assert_allclose(model.predict(x, verbose=0), np.load(f"{path}.npy"), 1e-4, 1e-5)


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_files_written_by_other_backends(tmp_path, backend):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    subprocess.run([sys.executable, "-c", WRITE, backend, str(tmp_path / "m")], check=True)
    bench_of(2).run(load_from_elsewhere, {"path": str(tmp_path / "m")}, 180)


@on_ranks(2)
def test_a_store_that_a_library_writes_is_one_file():
    """As KerasHub does with the weights of LoRA."""
    with shared_folder() as folder, model_parallel({".*kernel": (None, "model")}, line()).scope():
        kernel = make().get_layer("first").kernel
        store = saving_lib.H5IOStore(folder / "store.h5", mode="w")
        store.make("some")["kernel"] = kernel
        store.close()
        with h5py.File(folder / "store.h5") as file:
            np.testing.assert_array_equal(file["some/vars/kernel"], whole(kernel))
