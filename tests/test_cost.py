"""What a mesh of one costs: nothing but a look at the distribution."""

import statistics
import time

import keras
import numpy as np
from keras import distribution, layers

from bench import on_ranks
from meshes import model_parallel


def small_model():
    return keras.Sequential(
        [keras.Input((16,)), *[layers.Dense(16, activation="relu") for _ in range(8)]]
    )


@on_ranks(1)
def test_calling_a_model_on_a_mesh_of_one_costs_at_most_a_fifth_more():
    """Small layers, so that what is measured is the way to the ops and not the ops."""
    x = keras.ops.convert_to_tensor(np.ones((4, 16), "float32"))
    plain = small_model()
    dist = model_parallel({".*kernel": ("batch", "model"), ".*bias": ("model",)})
    with dist.scope():
        sharded = small_model()

    def call(model, scope):
        distribution.set_distribution(scope)
        started = time.perf_counter()
        for _ in range(20):
            model(x)
        return time.perf_counter() - started

    call(plain, None), call(sharded, dist)
    ratios = [call(sharded, dist) / call(plain, None) for _ in range(30)]
    assert statistics.median(ratios) < 1.2, ratios
