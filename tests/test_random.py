"""Random numbers: the same on every mesh, each rank drawing its part only, new at each draw."""

import warnings

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers, random

import keras_spmd
from bench import on_ranks, same_on_ranks
from keras_spmd import _counter
from keras_spmd.distribution_lib import num_processes
from meshes import grid, model_parallel, whole

BATCH = 12
IMAGES = np.random.default_rng(0).uniform(0, 255, (BATCH, 8, 8, 3)).astype("float32")
ROWS = np.random.default_rng(1).normal(size=(BATCH, 6)).astype("float32")
SERIES = np.random.default_rng(2).normal(size=(BATCH, 5, 8)).astype("float32")


def both_distributions():
    """Batches sharded over all ranks, and over one axis of a grid beside a sharded model."""
    data = distribution.DeviceMesh((num_processes(),), ("batch",))
    yield distribution.DataParallel(data)
    yield model_parallel({".*kernel": (None, "model")}, grid())


class Draw(keras.Layer):
    """Draws inside of a layer, next to an input that is laid out."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.seed = random.SeedGenerator(5)

    def call(self, x):
        return self.draw(x, self.seed)


FUNCTIONS = {
    "normal": lambda x, seed: random.normal(x.shape, 1.0, 2.0, seed=seed),
    "truncated_normal": lambda x, seed: random.truncated_normal(x.shape, seed=seed),
    "uniform": lambda x, seed: random.uniform(x.shape, -1.0, 3.0, seed=seed),
    "randint": lambda x, seed: random.randint(x.shape, -3, 30, seed=seed),
    "dropout": lambda x, seed: random.dropout(x, 0.4, seed=seed),
    "dropout with a noise shape": lambda x, seed: random.dropout(x, 0.4, (None, 1), seed=seed),
    "categorical": lambda x, seed: random.categorical(x, 7, seed=seed),
    "shuffle rows": lambda x, seed: random.shuffle(x, seed=seed),
    "shuffle columns": lambda x, seed: random.shuffle(x, axis=1, seed=seed),
    "gamma": lambda x, seed: random.gamma(x.shape, keras.ops.abs(x) + 0.1, seed=seed),
    "beta": lambda x, seed: random.beta(x.shape, 0.3, keras.ops.abs(x) + 0.1, seed=seed),
    "binomial": lambda x, seed: random.binomial(x.shape, 30.0, keras.ops.sigmoid(x), seed=seed),
    "rows only": lambda x, seed: random.uniform((x.shape[0], 1), seed=seed),
    "another shape": lambda x, seed: random.normal((3, 5), seed=seed),
    "a number": lambda x, seed: random.uniform((), seed=seed),
    "bfloat16": lambda x, seed: random.uniform(x.shape, dtype="bfloat16", seed=seed),
    "float64": lambda x, seed: random.normal(x.shape, dtype="float64", seed=seed),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@same_on_ranks(2, 4)
def test_keras_random(name):
    """Every function of keras.random, on inputs sharded on each dim, evenly or not."""
    results = []
    for dist in both_distributions():
        with dist.scope():
            layer = Draw(FUNCTIONS[name])
            x = keras_spmd.distribute_batch(ROWS)
            axis = "batch" if len(dist.device_mesh.shape) == 1 else "model"
            columns = distribution.TensorLayout([None, axis], dist.device_mesh)
            for value in (x, x[:11], distribution.distribute_tensor(torch.tensor(ROWS), columns)):
                results.append(whole(keras.ops.cast(layer(value), "float64")))
    assert not np.array_equal(results[0], results[2])
    return results


@on_ranks(2, 4)
def test_each_rank_draws_its_part_only():
    drawn = []

    class Counting(_counter.Draws):
        def __init__(self, *args):
            super().__init__(*args)
            drawn.append(int(np.prod(self.local_shape)))

    from keras_spmd import _random

    _random.Draws = Counting
    try:
        for dist in both_distributions():
            with dist.scope():
                x = keras_spmd.distribute_batch(ROWS)
                shards = x.to_local().shape[0]
                for name in ("normal", "uniform", "randint", "dropout", "gamma", "beta"):
                    Draw(FUNCTIONS[name])(x)
                    assert drawn.pop() == shards * ROWS.shape[1]
                layers.Dropout(0.5)(x, training=True)
                assert drawn.pop() == shards * ROWS.shape[1]
    finally:
        _random.Draws = _counter.Draws


LAYERS = {
    "Dropout": (lambda: layers.Dropout(0.3), ROWS),
    "Dropout, seeded": (lambda: layers.Dropout(0.3, seed=4), SERIES),
    "Dropout, noise shape": (lambda: layers.Dropout(0.3, noise_shape=(None, 1, None)), SERIES),
    "SpatialDropout1D": (lambda: layers.SpatialDropout1D(0.3), SERIES),
    "SpatialDropout2D": (lambda: layers.SpatialDropout2D(0.3), IMAGES),
    "SpatialDropout3D": (lambda: layers.SpatialDropout3D(0.3), IMAGES[:, None]),
    "AlphaDropout": (lambda: layers.AlphaDropout(0.3), ROWS),
    "GaussianDropout": (lambda: layers.GaussianDropout(0.3), ROWS),
    "GaussianNoise": (lambda: layers.GaussianNoise(0.3), SERIES),
    "SimpleRNN": (lambda: layers.SimpleRNN(4, dropout=0.3, recurrent_dropout=0.2), SERIES),
    "LSTM": (lambda: layers.LSTM(4, dropout=0.3, recurrent_dropout=0.2), SERIES),
    "GRU": (lambda: layers.GRU(4, dropout=0.3, recurrent_dropout=0.2), SERIES),
    "Bidirectional": (lambda: layers.Bidirectional(layers.GRU(4, dropout=0.3)), SERIES),
    "ConvLSTM1D": (lambda: layers.ConvLSTM1D(4, 3, dropout=0.3), IMAGES / 255),
    "Attention": (lambda: SelfAttention(layers.Attention(dropout=0.3)), SERIES),
    "AdditiveAttention": (lambda: SelfAttention(layers.AdditiveAttention(dropout=0.3)), SERIES),
    "MultiHeadAttention": (
        lambda: SelfAttention(layers.MultiHeadAttention(2, 4, dropout=0.3)),
        SERIES,
    ),
    "GroupedQueryAttention": (
        lambda: SelfAttention(layers.GroupQueryAttention(4, 4, 2, dropout=0.3)),
        SERIES,
    ),
}


class SelfAttention(keras.Layer):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def call(self, x, training=None):
        if isinstance(self.attention, (layers.Attention, layers.AdditiveAttention)):
            return self.attention([x, x], training=training)
        return self.attention(x, x, training=training)


@pytest.mark.parametrize("name", LAYERS)
@same_on_ranks(2, exhaustive=(4,))
def test_random_layers(name):
    """The same draws on every mesh, new at each call, different in another layer."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    make, data = LAYERS[name]
    results = []
    for dist in both_distributions():
        with dist.scope():
            keras.utils.set_random_seed(8)
            first, second = make(), make()
            x = keras_spmd.distribute_batch(data)
            outputs = [whole(layer(x, training=True)) for layer in (first, first, second)]
            assert not np.array_equal(outputs[0], outputs[1])
            if "seeded" not in name:
                assert not np.array_equal(outputs[0], outputs[2])
            results += outputs
    return results


IMAGE_LAYERS = {
    "RandomBrightness": lambda: layers.RandomBrightness(0.3, seed=3),
    "RandomColorDegeneration": lambda: layers.RandomColorDegeneration(0.5, seed=3),
    "RandomColorJitter": lambda: layers.RandomColorJitter((0, 255), 0.2, 0.3, 0.3, 0.2, seed=3),
    "RandomContrast": lambda: layers.RandomContrast(0.4, seed=3),
    "RandomCrop": lambda: layers.RandomCrop(5, 6, seed=3),
    "RandomElasticTransform": lambda: layers.RandomElasticTransform(seed=3),
    "RandomErasing": lambda: layers.RandomErasing(seed=3),
    "RandomFlip": lambda: layers.RandomFlip(seed=3),
    "RandomGaussianBlur": lambda: layers.RandomGaussianBlur(seed=3),
    "RandomGrayscale": lambda: layers.RandomGrayscale(seed=3),
    "RandomHue": lambda: layers.RandomHue(0.4, seed=3),
    "RandomInvert": lambda: layers.RandomInvert(0.5, seed=3),
    "RandomPerspective": lambda: layers.RandomPerspective(seed=3),
    "RandomPosterization": lambda: layers.RandomPosterization(4, seed=3),
    "RandomRotation": lambda: layers.RandomRotation(0.2, seed=3),
    "RandomSaturation": lambda: layers.RandomSaturation(0.5, seed=3),
    "RandomSharpness": lambda: layers.RandomSharpness(0.5, seed=3),
    "RandomShear": lambda: layers.RandomShear(0.2, 0.3, seed=3),
    "RandomTranslation": lambda: layers.RandomTranslation(0.2, 0.2, seed=3),
    "RandomZoom": lambda: layers.RandomZoom(0.3, seed=3),
    "RandAugment": lambda: layers.RandAugment(seed=3),
    "AugMix": lambda: layers.AugMix(seed=3),
    "Solarization": lambda: layers.Solarization(0.5, 0.5, seed=3),
    "MixUp": lambda: layers.MixUp(seed=3),
    "CutMix": lambda: layers.CutMix(seed=3),
    "Pipeline": lambda: layers.Pipeline([layers.RandomFlip(seed=3), layers.RandomZoom(0.2)]),
}


def test_every_random_image_layer_is_in_the_table():
    known = {name for name in dir(layers) if name.startswith("Random")}
    assert known <= set(IMAGE_LAYERS) | {"RandomHeight", "RandomWidth"}


@pytest.mark.parametrize("name", IMAGE_LAYERS)
@same_on_ranks(2, rtol=1e-4, atol=1e-3, exhaustive=(4,))
def test_random_image_layers(name):
    """On values up to 255, so that 1e-3 is four millionths of the range."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    # Keras transposes a number in AugMix and RandAugment, with and without a distribution.
    warnings.filterwarnings("ignore", message="Tensor.T is deprecated on 0-D tensors")
    results = []
    for dist in both_distributions():
        with dist.scope():
            keras.utils.set_random_seed(8)
            layer = IMAGE_LAYERS[name]()
            for _ in range(3):
                # A new tensor each time: some of these layers write into their input.
                inputs = keras_spmd.distribute_batch(IMAGES.copy())
                if name in ("MixUp", "CutMix"):
                    labels = np.eye(4, dtype="float32")[np.arange(BATCH) % 4]
                    inputs = {"images": inputs, "labels": keras_spmd.distribute_batch(labels)}
                outputs = layer(inputs, training=True)
                results.append(keras.tree.map_structure(whole, outputs))
    first, *others = [keras.tree.flatten(r)[0] for r in results[:3]]
    assert not all(np.array_equal(first, other) for other in others)
    return results


@same_on_ranks(2, 4)
def test_training_with_random_layers():
    """A model full of them: the history, the weights, the seed states and the predictions."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    results = []
    for dist in both_distributions():
        with dist.scope():
            keras.utils.set_random_seed(8)
            model = keras.Sequential(
                [
                    keras.Input((8, 8, 3)),
                    layers.RandomFlip(),
                    layers.Rescaling(1 / 255),
                    layers.Conv2D(4, 3, activation="relu"),
                    layers.SpatialDropout2D(0.2),
                    layers.BatchNormalization(),
                    layers.Flatten(),
                    layers.GaussianNoise(0.1),
                    layers.Dense(8, activation="relu"),
                    layers.Dropout(0.3),
                    layers.Dense(3),
                ]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
            history = model.fit(
                IMAGES, np.arange(BATCH) % 3, batch_size=5, epochs=3, verbose=0, shuffle=True
            )
            results.append(history.history)
            results.append([whole(v) for v in model.variables])
            results.append(model.predict(IMAGES, batch_size=5, verbose=0))
    return results


@on_ranks(1, 2)
def test_seed_states_are_variables_of_the_model():
    """So they are saved with it: a restored state draws the same numbers again."""
    with distribution.DataParallel().scope():
        x = keras_spmd.distribute_batch(ROWS)
        model = keras.Sequential([keras.Input((6,)), layers.Dropout(0.5)])
        model(x, training=True)
        state = [v.numpy() for v in model.non_trainable_variables]
        first = whole(model(x, training=True))
        second = whole(model(x, training=True))
        assert not np.array_equal(first, second)
        for variable, value in zip(model.non_trainable_variables, state, strict=True):
            variable.assign(value)
        np.testing.assert_array_equal(whole(model(x, training=True)), first)


@on_ranks(1, 2)
def test_initial_values_are_those_of_plain_keras():
    """Also from initializers that call keras.random themselves, and called by hand."""

    def custom(shape, dtype=None):
        return random.normal(shape, seed=3, dtype=dtype)

    def draw():
        dense = layers.Dense(4, kernel_initializer=custom)
        dense.build((None, 6))
        orthogonal = layers.Dense(4, kernel_initializer=keras.initializers.Orthogonal(seed=2))
        orthogonal.build((None, 6))
        by_hand = keras.initializers.GlorotUniform(seed=2)((3, 4))
        return [whole(v) for v in (dense.kernel, orthogonal.kernel, by_hand)]

    expected = draw()
    with distribution.DataParallel().scope():
        for got, want in zip(draw(), expected, strict=True):
            np.testing.assert_array_equal(got, want)
