"""One compiled step against hand-written torch with torch.compile, on one GPU, in one run.

python benchmarks/gpu_graph.py [small|mini] [ours] [hand] [eager] ...
"""

import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
from gpt import MINI, SMALL, keras_model, torch_model

import keras_spmd  # noqa: F401


def hand_written_step(size: dict, mode: str | None):
    model = torch_model(size).cuda()
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

    def step(x, y):
        return function([(x, y)])["loss"]

    step.function = function
    return step


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
    first_peak = torch.cuda.max_memory_allocated() / 2**30
    for _ in range(8):
        loss = step(x, y)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            loss = step(x, y)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps)
    for entry in getattr(getattr(step, "function", None), "entries", {}).values():
        print(f"  {entry.seconds}")
    tokens = size["batch"] * size["length"]
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{label}: {min(times) * 1e3:.2f} ms/step, {tokens / min(times):,.0f} tokens/s, peak "
        f"{peak:.2f} GiB ({first_peak:.2f} in the first step, which takes {first:.1f} s), reserved "
        f"{torch.cuda.memory_reserved() / 2**30:.2f} GiB, loss "
        f"{float(loss):.4f}",
        flush=True,
    )


def main() -> None:
    wanted = sys.argv[1:] or ["small", "hand", "ours"]
    size = MINI if "mini" in wanted else SMALL
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
