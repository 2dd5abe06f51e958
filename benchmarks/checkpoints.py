"""For how long a checkpoint blocks the training: written at once, in a thread, and merely copied.

Two CPU ranks hold half of a model of 200 MB each. In each round all three are timed, so that what
the machine does at the time meets all of them; what counts is the ratio of the medians.

python benchmarks/checkpoints.py [rounds]
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

# Ours, the other one, and the ratio of times that ours must not exceed.
DUELS = [("asynchronous", "a copy", 1.1), ("asynchronous", "synchronous", 0.5)]


def seconds_of(function: Callable[[], object]) -> float:
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main(folder: str, rounds: int) -> None:
    import keras
    from keras import distribution, layers

    import keras_spmd
    from keras_spmd.checkpoints import _saving

    mesh = distribution.DeviceMesh((2,), ("batch",))
    keys = distribution.LayoutMap(mesh)
    keys[".*kernel"] = ("batch", None)
    parallel = distribution.ModelParallel(layout_map=keys, batch_dim_name="batch")
    keras.distribution.set_distribution(parallel)
    model = keras.Sequential([keras.Input((2048,)), *[layers.Dense(2048) for _ in range(12)]])
    held = [v._value.to_local() for v in model.variables]
    seconds: dict[str, list[float]] = {"a copy": [], "asynchronous": [], "synchronous": []}
    saving = {True: keras_spmd.ShardedCheckpoint(f"{folder}/0")}
    saving[False] = keras_spmd.ShardedCheckpoint(f"{folder}/1")
    for callback in saving.values():
        callback.set_model(model)
    for i in range(rounds + 1):
        times = {"a copy": seconds_of(lambda: [x.clone() for x in held])}
        for asynchronous, callback in saving.items():
            save = partial(callback._save, asynchronous=asynchronous)
            times["asynchronous" if asynchronous else "synchronous"] = seconds_of(save)
            _saving.finish()
        if i > 0:  # What is done for the first time takes longer.
            for name, value in times.items():
                seconds[name].append(value)
    if keras_spmd.distribution_lib.process_id() == 0:
        megabytes = sum(x.numel() * x.element_size() for x in held) / 1e6
        print(f"{megabytes:.0f} MB on each of 2 ranks, medians of {rounds} rounds")
        for name, values in seconds.items():
            print(f"  {name:<14}{1000 * statistics.median(values):9.1f} ms")
        for ours, other, limit in DUELS:
            ratio = statistics.median(seconds[ours]) / statistics.median(seconds[other])
            verdict = "" if ratio <= limit else f"  (more than {limit})"
            print(f"  {ours} / {other}: {ratio:.2f}{verdict}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        rounds = sys.argv[1] if len(sys.argv) > 1 else "7"
        # Beside the script: the folder for temporary files may be in memory.
        folder = tempfile.mkdtemp(dir=Path(__file__).parent)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, folder, rounds]
        try:
            subprocess.run(
                command,
                check=True,
                env={"KERAS_BACKEND": "torch", **os.environ, "OMP_NUM_THREADS": "1"},
            )
        finally:
            shutil.rmtree(folder)
