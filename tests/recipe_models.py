"""Small models for the layout recipes, and batches for them."""

import keras
import numpy as np
from keras import layers

LENGTH, WORDS, BATCH = 16, 64, 8


def mlp():
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(64, activation="relu", name="up"),
            layers.Dropout(0.0),
            layers.Dense(16, name="down"),
            layers.LeakyReLU(),
            layers.Dense(4, name="last"),
        ],
        name="mlp",
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input((16, 16, 4)),
            layers.Conv2D(16, 3, padding="same", name="first"),
            layers.BatchNormalization(name="norm"),
            # Smooth, so that the last digit of a number never decides which way a gradient goes.
            layers.Activation("gelu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(8, 3, name="second"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, name="last"),
        ],
        name="cnn",
    )


def gpt(blocks=2, width=32, heads=4):
    """Like the one of the benchmarks."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, width, name="tokens")(tokens)
    for i in range(blocks):
        y = layers.LayerNormalization(name=f"first_norm_{i}")(x)
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"attention_{i}")
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"second_norm_{i}")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"up_{i}")(y)
        x = x + layers.Dense(width, name=f"down_{i}")(y)
    x = layers.LayerNormalization(name="last_norm")(x)
    return keras.Model(tokens, layers.Dense(WORDS, name="logits")(x), name="gpt")


def grouped():
    """Four query heads share two heads of keys and values."""
    x = keras.Input((LENGTH, 16))
    y = layers.GroupQueryAttention(8, 4, 2, name="attention")(x, x)
    return keras.Model(x, layers.Dense(4, name="last")(layers.LayerNormalization()(x + y)))


@keras.saving.register_keras_serializable("recipes")
class Attention(layers.Layer):
    """By hand: heads are made of features, and not a layer of Keras knows of them."""

    def __init__(self, heads, **kwargs):
        super().__init__(**kwargs)
        self.heads = heads

    def build(self, shape):
        width = shape[-1]
        self.parts = [layers.Dense(width, name=name) for name in ("query", "key", "value")]
        self.out = layers.Dense(width, name="out")
        for layer in (*self.parts, self.out):
            layer.build(shape)

    def call(self, x):
        batch, length, width = keras.ops.shape(x)
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (keras.ops.reshape(part(x), shape) for part in self.parts)
        scores = keras.ops.einsum("bqhd,bkhd->bhqk", q, k) / shape[-1] ** 0.5
        y = keras.ops.einsum("bhqk,bkhd->bqhd", keras.ops.softmax(scores), v)
        return self.out(keras.ops.reshape(y, (batch, length, width)))


class Subclassed(keras.Model):
    """A gated block behind attention by hand, the names of which say nothing."""

    def __init__(self):
        super().__init__(name="subclassed")
        self.a = Attention(4, name="a")
        self.b = layers.LayerNormalization(name="b")
        self.c, self.d = layers.Dense(64, name="c"), layers.Dense(64, name="d")
        self.e = layers.Dense(16, name="e")

    def call(self, x):
        x = self.b(x + self.a(x))
        return x + self.e(keras.ops.silu(self.c(x)) * self.d(x))


def subclassed():
    model = Subclassed()
    model(keras.Input((LENGTH, 16)))
    return model


MODELS = {f.__name__: f for f in (mlp, cnn, gpt, grouped, subclassed)}
# Of one row: what goes in, and what comes out.
_SHAPES = {
    "mlp": ((16,), (4,)),
    "cnn": ((16, 16, 4), (4,)),
    "gpt": ((LENGTH,), (LENGTH, WORDS)),
    "grouped": ((LENGTH, 16), (LENGTH, 4)),
    "subclassed": ((LENGTH, 16), (LENGTH, 16)),
}


def data_of(name):
    generator = np.random.default_rng(0)
    row_in, row_out = _SHAPES[name]
    if name == "gpt":
        x = generator.integers(0, WORDS, (BATCH, *row_in))
    else:
        x = generator.normal(size=(BATCH, *row_in)).astype("float32")
    return x, generator.normal(size=(BATCH, *row_out)).astype("float32")
