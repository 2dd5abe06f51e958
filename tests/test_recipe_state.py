"""Optimizer state with a layout of its own, and models that are laid out after they were made."""

import contextlib

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers

from bench import on_ranks
from jit import captured
from keras_spmd import layouts
from keras_spmd.distribution_lib import num_processes
from meshes import placements, whole
from recipe_models import data_of, mlp
from test_layout_recipes import compare, imagined, local_bytes, train, under

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-2, epsilon=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adam": lambda: keras.optimizers.Adam(1e-2, epsilon=1e-3, amsgrad=True, clipnorm=0.1),
    "adamax": lambda: keras.optimizers.Adamax(1e-2, epsilon=1e-3),
    "nadam": lambda: keras.optimizers.Nadam(1e-2, epsilon=1e-3, global_clipnorm=0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(1e-2),
    "lion": lambda: keras.optimizers.Lion(1e-2),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "lamb": lambda: keras.optimizers.Lamb(1e-2, epsilon=1e-3),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "accumulating": lambda: keras.optimizers.Adam(
        1e-2, epsilon=1e-3, gradient_accumulation_steps=2
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(1e-2, epsilon=1e-3), initial_scale=4.0
    ),
}


# What runs with `make test`.
SAMPLE = ("adam", "averaged", "lion", "accumulating", "scaled")


@on_ranks(2, timeout=300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.exhaustive])
        for name in sorted(OPTIMIZERS)
    ],
)
def test_updates_from_sharded_state(name):
    """Weights are whole and state is in shares; the numbers are those of one device."""
    _, expected = train("mlp", OPTIMIZERS[name]())
    for wrapper in (contextlib.nullcontext, captured):
        keras.utils.clear_session()
        with under("zero1", mlp).scope(), wrapper():
            model, got = train("mlp", OPTIMIZERS[name]())
        compare(got, expected, f"{name}, {wrapper.__name__}")
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        kernels = [
            v for v in optimizer.variables if "mlp_up_kernel" in v.path and v.shape == (16, 64)
        ]
        assert kernels or name == "adafactor"
        for v in kernels:
            assert [p.is_shard(1) for p in placements(v)[1]] == [True], v.path


def test_keys_for_state_do_not_meet():
    """A path that another one begins with, underscores for slashes."""

    def make():
        x = keras.Input((64,))
        return keras.Model(x, layers.Dense(64, name="a_kernel")(layers.Dense(64, name="a")(x)))

    found = layouts.zero1(make, imagined(2), min_size=2)
    for path in ("adam/a_kernel_momentum", "adam/a_kernel_kernel_velocity_hat"):
        assert found[path].axes == ("batch", None)
    assert found["adam/a_kernel_bias_momentum"].axes == ("batch",)
    assert found["adam/a_momentum"] is None
    found = layouts.zero1(make, imagined(2), overrides={".*kernel.*": ()})
    assert found["adam/a_kernel_momentum"].axes == ()


@on_ranks(2)
def test_state_without_slots_is_not_missed():
    """Plain SGD keeps nothing, so the keys for it match nothing, which is no mistake."""
    with under("zero1", mlp).scope():
        train("mlp", keras.optimizers.SGD(0.1))


@on_ranks(2, timeout=300, exhaustive=(4,))
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_trained_model_is_laid_out_anew(jit_compile):
    """Made on one device, then sharded in two ways; training goes on as if nothing happened."""

    def first_steps():
        keras.utils.set_random_seed(0)
        model = mlp()
        optimizer = keras.optimizers.AdamW(1e-2, epsilon=1e-3)
        model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit_compile)
        model.train_on_batch(*data_of("mlp"))
        return model

    def next_steps(model):
        return [model.train_on_batch(*data_of("mlp"))[0] for _ in range(2)]

    reference, model = first_steps(), first_steps()
    shards = {}
    for recipe in ("fsdp", "zero1", "tensor_parallel"):
        dist = under(recipe, model)
        with dist.scope():
            layouts.apply(model, dist._layout_map)
            got = next_steps(model)
        np.testing.assert_allclose(got, next_steps(reference), 1e-4)
        shards[recipe] = local_bytes(model.weights), local_bytes(model.optimizer.variables[2:])
    for v, w in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(whole(v), whole(w), 1e-3, 1e-5)
    count = num_processes()
    weights, state = local_bytes(reference.weights), local_bytes(reference.optimizer.variables[2:])
    assert shards["fsdp"] == (weights / count, state / count)
    assert shards["zero1"] == (weights, state / count)
    assert shards["tensor_parallel"][0] < 0.75 * weights


@on_ranks(2)
def test_a_torch_module_in_a_layer_gets_its_shards():
    x = np.ones((4, 8), "float32")
    model = keras.Sequential([layers.TorchModuleWrapper(torch.nn.Linear(8, 8))])
    expected = model.predict(x, verbose=0)
    mesh = distribution.DeviceMesh((num_processes(), 1), ("batch", "model"))
    layout_map = layouts.fsdp(model, mesh, min_size=2)
    with distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch").scope():
        layouts.apply(model, layout_map)
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, 1e-5)
        for parameter in model.layers[0].parameters():
            assert any(p.is_shard() for p in placements(parameter)[1])


def test_mistakes():
    layout_map = layouts.fsdp(mlp, imagined(1))
    with pytest.raises(ValueError, match="not that of the active distribution"):
        layouts.apply(mlp(), layout_map)
