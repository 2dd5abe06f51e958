"""Layout recipes for KerasHub's models: which weights are divided, and the numbers of training."""

import contextlib
import importlib.util
import warnings

import keras
import numpy as np
import pytest
from keras import distribution

from bench import on_ranks, sample
from hub_models import BATCH, MODELS, inputs_of, targets_of
from jit import captured
from keras_spmd import layouts
from keras_spmd.distribution_lib import num_processes
from meshes import whole

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None, reason="KerasHub is not installed"
)
COLUMN, ROW = (None, "model"), ("model", None)
# Layers of a block: those that make features, and the one that sums over them.
PLAIN = ["feedforward_intermediate_dense", "feedforward_output_dense"]
GATED = ["feedforward_intermediate_dense", "feedforward_gate_dense", "feedforward_output_dense"]
FEEDFORWARD = {
    **dict.fromkeys(("bert", "gpt2"), PLAIN),
    **dict.fromkeys(("llama", "mistral", "qwen"), GATED),
    "gemma": ["ffw_gating", "ffw_gating_2", "ffw_linear"],
}


@on_ranks(1, timeout=300)
@pytest.mark.parametrize("name", sorted(FEEDFORWARD))
def test_blocks_are_divided(name):
    """Heads of queries, keys and values, gates, and the layers that follow; the vocabulary too."""
    warnings.simplefilter("ignore")
    mesh = distribution.DeviceMesh((1, 2), ("batch", "model"), ["cpu:0", "cpu:1"])
    found = layouts.tensor_parallel(MODELS[name], mesh)
    axes = {path: layout.axes for path, layout in found.items()}
    for layer in FEEDFORWARD[name]:
        kernels = [axes[path] for path in axes if path.endswith(f"/{layer}/kernel")]
        is_last = layer == FEEDFORWARD[name][-1]
        assert kernels == [ROW if is_last else COLUMN] * 2
    heads = [path for path in axes if path.endswith(("/query/kernel", "/attention_output/kernel"))]
    assert len(heads) == 4
    assert all("model" in axes[path] for path in heads)
    assert axes["token_embedding/embeddings"] == ROW
    # One head of keys and values serves all devices.
    shared = [axes[path] for path in axes if path.endswith(("/key/kernel", "/value/kernel"))]
    assert all(("model" in layout) == (name != "gemma") for layout in shared)


def train(name):
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    x, y = inputs_of(model), targets_of(model)
    optimizer = keras.optimizers.Adam(1e-2, epsilon=1e-3)
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=None)
    losses = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [("loss", losses), *((v.path, whole(v)) for v in model.weights)]


@on_ranks(2, timeout=600)
@pytest.mark.parametrize("name", sample(["llama", "gemma", "bert"], "llama"))
@pytest.mark.parametrize("mode", sample(["captured", "eager"], "captured"))
def test_training_gives_the_numbers_of_one_device(name, mode):
    warnings.simplefilter("ignore")
    expected, count = train(name), num_processes()
    for recipe, shape in (("fsdp", (count, 1)), ("sequence_parallel", (1, count))):
        keras.utils.clear_session()
        mesh = distribution.DeviceMesh(shape, ("batch", "model"))
        layout_map = getattr(layouts, recipe)(MODELS[name], mesh, min_size=64)
        wrapper = captured if mode == "captured" else contextlib.nullcontext
        scope = distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch").scope()
        with scope, wrapper():
            got = train(name)
        for (path, value), (_, same) in zip(expected, got, strict=True):
            scale = max(1.0, float(np.abs(value).max()))
            where = f"{name}, {recipe}: {path}"
            np.testing.assert_allclose(same, value, 1e-3, 1e-3 * scale, err_msg=where)
