"""One model trained on two devices and on one: equal histories, and where the shards live.

    make demo

Each batch is divided between the two devices, and so is the largest kernel. Batch norm sees the
whole batch and dropout draws the same numbers on any mesh, so both learn the same.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import json
import subprocess
import sys

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import keras_spmd

COLUMNS = ("loss", "accuracy", "val_loss")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def make_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy waves of 16 x 16 pixels, and in which of four directions each one runs."""
    rng = np.random.default_rng(seed)
    row, column = np.mgrid[0:16, 0:16]
    waves = np.sin(np.stack([row, column, row + column, row - column]))
    labels = rng.integers(0, 4, count)
    images = waves[labels] + rng.normal(0.0, 1.0, (count, 16, 16))
    return images[..., None].astype("float32"), labels


def make_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            layers.Conv2D(8, 3, padding="same", use_bias=False, name="conv"),
            layers.BatchNormalization(momentum=0.9, name="norm"),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(32, activation="relu", name="hidden"),
            layers.Dropout(0.3),
            layers.Dense(4, name="logits"),
        ],
        name="cnn",
    )


def set_distribution() -> None:
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((len(devices),), ("batch",), devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["cnn/hidden/kernel"] = ("batch", None)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )


def train() -> tuple[keras.Model, dict[str, list[float]]]:
    keras.utils.set_random_seed(7)
    model = make_model()
    model.compile(
        optimizer=keras.optimizers.Adam(0.003),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    validation = make_images(100, seed=2)
    history = model.fit(
        *make_images(300, seed=1), batch_size=64, epochs=5, validation_data=validation, verbose=0
    )
    return model, history.history


def train_on_one_device() -> dict[str, list[float]]:
    """The history of this very script, started as one process."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    command = [sys.executable, __file__, "--one-device"]
    return json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)


def shard_table(model: keras.Model) -> Table:
    table = Table("variable", "shape", "each device holds", title="Where the shards live")
    for v in model.trainable_variables:
        local = keras_spmd.get_dtensor_local(v.value)
        shapes = ["x".join(map(str, shape)) for shape in (v.shape, local.shape)]
        style = None if shapes[0] == shapes[1] else "cyan"
        table.add_row(v.path, *shapes, style=style)
    return table


def history_table(histories: dict[str, dict[str, list[float]]]) -> Table:
    table = Table("epoch", title="The same training, twice")
    for column in COLUMNS:
        for name in histories:
            table.add_column(f"{column}\n{name}", justify="right")
    for epoch in range(len(next(iter(histories.values()))["loss"])):
        numbers = [f"{h[column][epoch]:.6f}" for column in COLUMNS for h in histories.values()]
        table.add_row(str(epoch + 1), *numbers)
    return table


def main() -> None:
    set_distribution()
    model, history = train()
    if "--one-device" in sys.argv:
        print(json.dumps(history))
    elif keras_spmd.distribution_lib.process_id() == 0:
        expected = train_on_one_device()
        count = len(keras.distribution.list_devices())
        console = Console(width=100)
        console.print(shard_table(model))
        console.print(history_table({f"mesh of {count}": history, "one device": expected}))
        pairs = [(history[name], expected[name]) for name in expected]
        difference = max(float(np.max(np.abs(np.divide(a, b) - 1))) for a, b in pairs)
        console.print(f"largest relative difference: {difference:.1e}")
        assert difference < 1e-4


if __name__ == "__main__":
    main()
