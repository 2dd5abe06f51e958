"""Data and model parallelism together: a small causal transformer on a mesh of two axes.

    python examples/hybrid_transformer.py
    torchrun --nproc-per-node 4 examples/hybrid_transformer.py

Four devices form a mesh of 2 x 2. Each batch is divided over its axis "batch"; the vocabulary, the
attention heads and the hidden units over its axis "model".
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import keras_spmd

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 16, 12, 32, 4, 1


def make_tokens(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences that count up in steps of 1 to 3, and each token's successor."""
    rng = np.random.default_rng(seed)
    start, step = rng.integers(0, VOCABULARY, (count, 1)), rng.integers(1, 4, (count, 1))
    tokens = (start + step * np.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


class Positions(keras.layers.Layer):
    """Adds a vector that is learned for each position."""

    def build(self, shape: tuple) -> None:
        self.vectors = self.add_weight(shape=shape[1:], initializer="random_normal", name="vectors")

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return x + self.vectors


def make_model() -> keras.Model:
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="tokens")(tokens)
    x = Positions(name="positions")(x)
    for i in range(BLOCKS):
        y = layers.LayerNormalization(name=f"norm_{i}a")(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{i}")
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"norm_{i}b")(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=f"up_{i}")(y)
        x = x + layers.Dropout(0.1)(layers.Dense(WIDTH, name=f"down_{i}")(y))
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="logits")(x), name="transformer")


def make_distribution() -> keras.distribution.ModelParallel:
    devices = keras.distribution.list_devices()
    by_model = 2 if len(devices) % 2 == 0 else 1
    mesh = keras.distribution.DeviceMesh(
        (len(devices) // by_model, by_model), ("batch", "model"), devices
    )
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["tokens/embeddings"] = ("model", None)
    # Kernels of the projections are (width, heads, head width), and the other way round at the end.
    layouts["attention_./(query|key|value)/kernel"] = (None, "model", None)
    layouts["attention_./(query|key|value)/bias"] = ("model", None)
    layouts["attention_./attention_output/kernel"] = ("model", None, None)
    layouts["(up_.|logits)/kernel"] = (None, "model")
    layouts["(up_.|logits)/bias"] = ("model",)
    layouts["down_./kernel"] = ("model", None)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def main() -> None:
    keras.utils.set_random_seed(0)
    distribution = make_distribution()
    keras.distribution.set_distribution(distribution)

    model = make_model()
    model.compile(
        optimizer=keras.optimizers.AdamW(0.02, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(*make_tokens(480, seed=1), batch_size=96, epochs=6, verbose=2)

    tokens, successors = make_tokens(96, seed=2)
    loss, _ = model.evaluate(tokens, successors, batch_size=96, verbose=0)
    last = model.predict(tokens, batch_size=96, verbose=0)[:, -1].argmax(axis=-1)
    assert (last == successors[:, -1]).mean() > 0.9

    if keras_spmd.distribution_lib.process_id() == 0:
        print(f"mesh: {dict(zip(('batch', 'model'), distribution.device_mesh.shape, strict=True))}")
        for sequence, token in zip(tokens[:3], last[:3], strict=True):
            print(f"  {' '.join(map(str, sequence))} -> {token}")
        print(f"final loss: {loss:.7f}")


if __name__ == "__main__":
    main()
