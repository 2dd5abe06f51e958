"""KerasHub's models under its own layout maps: training, predictions, what is written, LoRA and
int8 are those of one device."""

import contextlib
import importlib.util
import warnings
from typing import ClassVar

import keras
import numpy as np
import pytest
from keras import distribution

from bench import assert_equal_results, on_ranks, same_on_ranks
from hub_models import BATCH, MODELS, WRITERS, hub, inputs_of, prompts_for, targets_of
from jit import captured
from keras_spmd.distribution_lib import num_processes
from meshes import placements, whole

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None, reason="KerasHub is not installed"
)
QUICK = ("llama", "vit")
STOP = (5, 6)


class BothAxes(distribution.ModelParallel):
    """For models without a layout map: every kernel and embedding is sharded on both axes."""

    AXES: ClassVar = {
        2: ("model", "batch"),
        3: ("batch", "model", None),
        4: (None, None, "batch", "model"),
    }

    def __init__(self, mesh):
        super().__init__(layout_map=distribution.LayoutMap(mesh), batch_dim_name="batch")

    def get_variable_layout(self, variable):
        axes = self.AXES.get(len(variable.shape), [None] * len(variable.shape))
        return distribution.TensorLayout(axes, self.device_mesh)


def own_layouts(name, shape):
    """KerasHub's own layout map, where it has one."""
    mesh = distribution.DeviceMesh(shape, ("batch", "model"))
    backbone = {"llama": "LlamaBackbone", "qwen": "QwenBackbone", "gemma": "GemmaBackbone"}
    if name not in backbone:
        return BothAxes(mesh)
    layouts = getattr(hub().models, backbone[name]).get_layout_map(mesh)
    return distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def distributions(name):
    yield "data parallel", distribution.DataParallel()
    count = num_processes()
    for shape in [(2, 2)] if count == 4 else sorted({(1, count), (count, 1)}):
        yield f"mesh {shape}", own_layouts(name, shape)


def make(name, scale=1.0):
    """A model; `scale` makes what it says of the next token differ from token to token."""
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    if scale != 1.0:
        for v in model.trainable_variables:
            if len(v.shape) > 1:
                v.assign(v * scale)
    return model


class Forgetting(keras.callbacks.Callback):
    """Each step begins without gradients.

    Keras finds them by the paths of variables, and two of T5's have the same one: the gradients of
    one of them add up from step to step, unless the step is a graph.
    """

    def on_train_batch_end(self, batch, logs=None):
        for variable in self.model.trainable_variables:
            variable.value.grad = None


def train(name, prepare=None):
    """Losses of two steps, predictions and weights."""
    model = make(name)
    if prepare:
        prepare(model)
    x, y = inputs_of(model), targets_of(model)
    metrics = dict.fromkeys(y, "mae") if isinstance(y, dict) else ["mae"]
    optimizer = keras.optimizers.Adam(1e-2, epsilon=1e-3)
    model.compile(optimizer, "mse", metrics=metrics, weighted_metrics=None)
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    callbacks = [Forgetting()] if name == "t5" else []
    losses = model.fit(x, y, callbacks=callbacks, **options).history["loss"]
    predictions = keras.tree.flatten(model.predict(x, batch_size=BATCH, verbose=0))
    return [("loss", losses), *enumerate(predictions), *((v.path, whole(v)) for v in model.weights)]


def compare(name, run, wrapper=contextlib.nullcontext, tolerance=1e-4):
    warnings.simplefilter("ignore")
    expected = run()
    for label, dist in distributions(name):
        with dist.scope(), wrapper():
            got = run()
        for (path, value), (_, same) in zip(expected, got, strict=True):
            scale = max(1.0, float(np.abs(value).max()))
            where = f"{name}, {label}: {path}"
            np.testing.assert_allclose(same, value, tolerance, tolerance * scale, err_msg=where)


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("name", QUICK)
def test_training_gives_the_numbers_of_one_device(name):
    compare(name, lambda: train(name))


@pytest.mark.exhaustive
@on_ranks(2, 4, timeout=900)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_training_of_every_model(name):
    compare(name, lambda: train(name))


@pytest.mark.exhaustive
@on_ranks(2, 4, timeout=900)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_training_of_every_model_captured(name):
    compare(name, lambda: train(name), captured)


def write(name, sampler, rows, stop=STOP):
    """What a model writes after its prompts."""
    model = make(name, scale=8.0)
    model.compile(sampler=sampler())
    written = model.generate(prompts_for(name, rows), stop_token_ids=stop)
    return list(written.items())


SAMPLERS = {
    "greedy": lambda: "greedy",
    "beam": lambda: hub().samplers.BeamSampler(num_beams=3),
    "top-k": lambda: hub().samplers.TopKSampler(k=5, seed=3),
}


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("sampler", ["beam", "greedy"])
def test_what_is_written_is_what_one_device_writes(sampler):
    for rows in (BATCH, 1):
        compare("llama", lambda rows=rows: write("llama", SAMPLERS[sampler], rows))


@pytest.mark.exhaustive
@on_ranks(2, 4, timeout=900)
@pytest.mark.parametrize("sampler", ["beam", "greedy"])
@pytest.mark.parametrize("name", WRITERS)
def test_what_every_model_writes(name, sampler):
    for rows, stop in ((BATCH, STOP), (1, None)):
        compare(name, lambda r=rows, s=stop: write(name, SAMPLERS[sampler], r, s))


@pytest.mark.exhaustive
@same_on_ranks(2, 4, timeout=900)
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_drawn_from_the_best_tokens_is_the_same_on_every_mesh(name):
    """Under a distribution on one rank, too, but not without one: random numbers are its own."""
    warnings.simplefilter("ignore")
    first = []
    for _, dist in distributions(name):
        with dist.scope():
            written = [write(name, SAMPLERS["top-k"], rows) for rows in (BATCH, 1)]
        first = first or written
        assert_equal_results(written, first, "another layout")
    return first


def with_lora(model):
    getattr(model, "backbone", model).enable_lora(2)


@on_ranks(2, timeout=300)
def test_lora():
    compare("llama", lambda: train("llama", with_lora))


@pytest.mark.exhaustive
@on_ranks(2, 4, timeout=900)
@pytest.mark.parametrize("wrapper", ["captured", "eager"])
@pytest.mark.parametrize("name", ["bert", *WRITERS])
def test_lora_of_every_model(name, wrapper):
    wrapper = captured if wrapper == "captured" else contextlib.nullcontext
    compare(name, lambda: train(name, with_lora), wrapper)


def quantize(name):
    """Predictions in int8, what is written with them, and the integers themselves."""
    model = make(name, scale=8.0)
    x = inputs_of(model)
    model.quantize("int8")
    predictions = keras.tree.flatten(model.predict(x, batch_size=BATCH, verbose=0))
    results = [*enumerate(predictions), *((v.path, whole(v)) for v in model.weights)]
    if name in WRITERS:
        model.compile(sampler="greedy")
        results += model.generate(prompts_for(name, BATCH), stop_token_ids=None).items()
    return results


@pytest.mark.exhaustive
@on_ranks(2, 4, timeout=900)
@pytest.mark.parametrize("name", ["bert", "vit", *WRITERS])
def test_int8(name):
    compare(name, lambda: quantize(name))


@on_ranks(2)
def test_layout_maps_of_backbones_reach_the_weights_of_a_task():
    warnings.simplefilter("ignore")
    with own_layouts("llama", (1, 2)).scope():
        model = make("llama")
    whole_ones = {v.path for v in model.weights if all(p.is_replicate() for p in placements(v)[1])}
    matrices = {v.path for v in model.weights if len(v.shape) > 1}
    assert whole_ones & matrices == {"token_embedding/reverse_embeddings"}
