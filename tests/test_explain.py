"""`keras_spmd.explain`: what a captured step does, in words and numbers."""

import os
import warnings

import keras
import numpy as np
from keras import distribution, layers, ops

import keras_spmd
from bench import on_ranks
from keras_spmd.distribution_lib import num_processes, process_id
from meshes import model_parallel

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")


def make(*middle):
    os.environ["KERAS_SPMD_COMPILER"] = "none"
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(16, name="first"), *middle, layers.Dense(6, name="last")]
    )
    model.compile("adam", "mse", jit_compile=True)
    return model


@on_ranks(1)
def test_without_a_distribution():
    model = make()
    assert keras_spmd.explain(model) == []
    model.fit(X, X, verbose=0)
    (report,) = keras_spmd.explain(model)
    (graph,) = report.graphs
    assert (report.kind, report.reason, graph.collectives) == ("train", None, [])
    assert graph.parameter_bytes == 4 * model.count_params()
    assert graph.state_bytes > 2 * graph.parameter_bytes, "Adam keeps two numbers for each weight"
    assert graph.kept_bytes >= 32 * 16 * 4, "the activations between the layers"
    assert set(graph.ops) == {"forward", "backward", "update"}
    assert graph.capture_seconds > 0


@on_ranks(2, 4)
def test_collectives_with_their_bytes_axes_and_layers():
    mesh = distribution.DeviceMesh((num_processes(), 1), ("batch", "model"))
    with model_parallel({".*last/kernel": ("batch",), ".*first/kernel": ()}, mesh).scope():
        model = make()
        model.fit(X, X, batch_size=64, verbose=0)
        (report,) = keras_spmd.explain(model)
    found = {(c.kind, c.axis, c.phase): c for c in report.graphs[0].collectives}
    gathered = found["all_gather", "batch", "forward"]
    assert (gathered.layers, gathered.nbytes) == (["sequential/last"], 16 * 6 * 4)
    assert found["all_gather", "batch", "backward"].layers == ["sequential/last"]
    assert found["reduce_scatter", "batch", "update"].layers == ["sequential/last"]
    sums = found["all_reduce", "batch", "update"]
    assert set(sums.layers) == {"sequential/first", "sequential/last"}
    assert sums.nbytes == 4 * (6 * 16 + 16 + 6)


@on_ranks(2)
def test_what_runs_replicated_and_what_runs_eagerly():
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)

    class Odd(layers.Layer):
        def call(self, x):
            # Which number comes where depends on all of the mask.
            return x.masked_scatter(x > 0, 2 * x)

    class Branching(layers.Layer):
        def call(self, x):
            return x if ops.sum(x) > 0 else -x

    with distribution.DataParallel().scope():
        model = make(Odd(name="odd"))
        model.fit(X, X, batch_size=64, verbose=0)
        (report,) = keras_spmd.explain(model)
        assert "sequential/odd" in {layer for _, layer, _ in report.graphs[0].fallbacks}
        model = make(Branching())
        for _ in range(2):
            model.fit(X, X, batch_size=64, verbose=0)
        (report,) = keras_spmd.explain(model)
    assert report.graphs == []
    assert "reads the value of a tensor" in report.reason


@on_ranks(1, 2)
def test_the_graph_as_text():
    import tempfile

    with distribution.DataParallel().scope(), tempfile.TemporaryDirectory() as folder:
        model = make()
        model.fit(X, X, batch_size=64, verbose=0)
        path = os.path.join(folder, "graph.txt")
        keras_spmd.explain(model, graph_file=path)
        if process_id() != 0:
            assert not os.path.exists(path), "one rank writes"
            return
        with open(path) as file:
            text = file.read()
    assert "= input  # sequential/first/kernel" in text
    assert "# forward of sequential/first" in text
    assert "# backward of sequential/last" in text
    assert "# update" in text
