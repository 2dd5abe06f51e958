"""Mixed precision, loss scaling and float64: what one device does."""

import warnings

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers, optimizers
from torch.distributed.tensor import DTensor, Partial, Shard

import keras_spmd
from bench import on_ranks
from keras_spmd.distribution_lib import process_id
from meshes import grid, line, model_parallel

X = np.random.default_rng(0).normal(size=(22, 6))
Y = np.random.default_rng(1).integers(0, 4, 22)


def distributions():
    yield "data parallel", distribution.DataParallel()
    columns = {".*(up|logits)/kernel": (None, "model"), ".*up/bias": ("model",)}
    yield "columns", model_parallel(columns, grid())
    yield "both axes", model_parallel({".*(up|logits)/kernel": ("model", "batch")}, grid())


def fit(make_optimizer, x=X, dtype="float32"):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(7, activation="tanh", name="up"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(4, name="logits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(), loss, metrics=["accuracy"])
    history = model.fit(x.astype(dtype), Y, batch_size=6, epochs=2, verbose=0)
    return model, history.history, [v.numpy() for v in model.variables]


class Linear(layers.Layer):
    """In torch, because Keras's matmul and batch norm work in float32 for float64 tensors."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")

    def call(self, x):
        x = torch.nn.functional.batch_norm(x, None, None, training=True)
        return torch.nn.functional.linear(x, self.kernel.value.T, self.bias.value).tanh()

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.units)


class Exact(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return torch.nn.functional.cross_entropy(y_pred, y)


@on_ranks(2, exhaustive=(1, 4))
def test_float64_from_end_to_end():
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")

    def run(make):
        keras.utils.set_random_seed(3)
        model = Exact([keras.Input((6,)), Linear(7, name="up"), Linear(4, name="logits")])
        model.compile(make())
        model.fit(X, Y, batch_size=6, epochs=2, verbose=0)
        assert all(v.dtype == "float64" for v in model.variables)
        return [v.numpy() for v in model.variables]

    for make in (lambda: optimizers.Adam(0.01, clipnorm=0.5), lambda: optimizers.RMSprop(0.01)):
        expected = run(make)
        for label, dist in distributions():
            with dist.scope():
                got = run(make)
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, b, 1e-12, 1e-14, err_msg=label)


@on_ranks(2, exhaustive=(1, 4))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision(dtype):
    """Sums in 16 bits round differently on shards: within a few of the dtype's steps, after which
    the same float32 weights are updated."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    keras.config.set_dtype_policy(f"mixed_{dtype}")
    step = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    model, history, weights = fit(lambda: optimizers.SGD(0.05))
    assert isinstance(model.optimizer, optimizers.LossScaleOptimizer) == (dtype == "float16")
    for label, dist in distributions():
        with dist.scope():
            got, got_history, got_weights = fit(lambda: optimizers.SGD(0.05))
        np.testing.assert_allclose(got_history["loss"], history["loss"], 4 * step, err_msg=label)
        for a, b in zip(got_weights, weights, strict=True):
            np.testing.assert_allclose(a, b, 4 * step, 4 * step, err_msg=label)
        if dtype == "float16":
            assert float(got.optimizer.dynamic_scale) == float(model.optimizer.dynamic_scale)
            assert int(got.optimizer.step_counter) == int(model.optimizer.step_counter)


@on_ranks(2, exhaustive=(1, 4))
def test_one_row_that_overflows_skips_the_step_everywhere():
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    keras.config.set_dtype_policy("mixed_float16")
    x = X.copy()
    x[0] = 6e4

    def run():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="logits")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers.SGD(0.05), loss)
        model.build()
        before = [v.numpy() for v in model.variables]
        model.train_on_batch(x, Y)
        after_overflow = [v.numpy() for v in model.variables]
        scale = float(model.optimizer.dynamic_scale)
        model.train_on_batch(X, Y)
        return before, after_overflow, scale, [v.numpy() for v in model.variables]

    before, skipped, scale, trained = run()
    assert scale < 2**15
    for label, dist in distributions():
        with dist.scope():
            got = run()
        assert got[2] == scale
        for a, b in zip(got[1], got[0], strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(got[3], trained, strict=True):
            np.testing.assert_allclose(a, b, 2**-9, 2**-9, err_msg=label)
    for a, b in zip(skipped, before, strict=True):
        np.testing.assert_array_equal(a, b)


@on_ranks(2, 4)
def test_an_infinite_gradient_of_one_rank_skips_the_step_on_all():
    """In its shard of the gradient, or in its share of a pending sum."""
    mesh = line()
    for placement in (Shard(0), Partial()):
        with model_parallel({"kernel": ("model", None)}, mesh).scope():
            kernel = keras.Variable(np.ones((8, 3), "float32"), name="kernel")
            scaled = optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=4.0)
            shape = kernel.value.to_local().shape if placement == Shard(0) else (8, 3)

            def step(bad, kernel=kernel, scaled=scaled, shape=shape, placement=placement):
                local = torch.ones(shape)
                if bad and process_id() == 1:
                    local[0, 0] = float("inf")
                gradient = DTensor.from_local(local, mesh.backend_mesh, [placement])
                scaled.apply([gradient], [kernel])

            step(bad=True)
            assert float(scaled.dynamic_scale) == 2.0
            np.testing.assert_array_equal(kernel.numpy(), np.ones((8, 3)))
            step(bad=False)
            count = 1 if placement == Shard(0) else mesh.shape[0]
            np.testing.assert_allclose(kernel.numpy(), np.full((8, 3), 1 - 0.1 * count / 2), 1e-6)
