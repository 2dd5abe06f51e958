"""Every family of `keras.applications`, data parallel and with sharded channels: a training step
and predictions are those of one device."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
from keras import distribution
from keras.src import backend
from keras.src.backend.common import dtypes

import keras_spmd
from bench import on_ranks
from jit import captured
from meshes import grid, whole

# A model of each family, and the smallest images that it takes. Keras has no NASNet on torch.
FAMILIES = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "VGG19": 32,
    "Xception": 71,
}
QUICK = ("MobileNet", "VGG16")


class OutputChannels(distribution.ModelParallel):
    """Shards the last dim of every kernel: the output channels of convolutions and dense layers."""

    def __init__(self):
        super().__init__(layout_map=distribution.LayoutMap(grid()), batch_dim_name="batch")

    def get_variable_layout(self, variable):
        axes = [None] * len(variable.shape)
        if variable.path.endswith("kernel"):
            axes[-1] = "model"
        return distribution.TensorLayout(axes, self.device_mesh)


def distributions():
    yield "data parallel", distribution.DataParallel()
    yield "output channels", OutputChannels()


def train(name):
    """The loss of a step, the weights after it and predictions of the family's smallest model."""
    keras.utils.set_random_seed(0)
    size = FAMILIES[name]
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=8)
    for layer in model._flatten_layers():
        # Masks under a distribution are not those that torch draws without one.
        for rate in ("rate", "drop_path_rate"):
            if hasattr(layer, rate):
                setattr(layer, rate, 0.0)
    generator = np.random.default_rng(1)
    x = generator.uniform(0, 255, (4, size, size, 3))
    y = generator.integers(0, 8, 4)
    model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    loss = model.fit(x, y, batch_size=4, verbose=0).history["loss"]
    weights = [(v.path, whole(v)) for v in model.variables]
    return [("loss", loss), ("predictions", model.predict(x, verbose=0)), *weights]


@contextlib.contextmanager
def in_float64():
    """All layers compute in float64, also those for which Keras prefers float32.

    On images of this size, dozens of normalizations make much of a rounding error.
    """
    result_type = dtypes.result_type

    def widest(*kinds):
        return "float64" if any("float64" in str(k) for k in kinds) else result_type(*kinds)

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    backend.result_type = dtypes.result_type = widest
    try:
        yield
    finally:
        backend.result_type = dtypes.result_type = result_type
        keras.config.set_dtype_policy("float32")
        keras.config.set_floatx("float32")


def compare(name, wrapper=contextlib.nullcontext):
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    with in_float64():
        expected = train(name)
        for label, dist in distributions():
            with dist.scope(), wrapper():
                got = train(name)
            for (path, value), (_, same) in zip(expected, got, strict=True):
                scale = max(1.0, float(np.abs(value).max()))
                where = f"{name} {label}: {path}"
                np.testing.assert_allclose(same, value, 1e-6, 1e-8 * scale, err_msg=where)


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("name", QUICK)
def test_a_step_and_predictions_are_those_of_one_device(name):
    compare(name)


@pytest.mark.exhaustive
@on_ranks(2, timeout=900)
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(QUICK)))
def test_every_family_gives_the_numbers_of_one_device(name):
    compare(name)


@pytest.mark.exhaustive
@on_ranks(2, timeout=900)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_captured(name):
    compare(name, captured)
