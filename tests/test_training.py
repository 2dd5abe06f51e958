"""fit, evaluate and predict on any mesh: histories, weights and predictions of one device."""

import warnings

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers, optimizers
from torch.distributed.tensor.debug import CommDebugMode

import keras_spmd
from bench import on_ranks
from keras_spmd.distribution_lib import num_processes
from meshes import grid, model_parallel, placements

X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 22)


def mlp():
    """Without random layers, whose numbers have no reference without a distribution."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", name="up"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(8, activation="relu", name="down"),
            layers.Dense(4, name="logits"),
        ]
    )


def distributions():
    yield "data parallel", distribution.DataParallel()
    columns = {".*(up|down|logits)/kernel": (None, "model"), ".*(up|down)/bias": ("model",)}
    yield "columns", model_parallel(columns)
    yield "rows", model_parallel({".*(up|down|logits)/kernel": ("model", None)})
    yield "both axes", model_parallel({".*(up|down|logits)/kernel": ("model", "batch")})


def run(make_optimizer, *, x=X, y=Y, batch_size=8, epochs=2, **kwargs):
    """History, evaluation, predictions and final weights."""
    keras.utils.set_random_seed(3)
    model = mlp()
    model.compile(
        optimizer=make_optimizer(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
    )
    history = model.fit(
        x, y, batch_size=batch_size, epochs=epochs, verbose=0, validation_split=0.2, **kwargs
    )
    scores = model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    predictions = model.predict(x, batch_size=5, verbose=0)
    weights = [v.numpy() for v in model.variables]
    return history.history, scores, predictions, weights, model


def assert_equal_runs(got, expected, label, rtol=1e-5, atol=2e-6):
    for name in expected[0]:
        np.testing.assert_allclose(got[0][name], expected[0][name], rtol, atol, err_msg=label)
        assert all(type(value) is float for value in got[0][name])
    for name, want in expected[1].items():
        np.testing.assert_allclose(got[1][name], want, rtol, atol, err_msg=label)
        assert type(got[1][name]) is float
    assert isinstance(got[2], np.ndarray)
    np.testing.assert_allclose(got[2], expected[2], 1e-4, 1e-5, err_msg=label)
    for a, b in zip(got[3], expected[3], strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=label)


# Every optimizer by itself is in test_optimizers.py; here are the ways through `fit`.
OPTIMIZERS = {
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda: optimizers.AdamW(0.01, clipnorm=0.5),
    "global clip": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "lamb": lambda: optimizers.Lamb(0.01),
    "ema": lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "schedule": lambda: optimizers.SGD(optimizers.schedules.CosineDecay(0.1, 10)),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
}


@on_ranks(2, exhaustive=(1, 4), timeout=300)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizers(name):
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    expected = run(OPTIMIZERS[name])
    for label, dist in distributions():
        with dist.scope():
            assert_equal_runs(run(OPTIMIZERS[name]), expected, f"{name} {label}")


@on_ranks(2, exhaustive=(1, 4))
def test_loaders():
    """Every loader gives global batches; each rank computes its rows of them."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)

    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8]

    def batches():
        while True:
            for i in range(3):
                yield X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8]

    def fit(make_data):
        keras.utils.set_random_seed(3)
        model = mlp()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        data, options = make_data()
        history = model.fit(data, epochs=2, verbose=0, **options)
        return history.history["loss"], [v.numpy() for v in model.variables]

    tensors = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loaders = [
        lambda: (
            torch.utils.data.DataLoader(tensors, batch_size=8, shuffle=True),
            {"shuffle": False},
        ),
        lambda: (Sequence(), {}),
        lambda: (batches(), {"steps_per_epoch": 3, "shuffle": False}),
    ]
    for make_data in loaders:
        expected = fit(make_data)
        for label, dist in distributions():
            with dist.scope():
                got = fit(make_data)
            np.testing.assert_allclose(got[0], expected[0], 1e-5, err_msg=label)
            for a, b in zip(got[1], expected[1], strict=True):
                np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=label)


@on_ranks(2, exhaustive=(4,))
def test_weights_and_batches_of_any_size():
    """Partial batches, batches smaller than the mesh, one row: no dropped and no repeated rows."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    weights = np.linspace(0.1, 2, 22).astype("float32")
    for rows, batch_size in ((22, 8), (3, 2), (1, 4), (5, 5)):
        options = {"x": X[:rows], "y": Y[:rows], "batch_size": batch_size, "epochs": 1}
        keras.utils.set_random_seed(3)

        def fit(options=options, rows=rows):
            keras.utils.set_random_seed(3)
            model = mlp()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizers.SGD(0.1), loss, weighted_metrics=["accuracy"])
            history = model.fit(**options, sample_weight=weights[:rows], verbose=0)
            return [*history.history.values()], model.predict(X[:rows], batch_size=2, verbose=0)

        expected = fit()
        for label, dist in distributions():
            with dist.scope():
                got = fit()
            np.testing.assert_allclose(got[0], expected[0], 1e-5, 1e-6, err_msg=label)
            assert got[1].shape == expected[1].shape
            np.testing.assert_allclose(got[1], expected[1], 1e-4, 1e-5, err_msg=label)


@on_ranks(2, 4)
def test_a_custom_train_step_and_a_custom_loop():
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two = layers.Dense(8, activation="tanh", name="up"), layers.Dense(4)

        def call(self, x):
            return self.two(self.one(x))

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss.backward()
            gradients = [v.value.grad for v in self.trainable_weights]
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)
            return {"loss": loss}

    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def with_fit():
        keras.utils.set_random_seed(3)
        model = Model()
        model.compile(optimizers.Adam(0.01), loss_fn)
        history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        return history.history["loss"], [v.numpy() for v in model.variables]

    def with_a_loop():
        keras.utils.set_random_seed(3)
        model, optimizer, losses = Model(), optimizers.Adam(0.01), []
        for i in range(3):
            x, y = keras_spmd.distribute_batch((X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8]))
            model.zero_grad()
            loss = loss_fn(y, model(x, training=True))
            loss.backward()
            weights = model.trainable_weights
            optimizer.apply([v.value.grad for v in weights], weights)
            losses.append(float(loss.detach()))
        return losses, [v.numpy() for v in model.variables]

    for train in (with_fit, with_a_loop):
        expected = train()
        for label, dist in distributions():
            with dist.scope():
                got = train()
            np.testing.assert_allclose(got[0], expected[0], 1e-5, err_msg=label)
            for a, b in zip(got[1], expected[1], strict=True):
                np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=label)


@on_ranks(2, 4)
def test_gradients_of_a_data_parallel_step_are_reduced_in_one_bucket():
    with distribution.DataParallel().scope():
        model = keras.Sequential([keras.Input((6,)), *[layers.Dense(6) for _ in range(5)]])
        optimizer = optimizers.Adam()
        optimizer.build(model.trainable_variables)
        x = keras_spmd.distribute_batch(X[:20])
        model(x).square().sum().backward()
        gradients = [v.value.grad for v in model.trainable_variables]
        with CommDebugMode() as communication:
            optimizer.apply(gradients, model.trainable_variables)
        assert communication.get_total_counts() == 1
        with CommDebugMode() as communication:
            optimizer.apply(gradients, model.trainable_variables)
        assert communication.get_total_counts() == 1


@on_ranks(2, 4)
def test_optimizer_state_is_sharded_like_the_weights():
    with model_parallel({".*kernel": ("batch", "model")}, grid()).scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(16, use_bias=False)])
        model.compile(optimizers.Adam(), "mse")
        model.fit(np.ones((8, 8)), np.ones((8, 16)), verbose=0)
        (kernel,) = model.trainable_variables
        slots = [v for v in model.optimizer.variables if v.shape == (8, 16)]
        assert len(slots) == 2
        for slot in slots:
            assert placements(slot) == placements(kernel)
            local = keras_spmd.get_dtensor_local(slot.value)
            assert local.nbytes * num_processes() == 8 * 16 * 4


@on_ranks(2)
def test_already_sharded_data():
    """With auto_shard_dataset=False a rank passes its own rows."""
    from keras_spmd.distribution_lib import process_id

    expected = None
    for auto in (True, False):
        dist = distribution.DataParallel(auto_shard_dataset=auto)
        with dist.scope():
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizers.SGD(0.1), loss)
            half = slice(10 * process_id(), 10 * process_id() + 10)
            rows = slice(0, 20) if auto else half
            history = model.fit(
                X[rows], Y[rows], batch_size=20 if auto else 10, epochs=2, verbose=0, shuffle=False
            )
            if auto:
                expected = history.history["loss"]
            else:
                np.testing.assert_allclose(history.history["loss"], expected, 1e-5)


@on_ranks(2)
def test_messages_appear_once():
    import contextlib
    import io

    from keras_spmd.distribution_lib import process_id

    with distribution.DataParallel().scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            model.fit(X, Y, verbose=1)
    assert ("loss" in said.getvalue()) == (process_id() == 0)


@on_ranks(2)
def test_a_model_from_another_mesh_is_refused():
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    with distribution.DataParallel().scope():
        model = mlp()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(X, Y, batch_size=8, verbose=0)
    with model_parallel({".*kernel": (None, "model")}).scope():
        with pytest.raises(ValueError, match=r"up/kernel.*was made.*Make the model under this"):
            model.fit(X, Y, batch_size=8, verbose=0)
        again = mlp()
        again.set_weights(model.get_weights())
        again.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        again.fit(X, Y, batch_size=8, verbose=0)


@on_ranks(1, 2, 4)
def test_a_model_that_was_made_before_the_distribution():
    """It works, replicated, and the user is told once for each layer."""

    def fit(model):
        model.compile(optimizers.Adam(0.01), "sparse_categorical_crossentropy")
        return model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]

    def make():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((6,)), layers.Dense(4, activation="softmax")])

    expected = fit(make())
    model = make()
    with distribution.DataParallel().scope(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", keras_spmd.ShardingWarning)
        got = fit(model)
    np.testing.assert_allclose(got, expected, 1e-5)
    before = [w for w in told if "made before the distribution" in str(w.message)]
    assert len(before) == (num_processes() > 1)


@on_ranks(2)
def test_a_batch_from_another_mesh_is_refused():
    with distribution.DataParallel().scope():
        batch = keras_spmd.distribute_batch(X)
    with (
        model_parallel({".*kernel": (None, "model")}).scope(),
        pytest.raises(ValueError, match=r"holds a DTensor.*active distribution"),
    ):
        keras_spmd.distribute_batch(batch)


@on_ranks(2, timeout=180)
def test_long_runs_keep_memory_flat():
    """500 steps: no growth in live tensors, nor in DTensor's cache of sharding decisions."""
    import gc

    cache_size = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", lambda: [0])

    def live():
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return len(tensors), cache_size()[-1]

    rates = optimizers.schedules.CosineDecay(0.01, 1000)
    with distribution.DataParallel().scope():
        model = mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers.AdamW(rates, clipnorm=1.0), loss, metrics=["accuracy"])
        sizes = []
        for _ in range(5):
            model.fit(X[:20], Y[:20], batch_size=2, epochs=10, verbose=0)
            sizes.append(live())
    assert int(model.optimizer.iterations) == 500
    assert sizes[1:] == sizes[1:2] * 4


@on_ranks(2, 4)
def test_training_outside_of_the_scope():
    """A sharded model is trained with whole batches on every rank: slower, and right."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)

    def fit(model):
        model.compile(optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(True))
        history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]
        return history, model.predict(X, verbose=0)

    def make():
        keras.utils.set_random_seed(3)
        return mlp()

    expected = fit(make())
    for label, dist in distributions():
        with dist.scope():
            model = make()
        got = fit(model)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=label)
