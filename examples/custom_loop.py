"""A training loop of your own: torch's backward pass, a Keras optimizer, Keras metrics.

    python examples/custom_loop.py
    torchrun --nproc-per-node 2 examples/custom_loop.py

`fit` divides each batch by itself; in a loop of your own, `keras_spmd.distribute_batch` does it.
The rest is what it would be on one device: the loss is the mean over the whole batch, and gradients
are summed over the devices when the optimizer takes them.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

from collections.abc import Iterator

import keras
import numpy as np
import torch

import keras_spmd


def make_data(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points in the plane, on two interleaved spirals."""
    rng = np.random.default_rng(seed)
    spiral = rng.integers(0, 2, count)
    turn = rng.uniform(0.2, 1.0, count)
    angle = np.pi * (1.5 * turn + spiral)
    points = turn[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points += rng.normal(0.0, 0.05, points.shape)
    return points.astype("float32"), spiral[:, None].astype("float32")


def batches(x: np.ndarray, y: np.ndarray, size: int, seed: int) -> Iterator[tuple]:
    """Whole batches, in an order that depends on nothing but the seed."""
    order = np.random.default_rng(seed).permutation(len(x))
    for start in range(0, len(x), size):
        rows = order[start : start + size]
        yield x[rows], y[rows]


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )


def main() -> None:
    keras.utils.set_random_seed(0)
    keras.distribution.set_distribution(keras.distribution.DataParallel())

    model = make_model()
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.02)
    mean_loss = keras.metrics.Mean()
    accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)

    x_train, y_train = make_data(600, seed=1)
    for epoch in range(4):
        mean_loss.reset_state()
        accuracy.reset_state()
        for batch in batches(x_train, y_train, size=128, seed=epoch):
            x, y = keras_spmd.distribute_batch(batch)
            logits = model(x, training=True)
            loss = loss_fn(y, logits)

            model.zero_grad()
            loss.backward()
            variables = model.trainable_variables
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in variables], variables)
                mean_loss.update_state(loss, sample_weight=len(x))
                accuracy.update_state(y, logits)

        # A result is a number of the whole batch. Read it on every device, then print it on one.
        line = f"epoch {epoch + 1}: loss {mean_loss.result():.4f}, accuracy {accuracy.result():.4f}"
        if keras_spmd.distribution_lib.process_id() == 0:
            print(line)

    x, y = keras_spmd.distribute_batch(make_data(300, seed=2))
    with torch.no_grad():
        loss = float(loss_fn(y, model(x)))
    assert loss < 0.2
    if keras_spmd.distribution_lib.process_id() == 0:
        print(f"final loss: {loss:.7f}")


if __name__ == "__main__":
    main()
