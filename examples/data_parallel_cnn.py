"""Data parallelism: a convolutional network with batch norm and dropout, on images made here.

    python examples/data_parallel_cnn.py
    torchrun --nproc-per-node 2 examples/data_parallel_cnn.py

Every device holds the whole model and computes its share of each batch. The batch size stays that
of the whole batch, batch norm sees all of it, and both commands print the same numbers.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import keras_spmd

CLASSES = ("rows", "columns", "diagonals", "squares")


def make_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy stripes of 16 x 16 pixels in four directions, and which direction each one has."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(CLASSES), count)
    row, column = np.mgrid[0:16, 0:16]
    waves = [np.sin(row), np.sin(column), np.sin(row + column), np.sin(row) * np.sin(column)]
    images = np.stack(waves)[labels] + rng.normal(0.0, 1.0, (count, 16, 16))
    return images[..., None].astype("float32"), labels


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            keras.layers.Conv2D(8, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Activation("silu"),
            keras.layers.Conv2D(16, 3, strides=2, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Activation("silu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(len(CLASSES)),
        ],
        name="cnn",
    )


def main() -> None:
    keras.utils.set_random_seed(0)

    # A mesh with one axis, over all devices of the job.
    keras.distribution.set_distribution(keras.distribution.DataParallel())

    model = make_model()
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    # Data is the same on every device, and 64 is the size of the whole batch. The last batch of an
    # epoch has 500 - 7 * 64 = 52 images, each of which counts once.
    images, labels = make_images(500, seed=1)
    model.fit(images, labels, batch_size=64, epochs=6, verbose=2)

    new_images, new_labels = make_images(200, seed=2)
    scores = model.evaluate(new_images, new_labels, batch_size=64, verbose=0, return_dict=True)
    guesses = model.predict(new_images, batch_size=64, verbose=0).argmax(axis=-1)
    assert np.isclose((guesses == new_labels).mean(), scores["accuracy"])
    assert scores["accuracy"] > 0.9

    if keras_spmd.distribution_lib.process_id() == 0:
        print(f"devices: {', '.join(keras.distribution.list_devices())}")
        for guess, label in zip(guesses[:4], new_labels[:4], strict=True):
            print(f"  looks like {CLASSES[guess]}, is {CLASSES[label]}")
        print(f"final loss: {scores['loss']:.7f}")


if __name__ == "__main__":
    main()
