"""Training on one GPU: the numbers of the CPU, and copies to the device that overlap the steps.

python benchmarks/gpu_training.py
"""

import os
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from keras import layers
from torch.profiler import ProfilerActivity, profile

import keras_spmd  # noqa: F401
from keras_spmd._counter import Draws


def same_numbers_on_both_devices() -> None:
    for name, draw in {
        "bits": lambda d: d.bits(),
        "uniform": lambda d: d.uniform(torch.float32),
        "normal": lambda d: d.normal(torch.float32),
        "binomial": lambda d: d.binomial(
            torch.full((1000,), 40.0, dtype=torch.float64, device=d.device),
            torch.full((1000,), 0.3, dtype=torch.float64, device=d.device),
        ),
    }.items():
        cpu, gpu = [draw(Draws(torch.tensor([3, 4], device=d), (1000,))) for d in ("cpu", "cuda")]
        difference = float((cpu.double() - gpu.cpu().double()).abs().max())
        print(f"{name}: largest difference between CPU and GPU {difference:.1e}")
        assert difference < 1e-5


def make_model(width: int = 32) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((64, 64, 3)),
            layers.Conv2D(width, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.SpatialDropout2D(0.1),
            layers.Conv2D(width, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    return model


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 64, 64, 3)).astype("float32"), rng.integers(0, 10, rows)


def mesh_of_one() -> keras.distribution.DataParallel:
    return keras.distribution.DataParallel(keras.distribution.DeviceMesh((1,), ("batch",)))


def same_history_as_on_the_cpu() -> None:
    x, y = data(96)
    # Keras draws other initial values on a GPU than on a CPU.
    weights = make_model().get_weights()
    histories = []
    for device in ("gpu", "cpu"):
        with keras.device(device), mesh_of_one().scope():
            model = make_model()
            model.set_weights(weights)
            fitted = model.fit(x, y, batch_size=40, epochs=3, verbose=0)
            histories.append(fitted.history["loss"])
    print("history on GPU and CPU:", *histories)
    np.testing.assert_allclose(*histories, rtol=1e-4)


def overlap() -> None:
    """How much of the time of the copies has a kernel running beside it."""
    x, y = data(4096)
    with mesh_of_one().scope():
        model = make_model(256)
        model.fit(x[:1024], y[:1024], batch_size=512, verbose=0)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            model.fit(x, y, batch_size=512, verbose=0)
    copies, kernels = [], []
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            is_copy = "Memcpy HtoD" in event.name
            if is_copy and event.time_range.elapsed_us() > 50:
                copies.append((*span, event.name))
            elif not event.name.startswith("Mem"):
                kernels.append(span)
    covered = sum(max(0.0, min(e, ke) - max(s, ks)) for s, e, _ in copies for ks, ke in kernels)
    total = sum(e - s for s, e, _ in copies)
    pinned = sum("Pinned" in name for _, _, name in copies)
    print(f"{len(copies)} large copies, {pinned} from pinned memory, {total / 1e3:.1f} ms in all, ")
    print(f"of which kernels run beside {covered / total:.0%}")


def speed() -> None:
    """Seconds for one epoch, with a distribution and without."""
    x, y = data(4096)
    for label, scope in (("plain Keras", None), ("mesh of one", mesh_of_one())):
        if scope:
            keras.distribution.set_distribution(scope)
        model = make_model(256)
        model.fit(x[:1024], y[:1024], batch_size=512, verbose=0)
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.fit(x, y, batch_size=512, verbose=0)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        print(f"{label}: {min(times):.3f} s an epoch")
    keras.distribution.set_distribution(None)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, keras {keras.__version__}, {torch.cuda.get_device_name()}")
    same_numbers_on_both_devices()
    same_history_as_on_the_cpu()
    overlap()
    speed()
