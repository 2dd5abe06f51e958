"""What `keras-spmd doctor` runs on every rank: the sentences of the contract, on small models."""

import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "gpu": (1 << 20, 1 << 24, 1 << 28)}


def exercise(count: int) -> dict[str, Any]:
    """The results of every exercise, or the error that it ended with.

    Args:
        count: How many ranks the job has. A job of one, on a mesh of one device, says what all
            others should say.
    """
    exercises: dict[str, Callable[[int], Any]] = {
        "data_parallel": _train,
        "model_parallel": lambda n: _train(n, divided=True),
        "captured_step": lambda n: _train(n, jit_compile=True),
        "all_rows": _predict_all_rows,
        "unknown_ops": _run_ops_without_rules,
        "told": _provoke_a_warning,
        "inert": _compare_with_plain_keras,
    }
    results: dict[str, Any] = {}
    for name, run in exercises.items():
        try:
            with _distribution(count, name):
                results[name] = run(count)
        except Exception as error:  # a broken installation may raise anything; it is the finding
            results[name] = error if type(error).__module__ == "builtins" else repr(error)
    return results


@contextlib.contextmanager
def _distribution(count: int, name: str) -> Any:
    import keras

    from keras_spmd import ShardingWarning

    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    if name != "inert":
        mesh = keras.distribution.DeviceMesh((count, 1), ("batch", "model"))
        if name in ("model_parallel", "told"):
            mesh = keras.distribution.DeviceMesh((1, count), ("batch", "model"))
        layouts = keras.distribution.LayoutMap(mesh)
        if name == "model_parallel":
            layouts[".*hidden/kernel"] = (None, "model")
        if name == "told":
            layouts["no_such_variable"] = ("model",)
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardingWarning)
            yield
    finally:
        keras.distribution.set_distribution(None)


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(27, 8)).astype("float32")
    return x, x @ rng.normal(size=(8, 2)).astype("float32")


def _model(dropout: float) -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, name="hidden"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(dropout, seed=1),
            keras.layers.Dense(2),
        ]
    )


def _train(
    count: int, *, divided: bool = False, jit_compile: bool = False, dropout: float = 0.3
) -> dict[str, Any]:
    """Batch norm, dropout, a last batch of 3 rows: what depends on the mesh if done wrong."""
    x, y = _data()
    model = _model(dropout)
    model.compile("adam", "mse", jit_compile=jit_compile)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    if divided and count > 1:
        local = model.get_layer("hidden").kernel.value.to_local()
        if local.shape[1] >= 16:
            raise RuntimeError(f"the kernel was not divided: it is {tuple(local.shape)}")
    return {
        "loss": np.array(history.history["loss"]),
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]),
        "predictions": model.predict(x, verbose=0),
    }


def _predict_all_rows(count: int) -> dict[str, Any]:
    import keras

    inputs = keras.Input((1,))
    model = keras.Model(inputs, inputs * 2.0)
    rows = np.arange(2 * count + 1, dtype="float32")[:, None]
    twice = model.predict(rows, batch_size=count + 1, verbose=0)
    return {"every row once, in order": bool(np.array_equal(twice, 2 * rows))}


def _run_ops_without_rules(count: int) -> dict[str, Any]:
    import keras

    import keras_spmd

    x = np.random.default_rng(2).normal(size=(8, 6)).astype("float32")
    batch = keras_spmd.distribute_batch(keras.ops.convert_to_tensor(x))
    return {
        "sort": keras.ops.convert_to_numpy(keras.ops.sort(batch, axis=0)),
        "pad": keras.ops.convert_to_numpy(keras.ops.pad(batch, ((2, 2), (1, 1)), "reflect")),
        "cumsum": keras.ops.convert_to_numpy(keras.ops.cumsum(batch, axis=0)),
        "svd": keras.ops.convert_to_numpy(keras.ops.svd(batch, compute_uv=False)),
    }


def _provoke_a_warning(count: int) -> dict[str, Any]:
    """A key that matches nothing must be named."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _train(count)
    return {"told": any("no_such_variable" in str(w.message) for w in said)}


def _compare_with_plain_keras(count: int) -> dict[str, Any]:
    """Without dropout, whose numbers are the same on all meshes and not those of plain Keras."""
    import keras

    import keras_spmd

    ours = _train(count, dropout=0.0)
    keras_spmd.deactivate()
    try:
        keras.utils.clear_session()
        keras.utils.set_random_seed(7)
        plain = _train(count, dropout=0.0)
    finally:
        keras_spmd.activate()
    return {f"{k} of plain Keras": bool(np.allclose(ours[k], plain[k], 1e-5)) for k in plain}


def measure(count: int) -> list[dict[str, Any]]:
    """The time of each collective for several sizes, and the bandwidth that follows from it."""
    import torch

    from keras_spmd import _processes

    _processes.ensure_joined()
    kind = _processes.default_device_type()
    device = torch.device("cuda" if kind == "gpu" else "cpu")
    rows = []
    for size in SIZES[kind]:
        length = size // 4 // count * count
        whole = torch.ones(length, device=device)
        part = torch.ones(length // count, device=device)
        for name, run, share in _collectives(whole, part, count):
            seconds = _seconds(run, device)
            rows.append(
                {
                    "collective": name,
                    "bytes": length * 4,
                    "milliseconds": 1e3 * seconds,
                    # What each link carries, whatever the number of ranks.
                    "bus_gb_per_s": share * length * 4 / seconds / 1e9,
                }
            )
    return rows


def _collectives(whole: Any, part: Any, count: int) -> list[tuple[str, Callable, float]]:
    import torch.distributed as dist

    # torch 2.13 has new names for both.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    once = (count - 1) / count
    return [
        ("all_reduce", lambda: dist.all_reduce(whole), 2 * once),
        ("all_gather", lambda: gather(whole, part), once),
        ("reduce_scatter", lambda: scatter(part, whole), once),
    ]


def _seconds(run: Callable, device: Any, repeats: int = 5) -> float:
    import torch
    import torch.distributed as dist

    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2]
