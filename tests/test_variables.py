"""Variables: born sharded with plain Keras's values; read and assigned as if they were whole."""

import resource

import keras
import numpy as np
import pytest
import torch
from keras import distribution, initializers
from torch.distributed.tensor import DTensor, Replicate, Shard

import keras_spmd
from bench import on_ranks, sample
from keras_spmd import _initial_values
from keras_spmd.distribution_lib import num_processes, process_id
from meshes import assert_same, grid, line, model_parallel, partial, placements, whole

INITIALIZERS = {
    "zeros": lambda: initializers.Zeros(),
    "ones": lambda: initializers.Ones(),
    "constant": lambda: initializers.Constant(0.25),
    "constant array": lambda: initializers.Constant(np.arange(10, dtype="float32")),
    "random normal": lambda: initializers.RandomNormal(0.5, 2.0, seed=3),
    "random uniform": lambda: initializers.RandomUniform(-1.0, 3.0, seed=3),
    "truncated normal": lambda: initializers.TruncatedNormal(0.5, 2.0, seed=3),
    "glorot uniform": lambda: initializers.GlorotUniform(seed=3),
    "glorot normal": lambda: initializers.GlorotNormal(seed=3),
    "he normal": lambda: initializers.HeNormal(seed=3),
    "he uniform": lambda: initializers.HeUniform(seed=3),
    "lecun normal": lambda: initializers.LecunNormal(seed=3),
    "lecun uniform": lambda: initializers.LecunUniform(seed=3),
    "untruncated": lambda: initializers.VarianceScaling(
        distribution="untruncated_normal", mode="fan_avg", seed=3
    ),
    "orthogonal": lambda: initializers.Orthogonal(seed=3),
    "identity": lambda: initializers.Identity(),
    "seed generator": lambda: initializers.RandomNormal(seed=keras.random.SeedGenerator(5)),
    "function": lambda: lambda shape, dtype=None: keras.ops.reshape(keras.ops.arange(120), shape),
}
LAYOUTS = [(), ("model",), (None, "model"), ("model", "batch"), ("batch", "model")]


def make(name, dtype="float32", shape=(12, 10)):
    initializer = INITIALIZERS[name]()
    first = keras.Variable(initializer, shape=shape, dtype=dtype, name="v")
    # An initializer with a seed generator goes on where it stopped.
    second = keras.Variable(initializer, shape=shape, dtype=dtype, name="v")
    return first, second


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("name", sorted(INITIALIZERS))
def test_initial_values_are_those_of_plain_keras(name):
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        if dtype in ("bfloat16", "float16") and name in ("orthogonal", "function"):
            continue
        expected = [whole(v) for v in make(name, dtype)]
        for layout in LAYOUTS:
            with model_parallel({"v": layout}).scope():
                for v, want in zip(make(name, dtype), expected, strict=True):
                    assert isinstance(v.value, DTensor) == (num_processes() > 1)
                    np.testing.assert_array_equal(whole(v), want)


@on_ranks(2, 4)
def test_draws_in_many_chunks_give_one_stream():
    _initial_values.CHUNK, saved = 64, _initial_values.CHUNK
    try:
        for shape in ((37, 11), (7, 5, 13), (1000,), (3, 333), (16,), (5,)):
            for name in ("random normal", "random uniform", "truncated normal"):
                expected = whole(keras.Variable(INITIALIZERS[name](), shape=shape, name="v"))
                for layout in [("model",), ("batch", "model")][: len(shape)]:
                    with model_parallel({"v": layout}).scope():
                        v = keras.Variable(INITIALIZERS[name](), shape=shape, name="v")
                        np.testing.assert_array_equal(whole(v), expected)
    finally:
        _initial_values.CHUNK = saved


@on_ranks(4, timeout=240)
@pytest.mark.parametrize(
    "name", sample(["glorot uniform", "truncated normal", "zeros"], "glorot uniform", "zeros")
)
def test_a_large_variable_never_exists_whole_on_a_rank(name):
    """1 GiB over 4 ranks peaks under 0.5 GiB a rank: its quarter, and a chunk."""
    distribution.set_distribution(model_parallel({"v": (None, "model")}, line()))
    keras.Variable(INITIALIZERS[name](), shape=(64, 64), name="v")  # warm up
    before = _reset_peak()
    v = keras.Variable(INITIALIZERS[name](), shape=(16384, 16384), name="v")
    assert keras_spmd.get_dtensor_local(v.value).nbytes == (1 << 30) // 4
    assert _peak() - before < (1 << 30) // 2


def _reset_peak():
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return _peak()


def _peak():
    with open("/proc/self/status") as f:
        for row in f:
            if row.startswith("VmHWM"):
                return int(row.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@on_ranks(2, 4)
def test_a_rank_holds_its_shards_only():
    distribution.set_distribution(model_parallel({".*kernel": (None, "model")}, line()))
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, use_bias=False)])
    local = keras_spmd.get_dtensor_local(model.weights[0].value)
    assert local.numel() * num_processes() == 64 * 256
    assert local.untyped_storage().nbytes() == local.nbytes


@on_ranks(1, 2, 4)
def test_reading_is_global():
    array = np.arange(30, dtype="float32").reshape(5, 6)
    for layout in ((), ("model",), (None, "model"), ("model", "batch")):
        with model_parallel({"v": layout}).scope():
            v = keras.Variable(array, name="v")
        assert v.shape == (5, 6)
        assert tuple(v.value.shape) == (5, 6)
        np.testing.assert_array_equal(v.numpy(), array)
        np.testing.assert_array_equal(np.array(v), array)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(v), array)
        assert repr(v) == repr(keras.Variable(array, name="v"))
        assert v.dtype == "float32"
    with model_parallel({}).scope():
        scalar = keras.Variable(3.5, trainable=False)
        assert float(scalar) == 3.5
        assert int(keras.Variable(7, trainable=False)) == 7


@on_ranks(1, 2, 4)
def test_assigning_keeps_the_layout_inside_and_outside_of_the_scope():
    start = np.ones((4, 6), "float32")
    array = np.arange(24, dtype="float32").reshape(4, 6)
    dist = model_parallel({"v": ("model", "batch"), "w": (None, "model")})
    with dist.scope():
        v = keras.Variable(start, name="v")
        w = keras.Variable(array, name="w")
        pending = partial(torch.tensor(array)) if num_processes() == 2 else torch.tensor(array)
    before = placements(v)
    values = [
        array,
        torch.tensor(array),
        array.tolist(),
        w,
        w.value,
        pending,
        array.astype("int64"),
    ]

    def change():
        for value in values:
            v.assign(value)
            assert_same(v, array)
            assert placements(v) == before
            v.assign_add(value)
            assert_same(v, 2 * array)
            v.assign_sub(value)
            assert_same(v, array)
            assert placements(v) == before
            v.assign(start)
        v.assign_add(1.0)
        assert_same(v, start + 1)
        v.assign(start)
        with pytest.raises(ValueError, match="must match"):
            v.assign(array.T)

    with dist.scope():
        change()
    change()


@on_ranks(1, 2, 4)
def test_get_and_set_weights_of_a_model():
    def build():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])

    source = build()
    x = np.linspace(-1, 1, 24).reshape(4, 6)
    expected = whole(source(x))
    with model_parallel({".*kernel": (None, "model"), ".*bias": ("model",)}).scope():
        model = build()
        assert not np.allclose(whole(model(x)), expected)
        model.set_weights(source.get_weights())
        assert_same(model(x), expected)
    for a, b in zip(model.get_weights(), source.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    model.set_weights([w + 1 for w in source.get_weights()])
    assert_same(model.weights[0], source.weights[0].numpy() + 1)


@on_ranks(2, 4)
def test_trainable_toggles_and_dtypes():
    distribution.set_distribution(model_parallel({"v": ("model",)}))
    v = keras.Variable(np.ones(4, "float32"), name="v")
    assert v.value.requires_grad
    assert v.value.is_leaf
    assert isinstance(v.value, torch.nn.Parameter)
    v.trainable = False
    assert not v.value.requires_grad
    v.trainable = True
    (v.value * 3).sum().backward()
    assert_same(v.value.grad, np.full(4, 3.0))
    for dtype in ("int32", "int64", "int8", "uint8", "bool", "bfloat16", "float16", "float64"):
        v = keras.Variable(np.array([0, 1, 1, 0, 1]), dtype=dtype, trainable=False, name="v")
        assert v.dtype == dtype
        assert isinstance(v.value, DTensor)
        np.testing.assert_array_equal(v.numpy().astype("int64"), [0, 1, 1, 0, 1])
        v.assign(np.array([1, 1, 0, 0, 1]))
        np.testing.assert_array_equal(v.numpy().astype("int64"), [1, 1, 0, 0, 1])
        zero = keras.Variable("zeros", shape=(5,), dtype=dtype, trainable=False, name="v")
        np.testing.assert_array_equal(zero.numpy().astype("int64"), np.zeros(5))


@on_ranks(2, 4)
def test_a_variable_given_a_layout():
    mesh = grid()
    layout = distribution.TensorLayout((None, "model"), mesh)
    array = np.arange(8, dtype="float32").reshape(2, 4)
    outside = keras.Variable(array, layout=layout)
    drawn = keras.Variable("glorot_uniform", shape=(2, 4), layout=layout.backend_layout)
    with distribution.DataParallel(device_mesh=line()).scope():
        inside = keras.Variable(array, layout=layout)
    for v in (outside, inside, drawn):
        assert placements(v)[1][-1] == Shard(1)
    assert_same(outside, array)
    assert_same(inside, array)


@on_ranks(2)
def test_initializers_that_take_a_layout_get_it():
    got = []

    class Own(keras.initializers.Initializer):
        def __call__(self, shape, dtype=None, layout=None):
            got.append(layout)
            value = torch.arange(float(np.prod(shape))).reshape(shape)
            return distribution.distribute_tensor(value, layout)

    distribution.set_distribution(model_parallel({"v": ("model",)}))
    v = keras.Variable(Own(), shape=(4, 2), name="v")
    assert got[0].axes == ("model",)
    assert placements(v)[1] == (Shard(0),)
    assert_same(v, np.arange(8.0).reshape(4, 2))


@on_ranks(2)
def test_variables_made_before_the_distribution_work_and_are_reported():
    layer = keras.layers.Dense(4, name="early")
    layer.build((None, 3))
    x = np.ones((2, 3), "float32")
    expected = whole(layer(x))
    distribution.set_distribution(model_parallel({".*late.*kernel": (None, "model")}))
    late = keras.layers.Dense(3, name="late")
    late.build((None, 3))
    message = r"early/kernel.* of shape \(3, 4\) was made before the distribution was set"
    with pytest.warns(keras_spmd.ShardingWarning, match=message):
        assert_same(layer(late(x)), expected, atol=10)
    assert_same(layer(x), expected)
    mixed = layer.kernel.value.detach().T @ late.kernel.value.detach()
    assert_same(mixed, whole(layer.kernel).T @ whole(late.kernel))


@on_ranks(2, 4)
def test_optimizer_slots_take_their_variables_layout():
    distribution.set_distribution(model_parallel({".*kernel": ("batch", "model")}))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6)])
    kernel, bias = model.weights
    optimizer = keras.optimizers.Adam(amsgrad=True, use_ema=True, gradient_accumulation_steps=2)
    optimizer.build(model.trainable_variables)
    slots = [v for v in optimizer.variables if "kernel" in v.path]
    assert len(slots) == 5
    for slot in slots:
        assert placements(slot) == placements(kernel)
    others = [v for v in optimizer.variables if "kernel" not in v.path]
    for v in [bias, *others]:
        assert all(p == Replicate() for p in placements(v)[1])


SLOT_KEYS = {
    "catch-all": ({".*": ()}, Shard(1), Shard(1)),
    "overlapping": ({".*dense.*": (), ".*kernel.*": ()}, Shard(1), Shard(1)),
    "for slots": ({"adam/.*kernel.*": ("model", None)}, Shard(0), Shard(0)),
    "for one slot": ({".*_momentum": ()}, Replicate(), Shard(1)),
}


@on_ranks(2)
@pytest.mark.parametrize("name", sorted(SLOT_KEYS))
def test_slots_have_their_own_keys_or_their_variables_layout(name):
    keys, *expected = SLOT_KEYS[name]
    distribution.set_distribution(model_parallel({"dense/kernel": (None, "model"), **keys}, line()))
    dense = keras.layers.Dense(6, name="dense", use_bias=False)
    dense.build((None, 4))
    optimizer = keras.optimizers.Adam(name="adam")
    optimizer.build(dense.trainable_variables)
    slots = [v for v in optimizer.variables if "kernel" in v.path]
    assert [placements(v)[1] for v in slots] == [(p,) for p in expected]


@on_ranks(2, 4)
def test_metrics_and_seeds_are_replicated_whatever_the_patterns_say():
    distribution.set_distribution(model_parallel({".*": ("model",)}))
    metric = keras.metrics.MeanIoU(num_classes=4)
    dropout = keras.layers.Dropout(0.5, seed=3)
    for v in [*metric.variables, dropout.seed_generator.state]:
        assert all(p == Replicate() for p in placements(v)[1])
    assert_same(dropout.seed_generator.state, [3, 0])


@on_ranks(2)
def test_wrapped_torch_modules_are_sharded_in_place():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6))
    module.tied = module[2]
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    expected = module(x).detach()
    weight = module[0].weight.detach().clone()
    distribution.set_distribution(model_parallel({".*": ("model",)}))
    layer = keras.layers.TorchModuleWrapper(module)
    assert all(isinstance(p, DTensor) for p in module.parameters())
    assert module[0].weight is layer.weights[0].value
    assert module.tied.weight is module[2].weight
    assert module[0].weight.placements == (Shard(0),)
    assert_same(module[0].weight, weight)
    assert_same(layer(x), expected)


@on_ranks(1, 2)
def test_one_seed_for_all():
    """Without a seed process 0's is everybody's; with one, any mesh has the same values."""
    from keras_spmd import _processes, _random_state

    if num_processes() > 1:
        keras.src.backend.common.global_state.set_global_attribute("global_random_seed", None)
        import random

        random.seed(process_id())
        np.random.seed(process_id())
        torch.manual_seed(process_id())
        _random_state._agreed.forget()
        _processes.ensure_joined()
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        everybody = [None] * num_processes()
        torch.distributed.all_gather_object(everybody, drawn)
        assert all(d == everybody[0] for d in everybody)
        keras.src.backend.common.global_state.set_global_attribute(
            "global_random_seed", 5 + process_id()
        )
        first = process_id() == 0
        _random_state._agreed.forget()
        if first:
            _processes.ensure_joined()
        else:
            with pytest.raises(ValueError, match=r"set_random_seed\(6\).*process 1.*seed 5"):
                _processes.ensure_joined()
    keras.utils.set_random_seed(11)
    expected = keras.layers.Dense(4)
    expected.build((None, 4))
    keras.utils.set_random_seed(11)
    with model_parallel({".*kernel": ("model",)}).scope():
        layer = keras.layers.Dense(4)
        layer.build((None, 4))
        np.testing.assert_array_equal(whole(layer.kernel), whole(expected.kernel))


@on_ranks(2)
def test_autograd_notices_an_assignment():
    layout = distribution.TensorLayout((None, "model"), line())
    v = keras.Variable(np.ones((4, 6), "float32"), layout=layout)
    y = (v.value * v.value).sum()
    v.assign(np.full((4, 6), 10.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@on_ranks(2)
def test_check_looks_at_values_of_variables():
    import os

    os.environ["KERAS_SPMD_CHECK"] = "1"
    distribution.set_distribution(model_parallel({"v": ("model",)}))
    keras.Variable(np.ones(4), name="v")
    with pytest.raises(RuntimeError, match=r"making the variable 'v'.*not the same on all ranks"):
        keras.Variable(np.full(4, float(process_id())), name="v")
