"""Meshes and layouts: any shape and order, uneven dims, clear errors, nothing silent."""

import inspect
import itertools
import os
import sys
import warnings

import keras
import numpy as np
import pytest
import torch
from keras import distribution
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import keras_spmd
from bench import on_ranks
from keras_spmd import _layouts, _notices
from keras_spmd.distribution_lib import (
    _to_backend_device,
    _to_backend_layout,
    _to_backend_mesh,
    distribute_data_input,
    distribute_tensor,
    distribute_variable,
    get_device_count,
    list_devices,
    num_processes,
    process_id,
)
from meshes import assert_same, grid, line, model_parallel, partial, placements, whole

X = np.arange(80, dtype="float32").reshape(10, 8)


def layout(axes, mesh):
    return distribution.TensorLayout(axes, mesh)


@on_ranks(1, 2, 4)
def test_devices_are_those_of_the_whole_job():
    count = num_processes()
    assert distribution.list_devices() == [f"cpu:{i}" for i in range(count)]
    assert distribution.list_devices("cpu") == distribution.list_devices()
    assert list_devices("gpu") == []
    assert distribution.get_device_count() == get_device_count("cpu") == count
    assert get_device_count("gpu") == 0
    assert 0 <= process_id() < count
    assert _to_backend_device("cpu:0") == torch.device("cpu")
    assert _to_backend_device("cpu") == torch.device("cpu")
    assert _to_backend_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ValueError, match="Device not found: cpu:9"):
        _to_backend_device("cpu:9")


@on_ranks(1, 2, 4)
def test_meshes_of_one_to_three_axes_in_any_device_order():
    keeps_order = "sort_ranks" in inspect.signature(torch.distributed.new_group).parameters
    if not keeps_order:
        warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    count = num_processes()
    devices = distribution.list_devices()
    for shape in ((count,), (1, count), (count, 1), (1, count, 1), (count, 1, 1)):
        names = ("a", "b", "c")[: len(shape)]
        for order in (devices, devices[::-1]):
            mesh = distribution.DeviceMesh(shape, names, order)
            assert tuple(mesh.backend_mesh.shape) == shape
            assert mesh.backend_mesh.mesh_dim_names == names
            where = names[shape.index(max(shape))]
            x = distribution.distribute_tensor(X, layout((where,), mesh))
            assert_same(x, X)
            if count > 1 and keeps_order:
                place = order.index(f"cpu:{process_id()}")
                part = torch.tensor(X).chunk(count)[place]
                np.testing.assert_array_equal(x.to_local().numpy(), part.numpy())
    if count == 4:
        orders = (devices, devices[::-1], [devices[i] for i in (0, 3, 2, 1)])
        for shape, order in itertools.product(((2, 2), (2, 1, 2), (2, 2, 1)), orders):
            mesh = distribution.DeviceMesh(shape, ("a", "b", "c")[: len(shape)], order)
            for axes in (("a", mesh.axis_names[-1]), (mesh.axis_names[1], "a"), ("a",)):
                x = distribution.distribute_tensor(X, layout(axes, mesh))
                assert_same(x, X)


@on_ranks(2, 4)
def test_one_torch_mesh_for_equal_keras_meshes_and_no_axes_of_size_one():
    assert grid().backend_mesh is grid().backend_mesh
    assert _to_backend_mesh(line()) is line().backend_mesh
    assert distribution.DeviceMesh((num_processes(),), ("other",)).backend_mesh is not (
        line().backend_mesh
    )
    mesh = distribution.DeviceMesh((1, num_processes()), ("batch", "model"))
    backend = _to_backend_layout(layout(("batch", "model"), mesh))
    assert backend.device_mesh.ndim == 1
    assert backend.placements == (Shard(1),)
    one = distribution.distribute_tensor(X, layout((None, "model"), mesh))
    two = distribution.distribute_tensor(X, layout(("batch", "model"), mesh))
    assert one.device_mesh is two.device_mesh
    assert (one + two).placements == (Shard(1),)


@on_ranks(1)
def test_a_mesh_of_one_computes_with_plain_tensors():
    with model_parallel({".*": ("model",)}).scope():
        layer = keras.layers.Dense(3)
        layer.build((None, 4))
        assert not keras_spmd.is_dtensor(layer.kernel.value)
        assert layer.kernel._layout.axes == ("model",)
        assert not keras_spmd.is_dtensor(layer(np.ones((2, 4))))
        assert not torch._C._get_dtensor_allow_implicit_replication()
    x = distribution.distribute_tensor(X, layout(("model",), line()))
    assert not keras_spmd.is_dtensor(x)


@on_ranks(2, 4)
def test_uneven_dims_and_short_layouts():
    for shape in ((5, 7), (3, 2), (1, 9), (2, 3, 5), (4, 0)):
        value = np.arange(np.prod(shape), dtype="float32").reshape(shape)
        for axes in ((), ("model",), (None, "model"), ("model", "batch"), ("batch",)):
            x = distribution.distribute_tensor(value, layout(axes, grid()))
            assert isinstance(x, DTensor)
            assert_same(x, value)
            assert_same(x.sum(), value.sum())
            with model_parallel({}).scope():
                assert_same(keras.ops.add(x * 2, value), value * 3)
            if value.size:
                assert_same(x.mean(), value.mean())
                assert_same(x.amax(dim=-1), value.max(-1))
                assert_same(x.var(dim=-1, unbiased=False), value.var(-1))
            v = keras.Variable(value, layout=layout(axes, grid()))
            assert_same(v, value)


@on_ranks(1, 2, 4)
def test_errors_of_layouts_name_the_variable_and_the_fix():
    mesh = grid()
    with model_parallel({"bias": (None, "model")}, mesh).scope(), pytest.raises(ValueError) as e:
        keras.Variable(np.ones(3), name="bias")
    assert "(None, 'model') names 2 dims" in str(e.value)
    assert "variable 'bias' has shape (3,)" in str(e.value)
    with pytest.raises(ValueError, match=r"Invalid axis names for Layout.*model.*nope"):
        layout(("nope",), mesh)
    with model_parallel({"v": ("model", "model")}, mesh).scope(), pytest.raises(ValueError) as e:
        keras.Variable(np.ones((4, 4)), name="v")
    assert "variable 'v' uses the mesh axis 'model' for more than one dim" in str(e.value)
    with (
        model_parallel({"v.*": ("model",), ".*v": ()}, mesh).scope(),
        pytest.raises(ValueError, match=r"'v' matches multiple layout specification keys"),
    ):
        keras.Variable(np.ones((4, 4)), name="v")
    with pytest.raises(ValueError, match="the tensor has shape"):
        distribution.distribute_tensor(np.ones(4), layout((None, "model"), mesh))
    with pytest.raises(ValueError, match="device mesh is not set"):
        _ = distribution.TensorLayout(("model",)).backend_layout
    with pytest.raises(ValueError, match="has no device mesh"):
        distribution.distribute_tensor(np.ones(4), distribution.TensorLayout(("model",)))


@on_ranks(1, 2)
def test_batches_are_divided_over_an_axis_of_the_mesh():
    mesh = distribution.DeviceMesh((num_processes(),), ("data",))
    with pytest.raises(ValueError, match=r"batch_dim_name='batch' must be one of .* \('data',\)"):
        distribution.ModelParallel(layout_map=distribution.LayoutMap(mesh), batch_dim_name="batch")
    for named in (None, "data"):
        found = distribution.ModelParallel(
            layout_map=distribution.LayoutMap(mesh), batch_dim_name=named
        )
        assert found.batch_dim_name == "data"


@on_ranks(1, 2, 4)
def test_a_mesh_must_cover_the_job():
    sys.argv = ["train.py", "--epochs", "3"]
    count = num_processes()
    command = "torchrun --nproc-per-node 8 train.py --epochs 3"
    with pytest.raises(ValueError, match="Shape does not match the number of devices") as e:
        distribution.DeviceMesh((2, 4), ("batch", "model"))
    assert command in str(e.value)
    eight = distribution.DeviceMesh((8,), ("batch",), [f"cpu:{i}" for i in range(8)])
    with pytest.raises(ValueError, match=r"needs 8 devices") as e:
        _ = eight.backend_mesh
    assert command in str(e.value)
    os.environ["KERAS_SPMD_RUN_FOLDER"] = "as `keras-spmd run` has it"
    with pytest.raises(ValueError, match=r"keras-spmd run -n 8 train\.py --epochs 3"):
        _ = eight.backend_mesh
    if count > 1:
        part = distribution.DeviceMesh((count - 1,), ("a",), [f"cpu:{i}" for i in range(count - 1)])
        with pytest.raises(ValueError, match="must cover each of them exactly once"):
            _ = part.backend_mesh
        twice = distribution.DeviceMesh((count,), ("a",), ["cpu:0"] * count)
        with pytest.raises(ValueError, match="must cover each of them exactly once"):
            _ = twice.backend_mesh
        mixed = distribution.DeviceMesh((2,), ("a",), ["cpu:0", "gpu:1"])
        with pytest.raises(ValueError, match="mixes devices"):
            _ = mixed.backend_mesh


@on_ranks(1, 2)
def test_unused_keys_and_large_unsharded_variables_are_told_once_when_training_starts():
    dist = model_parallel(
        {
            "dense_typo.*kernel": (None, "model"),
            ".*small.*kernel": (None, "model"),
            ".*small/output": (),
        }
    )
    with dist.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(4, name="small"),
                keras.layers.Dense(64, name="big"),
            ]
        )
        with pytest.warns(keras_spmd.ShardingWarning) as caught:
            keras.optimizers.SGD(momentum=0.5).build(model.trainable_variables)
        messages = [str(w.message) for w in caught]
        assert len(messages) == min(2, num_processes()), messages
        assert "key 'dense_typo.*kernel' of the layout map matched no variable" in messages[0]
        if num_processes() > 1:
            assert "big/kernel' of shape (4, 64)" in messages[1]
        keras.optimizers.SGD().build(model.trainable_variables)
    _notices.forget_notices()
    os.environ["KERAS_SPMD_LARGE_SHARE"] = "0.9"
    with dist.scope(), pytest.warns(keras_spmd.ShardingWarning) as caught:
        keras.optimizers.SGD().build(model.trainable_variables)
    assert len(caught) == 1


@on_ranks(2, 4)
def test_layout_maps_follow_changes():
    mesh = grid()
    layouts = distribution.LayoutMap(mesh)
    layouts["a.*"] = ("model",)
    assert layouts["abc"].axes == ("model",)
    assert layouts["x"] is None
    layouts["x"] = ()
    assert layouts["x"].axes == ()
    del layouts["a.*"]
    assert layouts["abc"] is None
    assert layouts.get("x").axes == ()


@on_ranks(1, 2, 4)
def test_distribute_tensor_of_every_kind_has_gradients():
    mesh = grid() if num_processes() != 2 else line()
    array = X[:8]
    weights = torch.linspace(0.1, 2, 64).reshape(8, 8)
    sources = {"plain": lambda t: t, "rows": None, "columns": None, "partial": None}
    for axes in ((), ("model",), (None, "model")):
        target = layout(axes, mesh)
        for kind in sources:
            for is_leaf in (True, False):
                x = torch.tensor(array)
                if kind == "rows":
                    x = distribute_tensor(x, layout(("model",), mesh))
                elif kind == "columns":
                    x = distribute_tensor(x, layout((None, "model"), mesh))
                elif kind == "partial" and num_processes() == 2:
                    x = partial(x)
                x = x.detach().requires_grad_()
                y = distribution.distribute_tensor(x if is_leaf else x * 3, target)
                factor = 1 if is_leaf else 3
                assert_same(y, array * factor)
                if num_processes() > 1:
                    assert y.placements == _to_backend_layout(target).placements
                with model_parallel({}, mesh).scope():
                    (y * weights).sum().backward()
                assert_same(x.grad, weights * factor)


@on_ranks(2)
def test_distribute_tensor_takes_backend_layouts_structures_and_symbols():
    target = layout(("model",), line())
    backend = target.backend_layout
    assert distribution.distribute_tensor(X, backend).placements == (Shard(0),)
    out = distribution.distribute_tensor({"a": X, "b": (X, None)}, target)
    assert out["a"].placements == out["b"][0].placements == (Shard(0),)
    assert out["b"][1] is None
    symbol = keras.KerasTensor((4, 2))
    assert distribution.distribute_tensor(symbol, target) is symbol
    v = keras.Variable(X)
    assert distribute_variable(v, target).placements == (Shard(0),)
    assert not distribute_variable(v, target).requires_grad
    x = distribution.distribute_tensor(X, target)
    assert distribution.distribute_tensor(x, target) is x


@on_ranks(1, 2, 4)
def test_distribute_tensor_inside_of_a_layer():
    def build():
        class Relay(keras.layers.Layer):
            def call(self, x):
                dist = distribution.distribution()
                if dist is not None:
                    x = distribution.distribute_tensor(
                        x, distribution.TensorLayout((None, "model"), dist.device_mesh)
                    )
                    seen.append(placements(x))
                return x * 2

        keras.utils.set_random_seed(2)
        return keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8), Relay(), keras.layers.Dense(2)]
        )

    seen = []
    expected = whole(build()(X))
    with model_parallel({".*kernel": ("model",)}).scope():
        model = build()
        assert_same(model(X), expected)
        if num_processes() > 1:
            assert seen[-1][1][-1] == Shard(1)


@on_ranks(1, 2, 4)
def test_layer_outputs_are_relaid_by_output_keys():
    class Many(keras.layers.Layer):
        def call(self, x):
            return {"a": x + 1, "b": (x * 2, x - 1)}

    inputs = keras.Input((8,))
    layouts = {
        ".*first/output": ("batch", "model"),
        ".*many/output": (None, "model"),
        ".*last/output": (),
    }
    expected = X * 3
    with model_parallel(layouts).scope():
        first = keras.layers.Activation("linear", name="first")
        many, last = Many(name="many"), keras.layers.Add(name="last")
        parts = many(first(inputs))
        model = keras.Model(inputs, last([parts["a"], *parts["b"]]))
        eager = many(X)
        if num_processes() > 1:
            for x in (eager["a"], *eager["b"]):
                assert placements(x)[1][-1] == Shard(1)
            assert all(p == Replicate() for p in placements(model(X))[1])
        first_out = first(X)
        if num_processes() == 4:
            assert placements(first_out)[1] == (Shard(0), Shard(1))
        assert_same(eager["b"][0], X * 2)
        assert_same(model(X), (X + 1) + X * 2 + (X - 1))
    assert expected.shape == X.shape


@on_ranks(1, 2, 4)
def test_distribute_data_input_makes_the_global_batch():
    count = num_processes()
    dist = distribution.DataParallel()
    data_layout = dist.get_data_layout(X.shape)
    even = X[: 8 // count * count]
    mine = np.split(even, count)[process_id()]
    batch = distribute_data_input(mine, data_layout, "batch")
    assert_same(batch, even)
    pieces = np.array_split(X, [1 + 3 * i for i in range(count - 1)])
    assert_same(distribute_data_input(pieces[process_id()], data_layout, "batch"), X)
    nested = distribute_data_input({"x": mine, "y": None}, data_layout, "batch")
    assert nested["y"] is None
    if count > 1:
        assert batch.placements == (Shard(0),)
        assert batch.to_local().shape[0] == len(mine)
        assert distribute_data_input(batch, data_layout, "batch") is batch


@on_ranks(2)
def test_local_slices_fit_the_local_shapes():
    mesh = line().backend_mesh
    for placement in (Shard(0), Shard(1), Replicate()):
        shape, _ = _layouts.local_shape_and_offset((5, 7), mesh, [placement])
        part = _layouts.local_slice(torch.zeros(5, 7), mesh, [placement])
        assert tuple(part.shape) == shape
    assert Partial() != Replicate()
