"""`jit_compile=True`: the step as one graph gives what the eager step gives, freezing nothing."""

import contextlib
import inspect
import os
import warnings

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers, ops

import keras_spmd
import test_callbacks
import test_data
import test_precision
import test_random
import test_step
import test_training
from bench import on_ranks, same_on_ranks, sample
from jit import captured
from keras_spmd.graph._origins import origin_of
from meshes import grid, model_parallel, whole

X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 22)


# Every second one; all of them with `make test-all`.
@pytest.mark.parametrize("name", sample(test_step.MODELS, *sorted(test_step.MODELS)[::2]))
@on_ranks(2, timeout=240)
def test_whatever_may_be_in_a_step(name):
    steps = []
    with captured(count=steps):
        test_step.test_steps.body(name)
    assert {"train", "test", "predict"} >= set(steps) >= {"train"}


@pytest.mark.parametrize(
    "name", sample(["accumulation", "loss scale", "ema", "schedule"], "accumulation", "loss scale")
)
@on_ranks(2, timeout=240)
def test_optimizers(name):
    """Also accumulation and loss scaling, whose conditions depend on the values of tensors."""
    with captured():
        test_training.test_optimizers.body(name)


DATA = [
    "numpy",
    "sample_weight",
    "class_weight",
    "validation_data",
    "one row",
    "batches of fewer rows than ranks",
    "loader, shuffled",
    "PyDataset, weights",
    "generator",
]


@pytest.mark.parametrize("name", DATA)
@on_ranks(2, exhaustive=(4,), timeout=240)
def test_data_of_any_kind(name):
    with captured():
        test_data.test_data.body(name)


@on_ranks(2, exhaustive=(1, 4))
def test_nested_data():
    with captured():
        test_data.test_nested_structures_with_none.body()


@pytest.mark.parametrize("name", sorted(test_callbacks.CALLBACKS))
@on_ranks(2, timeout=240)
def test_callbacks_that_change_things(name):
    """Learning rates, weights and flags that are set between steps take effect."""
    with captured():
        test_callbacks.test_callbacks.body(name)


@on_ranks(2, exhaustive=(1, 4), timeout=240)
def test_layers_that_are_frozen_and_thawed():
    with captured():
        test_step.test_layers_frozen_and_thawed_between_fits.body()


@same_on_ranks(2, timeout=240, exhaustive=(4,))
def test_random_layers():
    """The draws of the eager step: fresh at each step, the same on every mesh."""
    eager = test_random.test_training_with_random_layers.body()
    with captured():
        graph = test_random.test_training_with_random_layers.body()
    for a, b in zip(keras.tree.flatten(graph), keras.tree.flatten(eager), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)
    return graph


PRECISION = [
    name
    for name, test in vars(test_precision).items()
    if name.startswith("test_")
    and hasattr(test, "body")
    and not inspect.signature(test.body).parameters
    and "gradient" not in name
]


@pytest.mark.parametrize("name", PRECISION)
@on_ranks(1, 2)
def test_precision_(name):
    with captured():
        getattr(test_precision, name).body()


@on_ranks(2)
def test_metrics_that_count_in_segments():
    def fit():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
        options = {"num_thresholds": 20, "from_logits": True}
        of_labels = keras.metrics.AUC(multi_label=True, num_labels=4, name="many", **options)
        model.compile("sgd", "mse", metrics=[of_labels, keras.metrics.AUC(name="one", **options)])
        x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
        return model.fit(x, np.eye(4)[[0, 1, 2, 3] * 2], batch_size=4, verbose=0).history

    expected = fit()
    with captured(), distribution.DataParallel().scope():
        got = fit()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, 1e-5, err_msg=name)


RECURRENT = {
    "LSTM": lambda: layers.LSTM(5),
    "GRU": lambda: layers.GRU(5, return_sequences=True),
    "bidirectional": lambda: layers.Bidirectional(layers.SimpleRNN(4)),
}


@pytest.mark.parametrize("name", RECURRENT)
@on_ranks(1, 2)
def test_recurrent_layers_and_masks(name):
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    tokens = np.random.default_rng(2).integers(0, 7, (12, 6))

    def run():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(7, 8, mask_zero=True),
                RECURRENT[name](),
                layers.Dense(3),
            ]
        )
        if name == "GRU":
            model.add(layers.GlobalAveragePooling1D())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
        history = model.fit(tokens, tokens[:, 0] % 3, batch_size=4, epochs=2, verbose=0)
        return history.history["loss"], [whole(v) for v in model.variables]

    expected = run()
    with distribution.DataParallel().scope(), captured():
        got = run()
    np.testing.assert_allclose(got[0], expected[0], 1e-5)
    for a, b in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def make(*middle, jit_compile=True, optimizer="sgd", **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), *middle, layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile, **options)
    return model


def graphs(model):
    return [entry for entry in model.train_function.entries.values() if entry.run is not None]


@on_ranks(1, 2)
def test_inputs_in_a_dict_of_any_order():
    os.environ["KERAS_SPMD_COMPILER"] = "none"

    def run(jit_compile):
        keras.utils.set_random_seed(3)
        inputs = {
            "second": keras.Input((6,), name="second"),
            "first": keras.Input((6,), name="first"),
        }
        difference = layers.Dense(4)(inputs["second"]) - inputs["first"][:, :4]
        model = keras.Model(inputs, {"z": difference, "a": layers.Dense(2)(inputs["first"])})
        model.compile("sgd", {"z": "mse", "a": "mae"}, jit_compile=jit_compile)
        data = {"second": X, "first": 2 * X}, {"z": X[:, :4], "a": X[:, :2]}
        history = model.fit(*data, batch_size=8, epochs=2, verbose=0).history
        return history, model.predict(data[0], verbose=0)

    expected = run(False)
    with distribution.DataParallel().scope():
        got = run(True)
    for key, values in expected[0].items():
        np.testing.assert_allclose(got[0][key], values, 1e-5)
    for key, values in expected[1].items():
        np.testing.assert_allclose(got[1][key], values, 1e-5, 1e-6)


@on_ranks(1, 2)
def test_one_graph_for_all_epochs_with_validation_and_predictions_between():
    os.environ["KERAS_SPMD_COMPILER"] = "none"
    with distribution.DataParallel().scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        model.compile("sgd", "mse", jit_compile=True)
        for _ in range(2):
            model.fit(X, X[:, :4], batch_size=8, epochs=3, validation_split=0.5, verbose=0)
            model.predict(X, batch_size=8, verbose=0)
            model.evaluate(X, X[:, :4], batch_size=8, verbose=0)
    kinds = {report.kind: len(report.graphs) for report in keras_spmd.explain(model)}
    shapes = len({rows for rows in (8, len(X) // 2 % 8) if rows})
    assert kinds["train"] == shapes
    assert len(graphs(model)) == shapes


@on_ranks(1)
def test_without_a_distribution():
    """The same graph, for whoever has one device."""
    os.environ["KERAS_SPMD_COMPILER"] = "none"
    plain, graph = make(jit_compile=False, metrics=["accuracy"]), make(metrics=["accuracy"])
    for model in (plain, graph):
        model.fit(X, Y, batch_size=8, epochs=3, verbose=0, shuffle=False)
    assert len(graphs(graph)) == 2, "full batches and the last one"
    for key, values in plain.history.history.items():
        np.testing.assert_allclose(graph.history.history[key], values, 1e-5)
    np.testing.assert_allclose(graph.predict(X, verbose=0), plain.predict(X, verbose=0), 1e-5, 1e-6)


@on_ranks(1)
def test_without_a_distribution_loaders_are_left_alone():
    """A dataset that draws random numbers draws those of a run without a graph."""
    os.environ["KERAS_SPMD_COMPILER"] = "none"

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, i):
            return torch.tensor(X[i]) + torch.rand(6), int(Y[i])

    def run(jit_compile):
        model = make(jit_compile=jit_compile)
        loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
        return model.fit(loader, epochs=3, verbose=0, shuffle=False).history["loss"]

    np.testing.assert_allclose(run(True), run(False), 1e-5)


class Scaled(layers.Layer):
    """Has a number that somebody else changes."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def call(self, x):
        return x * self.scale


class Counting(layers.Layer):
    """Changes a number of its own at each call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, x):
        self.calls += 1
        return x * self.calls


class Branching(layers.Layer):
    """Looks at a value to decide what to do."""

    def call(self, x):
        if ops.sum(x) > 0:
            return x
        return -x


@on_ranks(1, 2)
def test_a_number_that_is_changed_between_steps_is_seen():
    os.environ["KERAS_SPMD_COMPILER"] = "none"

    def run(jit_compile):
        model = make(Scaled(), jit_compile=jit_compile)
        losses = []
        for scale in (1.0, 2.0, -1.0, -2.0, 2.0):
            model.layers[0].scale = scale
            losses.append(model.train_on_batch(X, Y))
        return losses, model

    expected, _ = run(False)
    with distribution.DataParallel().scope():
        got, model = run(True)
    np.testing.assert_allclose(got, expected, 1e-5)
    assert len(graphs(model)) == 4, "one for each value"


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(Counting, "it changes `calls`"), (Branching, "line .* (in call) reads the value")],
)
@on_ranks(1, 2)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(layer, reason):
    os.environ["KERAS_SPMD_COMPILER"] = "none"

    def run(jit_compile):
        model = make(layer(), jit_compile=jit_compile)
        return [model.train_on_batch(X, Y) for _ in range(4)]

    pattern = reason.replace("(", r"\(").replace(")", r"\)")
    expected = run(False)
    with distribution.DataParallel().scope():
        with pytest.warns(keras_spmd.ShardingWarning, match=pattern):
            got = run(True)
        np.testing.assert_allclose(got, expected, 1e-5)
        os.environ["KERAS_SPMD_STRICT"] = "1"
        with pytest.raises(RuntimeError, match=pattern):
            run(True)


@on_ranks(1, 2)
def test_shapes_that_keep_changing():
    os.environ["KERAS_SPMD_COMPILER"] = "none"
    os.environ["KERAS_SPMD_CAPTURE_LIMIT"] = "3"
    with distribution.DataParallel().scope():
        model = make()
        for rows in (8, 10, 12):
            model.train_on_batch(X[:rows], Y[:rows])
        with pytest.warns(keras_spmd.ShardingWarning, match="input 0, whose shape is"):
            model.train_on_batch(X[:14], Y[:14])
        model.train_on_batch(X[:16], Y[:16])


class Halving(layers.Layer):
    """Halves its input until it is small enough, ten times at most."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        def halve(y):
            self.count.assign(self.count + 1)
            return y / 2

        return ops.while_loop(lambda y: ops.max(ops.abs(y)) > 0.5, halve, x, maximum_iterations=10)


class Counted(layers.Layer):
    """Loops whose ends are known."""

    def call(self, x):
        _, x = ops.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.9), (0, x))
        x = ops.fori_loop(0, 2, lambda i, y: y + 0.1 * i, x)
        total, each = ops.scan(
            lambda carry, row: (carry + row, carry * 0.5), x[:, 0] * 0, ops.transpose(x)
        )
        return x + total[:, None] + ops.transpose(each)


class Conditional(layers.Layer):
    """Both ways, with a variable that only one of them writes."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        def positive():
            self.seen.assign(self.seen + 1)
            return x * 2

        return ops.cond(ops.sum(x) > 0, positive, lambda: -x)


class Window(layers.Layer):
    """A part from a place that depends on the data."""

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        start = ops.cast(ops.sum(x) > 0, "int32")
        size = ops.shape(x)[-1] - 1
        part = ops.slice(x, (0, start), (ops.shape(x)[0], size))
        return ops.concatenate([part, x[:, :1]], axis=-1)


@pytest.mark.parametrize("layer", [Halving, Counted, Conditional, Window])
@on_ranks(1, 2, exhaustive=(4,))
def test_control_flow(layer):
    """Captured without reading a value, with gradients and with variables that it writes."""
    os.environ["KERAS_SPMD_COMPILER"] = "none"

    def run(jit_compile):
        keras.utils.set_random_seed(3)
        model = make(layers.Dense(6), layer(), jit_compile=jit_compile)
        history = model.fit(X[:16], Y[:16], batch_size=4, epochs=2, shuffle=False, verbose=0)
        return history.history["loss"], [whole(v) for v in model.variables], model

    expected = run(False)
    with distribution.DataParallel().scope():
        got = run(True)
        assert len(graphs(got[2])) == 1
    np.testing.assert_allclose(got[0], expected[0], 1e-5)
    for a, b in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.parametrize("mode", ["full", "activations"])
@on_ranks(1, 2)
def test_rematerialized_layers_are_computed_again_in_the_backward_pass(mode):
    os.environ["KERAS_SPMD_COMPILER"] = "none"

    def run(jit_compile, scope):
        keras.utils.set_random_seed(3)
        with scope:
            middle = [layers.Dense(16, activation="gelu") for _ in range(3)]
            model = make(*middle, jit_compile=jit_compile)
            losses = [model.train_on_batch(X, Y) for _ in range(3)]
        return losses, model

    def products(model):
        """Matrix products that the backward pass makes."""
        (entry,) = graphs(model)
        nodes = entry.captured.module.graph.nodes
        return sum("mm" in str(n.target) for n in nodes if origin_of(n).phase == "backward")

    expected, _ = run(False, contextlib.nullcontext())
    with distribution.DataParallel().scope():
        got, model = run(True, keras.RematScope(mode=mode))
        plain, without = run(True, contextlib.nullcontext())
    np.testing.assert_allclose(got, expected, 1e-5)
    np.testing.assert_allclose(plain, expected, 1e-5)
    if mode == "full":
        assert products(model) > products(without)


@on_ranks(2, exhaustive=(1, 4))
def test_cheap_activations_are_computed_again():
    os.environ["KERAS_SPMD_COMPILER"] = "none"

    def run(jit_compile):
        keras.utils.set_random_seed(3)
        waves = [layers.Lambda(lambda x: ops.sin(x) * ops.cos(x)) for _ in range(4)]
        model = make(layers.Dense(32), *waves, jit_compile=jit_compile)
        model.compile("adam", model.loss, metrics=["accuracy"], jit_compile=jit_compile)
        losses = [model.train_on_batch(X[:16], Y[:16]) for _ in range(4)]
        return losses, model

    def kept(model):
        (report,) = keras_spmd.explain(model)
        return report.graphs[0].kept_bytes

    expected, _ = run(False)
    with distribution.DataParallel().scope():
        os.environ["KERAS_SPMD_RECOMPUTE"] = "0"
        losses, keeping = run(True)
        np.testing.assert_allclose(losses, expected, 1e-5)
        os.environ["KERAS_SPMD_RECOMPUTE"] = "1"
        losses, recomputing = run(True)
        np.testing.assert_allclose(losses, expected, 1e-5)
        assert kept(recomputing) < kept(keeping)


@pytest.mark.parametrize("name", ["own_steps", "torch_modules"])
@on_ranks(2, timeout=240)
def test_steps_with_recomputed_activations(name):
    os.environ["KERAS_SPMD_RECOMPUTE"] = "1"
    with captured():
        test_step.test_steps.body(name)


class Listed(layers.Layer):
    """Has numbers in containers, and an array, that somebody else changes."""

    def __init__(self):
        super().__init__()
        self.scales = [1.0, 2.0]
        self.settings = {"shift": 0.0}
        self.factor = np.float32(1.0)

    def call(self, x):
        return x * self.scales[0] * self.factor + self.settings["shift"]


@on_ranks(1, 2)
def test_numbers_in_containers_that_are_changed_between_steps_are_seen():
    os.environ["KERAS_SPMD_COMPILER"] = "none"

    def run(jit_compile):
        model = make(Listed(), jit_compile=jit_compile)
        layer, losses = model.layers[0], []
        for change in (
            lambda: None,
            lambda: layer.scales.__setitem__(0, 3.0),
            lambda: layer.settings.update({"shift": 0.5}),
            lambda: setattr(layer, "factor", np.float32(2.0)),
        ):
            change()
            losses.append(model.train_on_batch(X, Y))
        return losses

    expected = run(False)
    with distribution.DataParallel().scope():
        np.testing.assert_allclose(run(True), expected, 1e-5)


@on_ranks(1, 2)
def test_a_tensor_that_a_step_leaves_behind():
    """A tensor of the trace is none that anybody could use."""
    os.environ["KERAS_SPMD_COMPILER"] = "none"

    class Leaving(layers.Layer):
        def call(self, x):
            self.last = x
            return x

    with distribution.DataParallel().scope():
        model = make(Leaving())
        with pytest.warns(keras_spmd.ShardingWarning, match="stores a tensor in `last`"):
            model.train_on_batch(X, Y)
        model.train_on_batch(X, Y)
        assert np.isfinite(whole(model.layers[0].last)).all()


@on_ranks(1, 2)
def test_checking_finds_a_number_that_nobody_could_see():
    """Such as a global one: the step is captured again before each run, and compared."""
    os.environ["KERAS_SPMD_COMPILER"] = "none"
    somewhere = {"scale": 1.0}

    class Hidden(layers.Layer):
        def call(self, x):
            return x * somewhere["scale"]

    with distribution.DataParallel().scope():
        model = make(Hidden())
        model.train_on_batch(X, Y)
        os.environ["KERAS_SPMD_CHECK"] = "1"
        model.train_on_batch(X, Y)
        somewhere["scale"] = 2.0
        with pytest.raises(RuntimeError, match=r"KERAS_SPMD_CHECK: .* is another graph now"):
            model.train_on_batch(X, Y)


@on_ranks(2)
def test_ranks_that_capture_different_steps():
    from keras_spmd.distribution_lib import process_id

    class OnOneRank(layers.Layer):
        def call(self, x):
            return x - ops.mean(x) if process_id() == 1 else x

    os.environ["KERAS_SPMD_COMPILER"] = "none"
    with distribution.DataParallel().scope():
        model = make(OnOneRank())
        with pytest.raises(RuntimeError, match="Rank 1 captured another step than rank 0"):
            model.train_on_batch(X, Y)


@on_ranks(2)
def test_a_rank_that_computes_something_else():
    """Also where no collective tells."""
    from keras_spmd.distribution_lib import process_id

    class OnOneRank(layers.Layer):
        def call(self, x):
            return ops.exp(x) if process_id() == 1 else x

    os.environ["KERAS_SPMD_COMPILER"] = "none"
    with distribution.DataParallel().scope():
        model = make(OnOneRank())
        with pytest.raises(RuntimeError, match=r"exp\.default.* and that of rank 0 is"):
            model.train_on_batch(X, Y)


@on_ranks(2)
def test_what_one_rank_cannot_capture_runs_eagerly_on_all():
    from keras_spmd.distribution_lib import process_id

    class OnOneRank(layers.Layer):
        calls = 0

        def call(self, x):
            self.calls += process_id()
            return x

    os.environ["KERAS_SPMD_COMPILER"] = "none"
    with distribution.DataParallel().scope():
        model = make(OnOneRank())
        with pytest.warns(keras_spmd.ShardingWarning, match="runs eagerly, because"):
            losses = [model.train_on_batch(X, Y) for _ in range(4)]
    expected = make(jit_compile=False)
    np.testing.assert_allclose(losses, [expected.train_on_batch(X, Y) for _ in range(4)], 1e-5)


@on_ranks(1, 2)
def test_a_variable_that_nobody_declared_is_not_frozen():
    os.environ["KERAS_SPMD_COMPILER"] = "none"
    with distribution.DataParallel().scope():
        outside = keras.Variable(1.0, name="outside", trainable=False)

        class Reading(layers.Layer):
            def call(self, x):
                return x * outside.value

        model = make(Reading(), optimizer=keras.optimizers.SGD(0.0))
        losses = []
        for value in (1.0, 5.0, 1.0):
            outside.assign(value)
            losses.append(model.train_on_batch(X, Y))
        assert len(graphs(model)) == 1
        assert losses[0] == losses[2] != losses[1]


@on_ranks(1, 2)
def test_an_optimizer_that_is_built_by_the_first_step():
    os.environ["KERAS_SPMD_COMPILER"] = "none"

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(4)
            self.own = keras.optimizers.Adam(0.01)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x))
            loss.backward()
            with torch.no_grad():
                self.own.apply(
                    [v.value.grad for v in self.trainable_weights], self.trainable_weights
                )
            return {"loss": loss}

    def run(jit_compile):
        keras.utils.set_random_seed(3)
        model = Own()
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(True), jit_compile=jit_compile
        )
        model.fit(X, Y, batch_size=11, epochs=4, verbose=0)
        return [whole(v) for v in [*model.variables, *model.own.variables]], model

    expected, _ = run(False)
    assert np.any(expected[-1]), "it has moments"
    with distribution.DataParallel().scope():
        got, model = run(True)
        assert len(graphs(model)) == 1
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-6)


@on_ranks(2, timeout=300, exhaustive=(1,))
def test_compiled_with_inductor():
    """What a user gets: a model with batch norm, dropout and two kinds of batches."""

    def run():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(4),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(0.01, clipnorm=1.0), loss, metrics=["accuracy"])
        history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0).history
        return history, model.predict(X, batch_size=11, verbose=0)

    with model_parallel({".*kernel": (None, "model")}, grid()).scope():
        expected = run()
        with captured(compiler="inductor"):
            got = run()
    for key, values in expected[0].items():
        np.testing.assert_allclose(got[0][key], values, 1e-5, 1e-6)
    np.testing.assert_allclose(got[1], expected[1], 1e-5, 1e-6)
