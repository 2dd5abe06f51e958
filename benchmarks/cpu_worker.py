"""One contestant of cpu.py: builds its model, then runs steps when it is told to.

It reads a number of steps from stdin for each round, and answers with seconds a step.
"""

import os
import sys
import time
from typing import Any

import numpy as np

NAME = sys.argv[1]
if "jax" in NAME:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import keras  # noqa: E402
from gpt import CPU, TENSOR_PARALLEL, keras_model, torch_model  # noqa: E402

RNG = np.random.default_rng(0)


def batch_of(size: dict) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.integers(0, size["words"], (size["batch"], size["length"])).astype("int32")
    return x, np.roll(x, -1, 1)


def distribute(kind: str) -> None:
    if kind == "none":
        return
    distribution = keras.distribution
    devices = distribution.list_devices()
    if kind == "data":
        mesh = distribution.DeviceMesh((len(devices),), ("batch",), devices)
        distribution.set_distribution(distribution.DataParallel(mesh))
    if kind == "tensor":
        mesh = distribution.DeviceMesh((1, len(devices)), ("batch", "model"), devices)
        layouts = distribution.LayoutMap(mesh)
        for path, axes in TENSOR_PARALLEL.items():
            layouts[path] = axes
        distribution.set_distribution(
            distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
        )


def keras_gpt(kind: str, **options: Any):
    """The model, its data and a function that trains it for some steps by `fit`."""
    distribute(kind)
    keras.utils.set_random_seed(0)
    return keras_model(CPU, **options), batch_of(CPU)


def keras_mlp(**options: Any):
    keras.utils.set_random_seed(0)
    inner = [keras.layers.Dense(64, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *inner, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, **options)
    return model, (RNG.normal(size=(32, 64)).astype("float32"), RNG.integers(0, 10, 32))


def by_fit(model: keras.Model, batch: tuple):
    """`fit` with its loop, its data and its logs, as a user runs it."""
    rows = len(batch[0])

    def run(steps: int) -> float:
        x, y = (np.concatenate([a] * steps) for a in batch)
        history = model.fit(x, y, batch_size=rows, epochs=1, verbose=0)
        return history.history["loss"][-1]

    return run


def by_hand(kind: str):
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch_model(CPU)
    x, y = (torch.from_numpy(a).long() for a in batch_of(CPU))
    context = loss_parallel if kind == "tensor" else torch.enable_grad
    if kind == "data":
        model = torch.nn.parallel.DistributedDataParallel(model)
        x, y = (t.chunk(2)[dist.get_rank()] for t in (x, y))
    else:
        mesh = dist.init_device_mesh("cpu", (2,))
        for block in model.blocks:
            parallelize_module(
                block,
                mesh,
                {
                    "qkv": ColwiseParallel(),
                    "out": RowwiseParallel(),
                    "up": ColwiseParallel(),
                    "down": RowwiseParallel(),
                },
            )
        plan = ColwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
        )
        parallelize_module(model, mesh, {"logits": plan})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def run(steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad()
            with context():
                loss = model(x, y)
                loss.backward()
            optimizer.step()
        return float(loss)

    return run


CONTESTANTS = {
    "ours, data parallel": lambda: by_fit(*keras_gpt("data", jit_compile=True)),
    "ours, tensor parallel": lambda: by_fit(*keras_gpt("tensor", jit_compile=True)),
    "ours, one device": lambda: by_fit(*keras_gpt("none", jit_compile=True)),
    "ours, mesh of one": lambda: by_fit(*keras_gpt("data", jit_compile=True)),
    "ours, small MLP": lambda: by_fit(*keras_mlp(jit_compile=True)),
    "DDP by hand": lambda: by_hand("data"),
    "parallelize_module by hand": lambda: by_hand("tensor"),
    "Keras on jax, data parallel": lambda: by_fit(*keras_gpt("data")),
    "Keras on jax, tensor parallel": lambda: by_fit(*keras_gpt("tensor")),
    "Keras eager": lambda: by_fit(*keras_gpt("none")),
    "Keras eager, small MLP": lambda: by_fit(*keras_mlp()),
}


def main() -> None:
    if "jax" not in NAME:
        import torch

        torch.set_num_threads(1)
    if NAME.startswith("ours"):
        import keras_spmd  # noqa: F401
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    run = CONTESTANTS[NAME]()
    start = time.perf_counter()
    run(1)
    print(time.perf_counter() - start, file=answers, flush=True)
    run(3)
    for line in sys.stdin:
        steps = int(line)
        start = time.perf_counter()
        loss = run(steps)
        print((time.perf_counter() - start) / steps, loss, file=answers, flush=True)


if __name__ == "__main__":
    main()
