"""One compiled step against hand-written torch with torch.compile, on one GPU, in one run.

python benchmarks/gpu_graph.py [small|mini] [ours] [hand] [eager] ...
"""

import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
import torch.nn.functional as F
from keras import layers

import keras_spmd  # noqa: F401

SIZES = {
    "small": {"blocks": 12, "width": 768, "heads": 12, "length": 1024, "batch": 8, "words": 50304},
    "mini": {"blocks": 4, "width": 128, "heads": 4, "length": 64, "batch": 8, "words": 512},
}


class Positions(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="normal", name="table")

    def call(self, x):
        return x + self.table


def keras_model(size: dict, **options) -> keras.Model:
    tokens = keras.Input((size["length"],), dtype="int32")
    x = Positions()(layers.Embedding(size["words"], size["width"])(tokens))
    for _ in range(size["blocks"]):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(size["heads"], size["width"] // size["heads"])
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * size["width"], activation=keras.activations.gelu)(y)
        x = x + layers.Dense(size["width"])(y)
    x = layers.LayerNormalization()(x)
    model = keras.Model(tokens, layers.Dense(size["words"], use_bias=False)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4), loss, **options)
    return model


class Block(torch.nn.Module):
    def __init__(self, size: dict) -> None:
        super().__init__()
        width = size["width"]
        self.heads = size["heads"]
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class HandWritten(torch.nn.Module):
    def __init__(self, size: dict) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(size["words"], size["width"])
        self.positions = torch.nn.Parameter(torch.randn(size["length"], size["width"]) * 0.05)
        self.blocks = torch.nn.Sequential(*[Block(size) for _ in range(size["blocks"])])
        self.norm = torch.nn.LayerNorm(size["width"])
        self.logits = torch.nn.Linear(size["width"], size["words"], bias=False)

    def forward(self, tokens, targets):
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions))
        return F.cross_entropy(self.logits(x).flatten(0, 1).float(), targets.flatten())


def hand_written_step(size: dict, mode: str | None):
    model = HandWritten(size).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    compiled = torch.compile(model, mode=mode)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def keras_step(size: dict, *, mesh: bool, **options):
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(keras.distribution.DeviceMesh((1,), ("batch",)))
        if mesh
        else None
    )
    model = keras_model(size, **options)
    x = torch.zeros(size["batch"], size["length"], dtype=torch.int32, device="cuda")
    model._symbolic_build(data_batch=(x, x))
    function = model.make_train_function()
    model.train()
    return lambda x, y: function([(x, y)])["loss"]


def measure(label: str, make, size: dict, steps: int = 30) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    shape = (size["batch"], size["length"])
    x = torch.randint(0, size["words"], shape, device="cuda")
    y = torch.roll(x, -1, 1)
    step = make()
    start = time.perf_counter()
    step(x, y)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(5):
        loss = step(x, y)
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            loss = step(x, y)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps)
    tokens = size["batch"] * size["length"]
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{label}: {min(times) * 1e3:.2f} ms/step, {tokens / min(times):,.0f} tokens/s, peak "
        f"{peak:.2f} GiB, first step {first:.1f} s, loss {float(loss):.4f}",
        flush=True,
    )


def main() -> None:
    wanted = sys.argv[1:] or ["small", "hand", "ours"]
    size = SIZES["mini" if "mini" in wanted else "small"]
    print(f"torch {torch.__version__}, keras {keras.__version__}, {torch.cuda.get_device_name()}")
    torch.set_float32_matmul_precision("high")
    keras.config.set_dtype_policy("mixed_bfloat16")
    if "hand" in wanted:
        measure("hand-written, torch.compile", lambda: hand_written_step(size, None), size)
        torch._dynamo.reset()
    if "graphs" in wanted:
        make = lambda: hand_written_step(size, "reduce-overhead")  # noqa: E731
        measure("hand-written, reduce-overhead", make, size)
        torch._dynamo.reset()
    if "ours" in wanted:
        measure("ours", lambda: keras_step(size, mesh=False, jit_compile=True), size)
    if "mesh" in wanted:
        measure("ours, a mesh of one", lambda: keras_step(size, mesh=True, jit_compile=True), size)
    if "eager" in wanted:
        measure("Keras, eager", lambda: keras_step(size, mesh=False), size, steps=10)


if __name__ == "__main__":
    main()
