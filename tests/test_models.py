"""Any model, built under any distribution and called eagerly: outputs and gradients are those of
the same model without one."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers

import keras_spmd
from bench import on_ranks
from jit import captured
from keras_spmd.distribution_lib import num_processes
from meshes import assert_same, grid, line, model_parallel, whole


def cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.SeparableConv2D(8, 3, padding="same"),
            layers.GroupNormalization(4),
            layers.Conv2DTranspose(4, 3, strides=2, padding="same"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(5, activation="softmax"),
        ]
    )


def residual():
    x = inputs = keras.Input((8, 8, 4))
    for filters in (4, 8):
        y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        y = layers.BatchNormalization()(y)
        y = layers.ReLU()(y)
        x = layers.Add()([layers.Conv2D(filters, 1)(x), y])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def transformer():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(16, 8)(tokens) + layers.Embedding(6, 8)(np.arange(6))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 4)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(8)(layers.Dense(16, activation="gelu")(y))
    return keras.Model(tokens, layers.Dense(16)(x))


def grouped_attention():
    x = inputs = keras.Input((6, 8))
    y = layers.GroupQueryAttention(4, 4, 2)(x, x)
    y = layers.RMSNormalization()(y)
    return keras.Model(inputs, layers.EinsumDense("abc,cd->abd", output_shape=(6, 4))(y))


def recurrent():
    x = inputs = keras.Input((5, 4))
    x = layers.LSTM(8, return_sequences=True)(x)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    x = layers.SimpleRNN(4)(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def sequence():
    x = inputs = keras.Input((8, 4))
    x = layers.Conv1D(8, 3, padding="causal")(x)
    x = layers.PReLU()(x)
    x = layers.Conv1DTranspose(4, 3)(x)
    x = layers.MaxPooling1D()(x)
    x = layers.UnitNormalization()(x)
    return keras.Model(inputs, layers.GlobalMaxPooling1D()(x))


def many_inputs():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    shared = layers.Dense(8, activation="tanh")
    x, y = shared(a), shared(b)
    merged = layers.Concatenate()([x * y, layers.Maximum()([x, y]), layers.Dot(1)([x, y])])
    return keras.Model({"a": a, "b": b}, {"one": layers.Dense(3)(merged), "two": x - y})


def subclassed():
    class Block(keras.layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.units = units

        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1], self.units), name="kernel")
            self.scale = self.add_weight(shape=(self.units,), initializer="ones", name="scale")

        def call(self, x):
            y = keras.ops.matmul(x, self.w) * self.scale
            return keras.ops.concatenate([keras.ops.relu(y), -y], axis=-1)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two = Block(6), layers.Dense(4)

        def call(self, x):
            y = self.one(x)
            return self.two(y) + keras.ops.sum(y, axis=-1, keepdims=True)

    return Model()


def image():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Rescaling(1 / 255.0, offset=-0.5),
            layers.ZeroPadding2D(1),
            layers.Cropping2D(1),
            layers.UpSampling2D(2, interpolation="bilinear"),
            layers.Conv2D(4, 3, strides=2),
            layers.SpectralNormalization(layers.Dense(4)),
            layers.Permute((3, 1, 2)),
            layers.Reshape((4, -1)),
            layers.Dense(6),
        ]
    )


MODELS = {
    "cnn": (cnn, (4, 8, 8, 3)),
    "residual": (residual, (4, 8, 8, 4)),
    "transformer": (transformer, (4, 6)),
    "grouped attention": (grouped_attention, (4, 6, 8)),
    "recurrent": (recurrent, (4, 5, 4)),
    "sequence": (sequence, (4, 8, 4)),
    "many inputs": (many_inputs, (4, 4)),
    "subclassed": (subclassed, (4, 5)),
    "image": (image, (4, 8, 8, 3)),
}


def data(name):
    shape = MODELS[name][1]
    generator = np.random.default_rng(0)
    if name == "transformer":
        return generator.integers(0, 16, shape)
    x = generator.normal(size=shape).astype("float32")
    return {"a": x, "b": x[::-1].copy()} if name == "many inputs" else x


def run(name, x, training):
    """Outputs, gradients of all trainable variables, and non-trainable state after the call."""
    keras.utils.set_random_seed(5)
    model = MODELS[name][0]()
    outputs = keras.tree.flatten(model(x, training=training))
    loss = sum(keras.ops.sum(keras.ops.square(y)) for y in outputs)
    loss.backward()
    gradients = [v.value.grad for v in model.trainable_variables]
    state = [v.value.detach() for v in model.non_trainable_variables]
    return [whole(x) for x in [*outputs, *gradients, *state]]


class EveryVariable(distribution.ModelParallel):
    """Shards every variable, on the dim that is given by its number of dims."""

    def __init__(self, mesh, dim, axis):
        super().__init__(layout_map=distribution.LayoutMap(mesh))
        self.dim, self.axis = dim, axis

    def get_variable_layout(self, variable):
        axes = [None] * len(variable.shape)
        if axes:
            axes[self.dim % len(axes)] = self.axis
        return distribution.TensorLayout(axes, self.device_mesh)


def distributions():
    yield "data parallel", distribution.DataParallel()
    yield "last dim", EveryVariable(line(), -1, "model")
    yield "first dim", EveryVariable(grid(), 0, "model")
    yield "both axes", model_parallel({".*kernel": ("model", "batch")})


@on_ranks(2, exhaustive=(1, 4), timeout=300)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models(name):
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    x = data(name)
    for training in (False, True):
        expected = run(name, x, training)
        for label, dist in distributions():
            with dist.scope():
                batch = x
                if training and num_processes() > 1:
                    batch = keras.tree.map_structure(
                        lambda t, d=dist: distribution.distribute_tensor(
                            t, d.get_data_layout(t.shape)
                        ),
                        x,
                    )
                got = run(name, batch, training)
            for a, b in zip(got, expected, strict=True):
                scale = max(1.0, float(np.abs(b).max()))
                np.testing.assert_allclose(a, b, 1e-4, 1e-5 * scale, err_msg=f"{name} {label}")


@on_ranks(4, timeout=300)
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_a_sample_of_models_on_four_ranks(name):
    test_models.body(name)


@on_ranks(2, 4, timeout=180)
@pytest.mark.parametrize("wrapper", [contextlib.nullcontext, captured], ids=["eager", "captured"])
def test_a_batch_that_does_not_divide_evenly_is_not_gathered(wrapper):
    """Attention and Dense layers merge its rows, of which no rank has as many as another."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 16, (7, 6)), rng.integers(0, 16, (7, 6))

    def run():
        keras.utils.set_random_seed(0)
        tokens = keras.Input((6,), dtype="int32")
        z = layers.Embedding(16, 8)(tokens)
        z = z + layers.MultiHeadAttention(4, 4)(z, z, use_causal_mask=True)
        z = z + layers.Dense(8)(layers.Dense(16, activation="gelu")(z))
        model = keras.Model(tokens, layers.Dense(16)(layers.LayerNormalization()(z)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        history = model.fit(x, y, batch_size=7, epochs=2, verbose=0).history["loss"]
        return [history, model.predict(x, verbose=0), *map(whole, model.weights)]

    expected = run()
    with distribution.DataParallel().scope(), wrapper():
        warnings.simplefilter("error", keras_spmd.ShardingWarning)
        got = run()
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-5)


@on_ranks(2, 4)
def test_a_model_works_outside_of_the_scope_that_made_it():
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    x = data("transformer")
    keras.utils.set_random_seed(5)
    expected = whole(transformer()(x))
    keras.utils.set_random_seed(5)
    with model_parallel({".*kernel": ("model", "batch")}).scope():
        model = transformer()
    assert_same(model(x), expected, 1e-4, 1e-5)


@on_ranks(1, 2)
def test_symbolic_calls_and_summaries_do_not_communicate():
    with EveryVariable(line(), -1, "model").scope():
        model = cnn()
        assert model.compute_output_shape((None, 8, 8, 3)) == (None, 5)
        assert keras.ops.shape(model(keras.Input((8, 8, 3)))) == (None, 5)
        lines = []
        model.summary(print_fn=lines.append)
        assert any(f"{model.count_params():,}" in line for line in lines)


@on_ranks(1, 2)
def test_inference_mode():
    x = data("residual")
    keras.utils.set_random_seed(5)
    expected = whole(residual()(x))
    keras.utils.set_random_seed(5)
    with EveryVariable(line(), -1, "model").scope():
        model = residual()
        with torch.inference_mode():
            outputs = model(x)
        assert not outputs.requires_grad
        assert_same(outputs, expected, 1e-4, 1e-5)
