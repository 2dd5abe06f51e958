"""A model like Llama, of any size: RMS norms, grouped queries, rotated positions, gated MLPs."""

import keras
from keras import layers, ops

SIZE_70B = {"blocks": 80, "width": 8192, "heads": 64, "groups": 8, "inner": 28672, "words": 128256}
TINY = {"blocks": 8, "width": 64, "heads": 4, "groups": 2, "inner": 96, "words": 128}

# Columns, then rows, of each pair of products; all of it over the data axis too.
LAYOUTS = {
    ".*embedding/embeddings": ("model", "batch"),
    ".*(query|key|value)/kernel": ("batch", "model"),
    ".*out/kernel": ("model", "batch"),
    ".*(gate|up)/kernel": ("batch", "model"),
    ".*down/kernel": ("model", "batch"),
    ".*logits/kernel": ("batch", "model"),
}


def rotated(x):
    length, half = x.shape[1], x.shape[-1] // 2
    angles = ops.arange(length, dtype="float32")[:, None] / (
        10000.0 ** (ops.arange(half, dtype="float32") / half)
    )
    sin, cos = (ops.cast(f(angles)[None, :, None, :], x.dtype) for f in (ops.sin, ops.cos))
    first, second = x[..., :half], x[..., half:]
    return ops.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Block(layers.Layer):
    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.groups = size["heads"], size["groups"]
        self.head = size["width"] // self.heads
        options = {"use_bias": False}
        self.first = layers.RMSNormalization(name="first")
        self.second = layers.RMSNormalization(name="second")
        self.query = layers.Dense(size["width"], name="query", **options)
        self.key = layers.Dense(self.groups * self.head, name="key", **options)
        self.value = layers.Dense(self.groups * self.head, name="value", **options)
        self.out = layers.Dense(size["width"], name="out", **options)
        self.gate = layers.Dense(size["inner"], activation="silu", name="gate", **options)
        self.up = layers.Dense(size["inner"], name="up", **options)
        self.down = layers.Dense(size["width"], name="down", **options)

    def build(self, shape):
        for layer in (self.first, self.second, self.query, self.key, self.value, self.out):
            layer.build(shape)
        self.gate.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))

    def split(self, x, heads):
        return ops.reshape(x, (-1, x.shape[1], heads, self.head))

    def shared(self, x):
        """Each head of a group gets the group's keys or values."""
        repeats = self.heads // self.groups
        many = ops.tile(ops.expand_dims(x, 3), (1, 1, 1, repeats, 1))
        return ops.reshape(many, (-1, x.shape[1], self.heads, self.head))

    def call(self, x):
        y = self.first(x)
        q = rotated(self.split(self.query(y), self.heads))
        k = rotated(self.split(self.key(y), self.groups))
        v = self.split(self.value(y), self.groups)
        k, v = self.shared(k), self.shared(v)
        y = ops.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(ops.reshape(y, (-1, y.shape[1], self.heads * self.head)))
        y = self.second(x)
        return x + self.down(self.gate(y) * self.up(y))


def llama(size, length, dtype="bfloat16"):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        tokens = keras.Input((length,), dtype="int32")
        x = layers.Embedding(size["words"], size["width"], name="embedding")(tokens)
        for i in range(size["blocks"]):
            x = Block(size, name=f"block_{i}")(x)
        x = layers.RMSNormalization(name="last_norm")(x)
        x = layers.Dense(size["words"], use_bias=False, name="logits")(x)
        model = keras.Model(tokens, x)
    finally:
        keras.config.set_dtype_policy(before)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4), loss, jit_compile=True)
    return model
