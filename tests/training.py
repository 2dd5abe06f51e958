"""A small training with everything that a checkpoint has to keep, for tests of going on."""

import keras
import numpy as np
import torch
from keras import distribution, layers
from torch.utils.data import DataLoader, TensorDataset

from keras_spmd.distribution_lib import num_processes
from meshes import grid, line, model_parallel, whole

ROWS = 44


def make(jit_compile=False, rate=None):
    keras.utils.set_random_seed(7)
    inputs = keras.Input((6,), name="inputs")
    x = layers.Dense(9, activation="relu", name="dense")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.Dropout(0.25, name="dropout")(x)
    model = keras.Model(inputs, layers.Dense(5, name="last")(x), name="model")
    rate = rate or keras.optimizers.schedules.CosineDecay(0.02, 40)
    optimizer = keras.optimizers.AdamW(rate, name="adam")
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit_compile)
    return model


def arrays():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 6)).astype("float32"), rng.normal(size=(ROWS, 5)).astype("f")


class Dataset(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // 8)

    def __getitem__(self, i):
        x, y = arrays()
        return x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]


def batches():
    x, y = arrays()
    rng = np.random.default_rng(1)
    while True:
        rows = rng.permutation(ROWS)[:8]
        yield x[rows], y[rows]


def data(kind):
    """The arguments of `fit` for one kind of data."""
    x, y = arrays()
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": 8}
    if kind == "arrays in part":
        return {"x": x, "y": y, "batch_size": 8, "steps_per_epoch": 3}
    if kind == "dataset":
        return {"x": Dataset(), "shuffle": True}
    if kind == "generator":
        return {"x": batches(), "steps_per_epoch": 5, "shuffle": False}
    generator = torch.Generator().manual_seed(3) if kind == "loader of its own" else None
    rows = TensorDataset(torch.tensor(x), torch.tensor(y))
    return {"x": DataLoader(rows, 8, shuffle=True, generator=generator), "shuffle": False}


KINDS = [
    "arrays",
    "arrays in part",
    "dataset",
    "generator",
    "loader",
    "loader of its own",
]


class Crash(keras.callbacks.Callback):
    """Ends a training as if the process had died, when all callbacks have seen a batch."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1

    def on_train_batch_begin(self, batch, logs=None):
        if self.left <= 0:
            raise InterruptedError

    def on_test_begin(self, logs=None):
        self.on_train_batch_begin(0)


def patient():
    """Callbacks that compare epochs. With `RATE` they act, and stop the training early."""
    return [
        keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.05),
        keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
    ]


RATE = 0.3


def fit(callbacks=(), kind="arrays", epochs=None, jit_compile=False, rate=None):
    """A whole training; its history, and all variables."""
    epochs = epochs or (6 if kind == "arrays in part" else 3)
    model = make(jit_compile, rate)
    x, y = arrays()
    history = model.fit(
        **data(kind),
        epochs=epochs,
        validation_data=(x[:10], y[:10]),
        validation_batch_size=4,
        callbacks=list(callbacks),
        verbose=0,
    )
    return {"epoch": history.epoch, **history.history}, values(model)


def values(model):
    found = [*model.variables, *model.optimizer.variables]
    return [whole(v) for v in found]


def assert_equal(actual, expected):
    """Not only close: a training that goes on computes what it would have computed."""
    (history, variables), (expected_history, expected_variables) = actual, expected
    assert history == expected_history
    for a, b in zip(variables, expected_variables, strict=True):
        np.testing.assert_array_equal(a, b)


def of_ranks(kind):
    """A distribution over all ranks, by name."""
    if kind == "data":
        return distribution.DataParallel()
    if kind == "rows":
        return model_parallel({".*kernel": ("model", None), ".*bias": ("model",)}, line())
    if kind == "fsdp":
        mesh = distribution.DeviceMesh((num_processes(),), ("batch",))
        return model_parallel({".*kernel": ("batch",)}, mesh)
    return model_parallel({".*kernel": (None, "model")}, grid())
