"""Layouts that are chosen by dry runs."""

import os
import sys

import keras
import numpy as np
import pytest
import torch.distributed as dist
from keras import distribution

import keras_spmd
from bench import on_ranks, same_on_ranks
from keras_spmd import layouts
from keras_spmd.distribution_lib import num_processes, process_id

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "benchmarks"))
import gpt

BATCH = (((16, 64), "int32"), ((16, 64), "int32"))


def make():
    return gpt.keras_model({**gpt.MINI, "blocks": 1})


def wide():
    """Products that take longer than sums over the network."""
    dense = [keras.layers.Dense(n, name=f"dense{i}") for i, n in enumerate([32768, 4096] * 2)]
    model = keras.Sequential([keras.Input((4096,)), *dense])
    model.compile("adamw", "mse")
    return model


def mesh(*shape):
    devices = [f"cpu:{i}" for i in range(shape[0] * (shape[1] if len(shape) > 1 else 1))]
    return distribution.DeviceMesh(shape, ("batch", "model")[: len(shape)], devices)


def test_a_model_that_fits_is_data_parallel(capsys):
    found = layouts.auto(make, mesh(8), batch=BATCH)
    assert {layout.axes for layout in found.values()} == {()}
    table = capsys.readouterr().out
    assert table.strip() == found.why.strip()
    assert "'data parallel' is chosen" in table
    assert all(name in table for name in ("zero1", "fsdp"))


def test_a_model_that_does_not_fit_is_sharded():
    whole = keras_spmd.plan(make, (8,), ("batch",), None, BATCH).memory.peak
    found = layouts.auto(make, mesh(8), batch=BATCH, device_memory=whole - 1, verbose=False)
    assert any("batch" in layout.axes for layout in found.values())
    assert "does not fit into" in found.why


def test_products_that_are_large_are_divided_over_the_model_axis():
    batch = ((4096, 4096), (4096, 4096))
    found = layouts.auto(wide, mesh(2, 4), batch=batch, verbose=False)
    axes = {path: layout.axes for path, layout in found.items()}
    columns = next(axes[path] for path in axes if "dense0/kernel" in path)
    rows = next(axes[path] for path in axes if "dense1/kernel" in path)
    assert columns[1] == "model"
    assert rows[0] == "model"


def test_a_transformer_gets_megatrons_layout():
    size = {"blocks": 1, "width": 2048, "heads": 16, "length": 512, "words": 8192}
    found = layouts.auto(
        lambda: gpt.keras_model({**gpt.MINI, **size}),
        mesh(1, 8),
        batch=(((8, 512), "int32"), ((8, 512), "int32")),
        verbose=False,
    )
    assert "'tensor parallel' is chosen" in found.why or "'sequence parallel' is" in found.why
    axes = {path.rpartition("block0_")[2]: layout.axes for path, layout in found.items()}
    for name in ("query", "key", "value"):
        assert axes[f"attention/{name}/kernel"] == (None, "model", None)
    assert axes["attention/attention_output/kernel"] == ("model", None, None)
    assert axes["up/kernel"] == (None, "model")
    assert axes["down/kernel"] == ("model", None)
    assert axes["embedding/embeddings"] == ("model", None)
    assert axes["logits/kernel"] == (None, "model")


def test_data_parallel_gathers_nothing():
    """Its layouts are those of variables: an output that stays divided costs nothing."""
    found = layouts.auto(make, mesh(4, 2), batch=BATCH, verbose=False)
    assert "'data parallel' is chosen" in found.why
    assert found["block0_up/kernel"].axes == ()
    assert found["block0_up/output"] is None


def test_nothing_fits():
    with pytest.raises(ValueError, match=r"None of the candidates .* fits into 1.0 KiB"):
        layouts.auto(make, mesh(8), batch=BATCH, device_memory=1024)


def small():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(64),
        ]
    )
    model.compile("adam", "mse")
    return model


def job_mesh():
    count = num_processes()
    return distribution.DeviceMesh((count // 2, 2) if count > 1 else (1, 1), ("batch", "model"))


SMALL_BATCH = ((32, 64), (32, 64))


@same_on_ranks(2, timeout=300, exhaustive=(4,))
def test_a_job_chooses_and_trains_as_one_device_does():
    """After a training step, so that the job's groups are in use; and with one after it."""
    x = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
    results = []
    keras.utils.set_random_seed(1)
    with distribution.DataParallel().scope():
        before = small()
        results.append(before.fit(x, x, epochs=1, verbose=0).history["loss"])
    found = layouts.auto(small, job_mesh(), batch=SMALL_BATCH, verbose=False)
    with distribution.ModelParallel(layout_map=found, batch_dim_name="batch").scope():
        model = small()
        assert model.name == "sequential_1", "names go on as if nothing had been planned"
        results.append(model.fit(x, x, epochs=2, verbose=0).history["loss"])
    with distribution.DataParallel().scope():
        results.append(before.fit(x, x, epochs=1, verbose=0).history["loss"])
    return results


@on_ranks(2, timeout=300, exhaustive=(4,))
def test_all_ranks_of_a_job_have_one_choice():
    """That of rank 0, though the memory that each has differs; nobody else plans."""
    planned = []

    def make():
        planned.append(True)
        return small()

    memory = 2**30 if process_id() == 0 else 1
    found = layouts.auto(make, job_mesh(), batch=SMALL_BATCH, device_memory=memory, verbose=False)
    everybody = [None] * num_processes()
    layout = {key: value.axes for key, value in found.items()}
    dist.all_gather_object(everybody, (layout, found.why))
    assert all(other == everybody[0] for other in everybody)
    assert "'data parallel' is chosen" in found.why
    counts = [None] * num_processes()
    dist.all_gather_object(counts, len(planned))
    assert max(counts[1:]) < counts[0]


@on_ranks(2)
def test_all_ranks_hear_that_nothing_fits():
    with pytest.raises(ValueError, match=r"None of the candidates .* fits into 64 B"):
        layouts.auto(small, job_mesh(), batch=SMALL_BATCH, device_memory=64)

    def broken():
        raise KeyError("a name")

    with pytest.raises(KeyError, match="a name"):
        layouts.auto(broken, job_mesh(), batch=SMALL_BATCH)
    # Nobody is left waiting, and the next call is a new one.
    found = layouts.auto(small, job_mesh(), batch=SMALL_BATCH, verbose=False)
    assert "is chosen" in found.why


@on_ranks(2)
def test_planning_may_take_longer_than_ranks_wait():
    """The others wait for the next sign that it goes on."""
    import time

    from keras_spmd.layouts._choosing import chosen_by_rank_0

    def choose(after_each):
        for _ in range(3):
            time.sleep(2)
            after_each()
        return "the best", "because"

    num_processes()
    os.environ["KERAS_SPMD_TIMEOUT"] = "5"
    assert chosen_by_rank_0(choose) == ("the best", "because")
