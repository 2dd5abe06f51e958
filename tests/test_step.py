"""Everything that may be in a step: weights, histories and predictions of one device."""

import keras
import numpy as np
import pytest
import torch
from keras import constraints, distribution, layers, ops, optimizers, regularizers

import keras_spmd
from bench import on_ranks
from meshes import grid, model_parallel

ROWS, CLASSES = 11, 4
_rng = np.random.default_rng(0)
X = _rng.normal(size=(ROWS, 6)).astype("float32")
IMAGES = _rng.normal(size=(ROWS, 6, 6, 2)).astype("float32")
Y = _rng.integers(0, CLASSES, ROWS)
REAL = _rng.normal(size=(ROWS, 3)).astype("float32")

MODELS = {}


def model(function):
    """A function that makes a compiled model, its data, and options of `fit`."""
    MODELS[function.__name__] = function
    return function


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(made, **options):
    options.setdefault("loss", loss())
    options.setdefault("metrics", ["accuracy"])
    made.compile(optimizers.SGD(0.1, momentum=0.5), **options)
    return made


def chain(*parts, inputs=(6,), **options):
    logits = layers.Dense(CLASSES, name="logits")
    return compiled(keras.Sequential([keras.Input(inputs), *parts, logits]), **options)


NORMALIZATIONS = {
    "batch": lambda: layers.BatchNormalization(),
    "batch, unscaled": lambda: layers.BatchNormalization(scale=False, center=False, momentum=0.5),
    "group": lambda: layers.GroupNormalization(2),
    "instance": lambda: layers.GroupNormalization(-1),
    "layer": lambda: layers.LayerNormalization(),
    "rms": lambda: layers.RMSNormalization(),
    "unit": lambda: layers.UnitNormalization(),
    "spectral": lambda: layers.SpectralNormalization(layers.Dense(8)),
}


def normalized(name):
    return chain(layers.Dense(8), NORMALIZATIONS[name](), layers.Activation("tanh")), X, Y, {}


def normalized_images(name):
    parts = [layers.Conv2D(8, 3, name="conv"), NORMALIZATIONS[name](), layers.Flatten()]
    return chain(*parts, inputs=(6, 6, 2)), IMAGES, Y, {}


for _name in NORMALIZATIONS:
    MODELS[f"normalization: {_name}"] = lambda name=_name: normalized(name)
for _name in ("batch", "group", "layer"):
    MODELS[f"normalization of images: {_name}"] = lambda name=_name: normalized_images(name)


@model
def all_regularizers():
    kinds = [
        regularizers.L1(0.01),
        regularizers.L2(0.02),
        regularizers.L1L2(0.01, 0.02),
        regularizers.OrthogonalRegularizer(0.01),
        regularizers.OrthogonalRegularizer(0.01, mode="columns"),
    ]
    parts = [
        layers.Dense(
            6,
            activation="tanh",
            kernel_regularizer=kind,
            bias_regularizer=kinds[i % 3],
            activity_regularizer=kinds[(i + 1) % 3],
        )
        for i, kind in enumerate(kinds)
    ]
    return chain(*parts), X, Y, {}


@model
def all_constraints():
    kinds = [
        constraints.MaxNorm(0.5),
        constraints.MinMaxNorm(0.2, 0.6, rate=0.5, axis=1),
        constraints.NonNeg(),
        constraints.UnitNorm(axis=[0, 1]),
    ]
    parts = [
        layers.Dense(
            6, activation="tanh", kernel_constraint=k, bias_constraint=constraints.NonNeg()
        )
        for k in kinds
    ]
    return chain(*parts), X, Y, {}


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        self.add_loss(0.01 * ops.sum(ops.abs(x[:, 0])))
        return x


@model
def added_losses():
    return chain(layers.Dense(8), Penalty()), X, Y, {}


class OwnMethods(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        own = super().compute_loss(x, y, y_pred, sample_weight, training)
        return own + 0.1 * ops.mean(ops.logsumexp(y_pred, axis=-1))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        logs["largest"] = ops.max(y_pred)
        return logs

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"probabilities": ops.softmax(self(x, training=False)), "x": x}


@model
def own_methods():
    parts = [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(CLASSES)]
    return compiled(OwnMethods(parts)), X, Y, {}


class OwnSteps(keras.Model):
    """Steps that Keras knows nothing of, with a metric and a seed of their own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = layers.Dense(8, activation="tanh"), layers.Dense(CLASSES)
        self.tracker = keras.metrics.Mean(name="mine")

    def call(self, x):
        return self.down(self.up(x))

    @property
    def metrics(self):
        return [self.tracker]

    def own_loss(self, x, y, training):
        return ops.mean(loss()(y, self(x, training=training))) + 0.01 * sum(
            ops.sum(ops.square(v)) for v in self.trainable_variables
        )

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        value = self.own_loss(x, y, True)
        value.backward()
        self.optimizer.apply(
            [v.value.grad for v in self.trainable_variables], self.trainable_variables
        )
        self.tracker.update_state(value)
        return {"mine": self.tracker.result(), "last": value}

    def test_step(self, data):
        x, y = data
        self.tracker.update_state(self.own_loss(x, y, False))
        return {"mine": self.tracker.result()}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return ops.argmax(self(x, training=False), axis=-1)


@model
def own_steps():
    made = OwnSteps()
    made.compile(optimizers.Adam(0.01))
    return made, X, Y, {}


@model
def many_inputs_and_outputs():
    left, right = keras.Input((6,), name="left"), keras.Input((6, 6, 2), name="right")
    shared = layers.Dense(8, activation="tanh", name="shared")
    seen = layers.Dense(6, name="seen")(layers.GlobalAveragePooling2D()(right))
    joined = layers.Concatenate()([shared(left), shared(seen)])
    outputs = {
        "kind": layers.Dense(CLASSES, name="kind")(joined),
        "place": layers.Dense(3, name="place")(joined),
    }
    made = compiled(
        keras.Model({"left": left, "right": right}, outputs),
        loss={"kind": loss(), "place": "mse"},
        loss_weights={"kind": 1.0, "place": 0.3},
        metrics={"kind": ["accuracy"], "place": ["mae"]},
    )
    weights = {"kind": np.linspace(0.5, 2, ROWS), "place": np.linspace(2, 0.5, ROWS)}
    x, y = {"left": X, "right": IMAGES}, {"kind": Y, "place": REAL}
    return made, x, y, {"sample_weight": weights}


@model
def shared_layers_and_class_weights():
    shared = layers.Dense(6, activation="tanh", name="shared")
    inputs = keras.Input((6,))
    outputs = layers.Dense(CLASSES)(shared(layers.Dropout(0.0)(shared(shared(inputs)))))
    made = compiled(keras.Model(inputs, outputs), weighted_metrics=["accuracy"])
    return made, X, Y, {"class_weight": {0: 0.5, 1: 1.0, 2: 2.0, 3: 1.5}}


class Torch(keras.Model):
    """Modules of torch: their parameters are sharded and trained, their buffers are global."""

    def __init__(self):
        super().__init__()
        self.conv = layers.TorchModuleWrapper(torch.nn.Conv2d(2, 8, 3, padding=1))
        self.norm = layers.TorchModuleWrapper(torch.nn.BatchNorm2d(8))
        self.head = layers.TorchModuleWrapper(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, CLASSES))
        )

    def call(self, x, training=None):
        x = self.norm(self.conv(ops.transpose(x, (0, 3, 1, 2))), training=training)
        return self.head(ops.mean(ops.relu(x), axis=(2, 3)))


@model
def torch_modules():
    return compiled(Torch()), IMAGES, Y, {}


def train(name):
    """Whatever a user can look at afterwards."""
    keras.utils.set_random_seed(3)
    made, x, y, options = MODELS[name]()
    history = made.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=True, **options).history
    scores = made.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    predictions = keras.tree.flatten(made.predict(x, batch_size=5, verbose=0))
    buffers = [keras_spmd.get_dtensor_local(b) for b in made.buffers()]
    numbers = {**history, **{f"final {key}": [value] for key, value in scores.items()}}
    return numbers, predictions, [v.numpy() for v in made.variables] + [b.numpy() for b in buffers]


# Keras gives the parameters of torch modules no other names.
COLUMNS = {".*(dense|logits|kind|shared|conv|seen).*kernel": (None, "model")}
LAYOUTS = {"torch_modules": {"variable.*": ("model",)}}


def distributions(name=None):
    yield "data parallel", distribution.DataParallel()
    yield "sharded", model_parallel(LAYOUTS.get(name, COLUMNS), grid())


def assert_same_runs(got, expected, label):
    numbers, predictions, weights = expected
    assert got[0].keys() == numbers.keys()
    for key, values in numbers.items():
        assert all(type(value) is float for value in got[0][key])
        np.testing.assert_allclose(got[0][key], values, 1e-5, 1e-6, err_msg=f"{label} {key}")
    for a, b in zip(got[1], predictions, strict=True):
        assert isinstance(a, np.ndarray)
        np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=f"{label} predictions")
    for a, b in zip(got[2], weights, strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=f"{label} weights")


@on_ranks(2, exhaustive=(1, 4))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_steps(name):
    expected = train(name)
    for label, dist in distributions(name):
        with dist.scope():
            assert_same_runs(train(name), expected, f"{name} {label}")


@on_ranks(1, 2, 4)
def test_synchronized_batch_normalization():
    """On a mesh it is what happens in any case; without one Keras refuses it, as ever."""
    with pytest.raises(ValueError, match="synchronized=True"):
        layers.BatchNormalization(synchronized=True)
    with pytest.raises(NotImplementedError, match="synchronized=True"):
        ops.moments(torch.ones(4, 2), [0], synchronized=True)

    def run(**options):
        keras.utils.set_random_seed(3)
        norm = layers.BatchNormalization(**options)
        made = chain(layers.Dense(8), norm)
        made.fit(X, Y, batch_size=4, verbose=0)
        assert norm.get_config()["synchronized"] == bool(options)
        return [v.numpy() for v in made.variables]

    expected = run()
    with distribution.DataParallel().scope():
        got = run(synchronized=True)
        mean, _ = ops.moments(keras_spmd.distribute_batch(X), [0], synchronized=True)
    np.testing.assert_allclose(np.asarray(mean), X.mean(0), 1e-5, 1e-6)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@on_ranks(1, 2, 4)
def test_layers_frozen_and_thawed_between_fits():

    def run():
        keras.utils.set_random_seed(3)
        # A bias before the norm has no gradient but noise, which Adam would scale up.
        made = chain(layers.Dense(8, use_bias=False, name="dense"), layers.BatchNormalization())
        weights = []
        for frozen in (True, False, True):
            for layer in made.layers[:2]:
                layer.trainable = not frozen
            made.compile(optimizers.Adam(0.01), loss())
            before = made.layers[0].kernel.numpy()
            made.fit(X, Y, batch_size=4, verbose=0)
            assert np.array_equal(before, made.layers[0].kernel.numpy()) == frozen
            weights += [v.numpy() for v in made.variables]
        return weights

    expected = run()
    for label, dist in distributions():
        with dist.scope():
            got = run()
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=label)
