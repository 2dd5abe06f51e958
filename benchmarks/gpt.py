"""A GPT in Keras and the same by hand in torch, for the benchmarks."""

from typing import Any

import keras
from keras import layers

SMALL = {"blocks": 12, "width": 768, "heads": 12, "length": 1024, "batch": 8, "words": 50304}
MINI = {"blocks": 4, "width": 128, "heads": 4, "length": 64, "batch": 8, "words": 512}
CPU = {"blocks": 4, "width": 256, "heads": 4, "length": 128, "batch": 16, "words": 4096}

# A column of heads or features on each rank, then a row: one sum for each pair, Megatron's way.
TENSOR_PARALLEL = {
    ".*attention.*(query|key|value)/kernel": (None, "model", None),
    ".*attention.*(query|key|value)/bias": ("model", None),
    ".*attention.*output/kernel": ("model", None, None),
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
    ".*logits/kernel": (None, "model"),
}


class Positions(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="normal", name="table")

    def call(self, x):
        return x + self.table


def keras_model(size: dict, **options: Any) -> keras.Model:
    width = size["width"]
    tokens = keras.Input((size["length"],), dtype="int32")
    x = Positions()(layers.Embedding(size["words"], width)(tokens))
    for i in range(size["blocks"]):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(
            size["heads"], width // size["heads"], name=f"block{i}_attention"
        )
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation=keras.activations.gelu, name=f"block{i}_up")(y)
        x = x + layers.Dense(width, name=f"block{i}_down")(y)
    x = layers.LayerNormalization()(x)
    x = layers.Dense(size["words"], use_bias=False, name="logits")(x)
    model = keras.Model(tokens, x)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4), loss, **options)
    return model


def torch_model(size: dict) -> Any:
    # Not at the top: the rival on JAX needs no torch.
    import torch
    import torch.nn.functional as F

    width, head = size["width"], size["width"] // size["heads"]

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.qkv = torch.nn.Linear(width, 3 * width)
            self.out = torch.nn.Linear(width, width)
            self.up = torch.nn.Linear(width, 4 * width)
            self.down = torch.nn.Linear(4 * width, width)

        def forward(self, x):
            # As many heads as this rank has.
            q, k, v = self.qkv(self.first(x)).unflatten(-1, (-1, 3, head)).unbind(3)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.second(x))))

    class GPT(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(size["words"], width)
            self.positions = torch.nn.Parameter(torch.randn(size["length"], width) * 0.05)
            self.blocks = torch.nn.Sequential(*[Block() for _ in range(size["blocks"])])
            self.norm = torch.nn.LayerNorm(width)
            self.logits = torch.nn.Linear(width, size["words"], bias=False)

        def forward(self, tokens, targets):
            x = self.norm(self.blocks(self.tokens(tokens) + self.positions))
            return F.cross_entropy(self.logits(x).flatten(0, 1).float(), targets.flatten())

    return GPT()
