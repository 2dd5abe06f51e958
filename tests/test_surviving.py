"""Trainings that are killed, stopped, interrupted or told to end, and go on as if nothing was."""

import os
import random
import re
import signal
import time

import numpy as np
import pytest

import keras_spmd
import training
from bench import bench_of, on_ranks, sample
from files import shared_folder
from jobs import SURVIVOR, outcomes, result_of, start, torchrun
from keras_spmd.checkpoints._index import Checkpoint, steps_in

EXHAUSTIVE = pytest.mark.exhaustive


def undisturbed(jit):
    with training.of_ranks("data" if jit else "rows").scope():
        return training.fit(jit_compile=jit)


def assert_close(actual, expected):
    (history, variables), (expected_history, expected_variables) = actual, expected
    assert list(history) == list(expected_history)
    for name, numbers in history.items():
        np.testing.assert_allclose(numbers, expected_history[name], 1e-5, 1e-6, err_msg=name)
    for a, b in zip(variables, expected_variables, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("callback", "jit"),
    [
        ("sharded", False),
        pytest.param("backup", False, marks=EXHAUSTIVE),
        pytest.param("sharded", True, marks=EXHAUSTIVE),
        pytest.param("backup", True, marks=EXHAUSTIVE),
    ],
)
def test_a_rank_that_is_killed_twice(tmp_path, callback, jit):
    """torchrun starts the job again, which ends as if nothing had happened."""
    result = tmp_path / "result"
    args = [tmp_path / "saved", callback, int(jit), "0:1:5,1:0:8", result]
    job = torchrun(SURVIVOR, 2, *args, restarts=3)
    assert job.returncode == 0, job.stderr[-4000:]
    expected = bench_of(2).run(undisturbed, {"jit": jit}, 180)[0]
    training.assert_equal(result_of(result), expected)


def patient():
    with training.of_ranks("rows").scope():
        return training.fit(training.patient(), epochs=20, rate=training.RATE)


@EXHAUSTIVE
@pytest.mark.parametrize("kind", ["patient", "patient backup"])
def test_a_rank_that_is_killed_while_callbacks_are_patient(tmp_path, kind):
    """They remember what they waited for: the training stops early where it would have."""
    result = tmp_path / "result"
    args = [tmp_path / "saved", kind, 0, "0:1:15,1:0:8", result]
    job = torchrun(SURVIVOR, 2, *args, restarts=3)
    assert job.returncode == 0, job.stderr[-4000:]
    expected = bench_of(2).run(patient, {}, 180)[0]
    assert 4 < len(expected[0]["epoch"]) < 20
    training.assert_equal(result_of(result), expected)


@EXHAUSTIVE
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_job_that_comes_back_with_another_number_of_ranks(tmp_path, ranks):
    result = tmp_path / "result"
    args = [tmp_path / "saved", "sharded", 0]
    job = torchrun(SURVIVOR, 2, *args, "0:1:9", result)
    assert job.returncode != 0
    assert not result.exists()
    assert keras_spmd.latest_checkpoint(tmp_path / "saved") is not None
    job = torchrun(SURVIVOR, ranks, *args, "", result)
    assert job.returncode == 0, job.stderr[-4000:]
    assert_close(result_of(result), bench_of(2).run(undisturbed, {"jit": False}, 180)[0])


KILLED = """
import os, random, signal, sys, threading, time
import numpy as np, keras, keras_spmd, training
from keras_spmd.distribution_lib import process_id
folder, victim, share = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
keras.distribution.set_distribution(training.of_ranks("rows"))
model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(2048), keras.layers.Dense(512)])
seconds = []
for step in range(3):
    start = time.perf_counter()
    keras_spmd.save_checkpoint(model, folder, step=step)
    seconds.append(time.perf_counter() - start)
model.layers[0].bias.assign(np.full((2048,), 7.0))
if process_id() == victim:
    kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(share * min(seconds), kill).start()
keras_spmd.save_checkpoint(model, folder, step=int(sys.argv[4]))
time.sleep(30)
"""


@pytest.mark.parametrize(
    "moment", [pytest.param(i, marks=[EXHAUSTIVE] if i > 0 else []) for i in range(30)]
)
def test_killed_at_any_moment_of_a_save(tmp_path, moment):
    """The newest complete checkpoint is whole, also where an older one is being replaced."""
    rng = random.Random(moment)
    step = rng.choice([2, 3])
    args = [tmp_path, moment % 2, rng.uniform(0, 1.3), step]
    ranks = start(KILLED, 2, *args, KERAS_SPMD_TIMEOUT="5")
    outcomes(ranks, 120)
    steps = steps_in(tmp_path)
    assert list(steps) in ([0, 1, 2], [0, 1, 2, 3])
    for folder in steps.values():
        Checkpoint(folder).verify()
    newest = Checkpoint(steps[max(steps)])
    (bias,) = (name for name in newest.variables if name.endswith("/bias") and "_1" not in name)
    assert newest.read(bias).unique().tolist() in ([0.0], [7.0])


LOST = """
import os, signal, sys, time
import keras, keras_spmd, training
from keras_spmd.distribution_lib import process_id
keras.distribution.set_distribution(training.of_ranks("rows"))
model = training.make()
if process_id() == 0: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(2)
keras_spmd.save_checkpoint(model, sys.argv[1], step=1)
"""


def test_a_save_after_rank_0_was_killed(tmp_path):
    """The store is gone with it, and nobody tries to reach it again and again."""
    codes, errors = outcomes(start(LOST, 2, tmp_path, KERAS_SPMD_TIMEOUT="5"), 60)
    assert codes == [-9, 1], errors
    assert "save_checkpoint" in errors[1]


ONLY_ONE = """
import sys, time
import numpy as np, keras, keras_spmd, training
from keras_spmd.distribution_lib import process_id
keras.distribution.set_distribution(training.of_ranks("rows"))
model = training.make()
what, folder = sys.argv[1:]
if process_id() == 0:
    if what == "save": model.save(folder + "/m.keras")
    if what == "checkpoint": keras_spmd.save_checkpoint(model, folder, step=1)
    if what == "fit": training.make().fit(*training.arrays(), verbose=0)
    if what == "value": np.asarray(model.layers[1].kernel)
else:
    time.sleep(300)
"""


@pytest.mark.parametrize("what", sample(["save", "checkpoint", "fit", "value"], "save", "fit"))
def test_what_only_one_rank_runs(tmp_path, what):
    """All ranks end, and the message says where the others are."""
    ranks = start(ONLY_ONE, 2, what, tmp_path, KERAS_SPMD_TIMEOUT="3")
    codes, errors = outcomes(ranks, 90)
    assert codes == [1, 1], errors
    assert re.search(r"Rank 1 is at job_\w+.py:14: time.sleep\(300\)", errors[0]), errors[0]
    assert "rank 0 failed" in errors[1]


def batches_of(rank, count):
    """Wait until a rank of the slow training has done so many batches."""
    seen = 0
    while seen < count:
        line = rank.stdout.readline()
        assert line, "the training has ended"
        seen += line.startswith("batch")


@pytest.mark.parametrize("stopped", [pytest.param(0, marks=EXHAUSTIVE), 1])
def test_a_rank_that_is_stopped_is_named(tmp_path, stopped):
    args = [tmp_path / "saved", "slow", 0, "", tmp_path / "result"]
    ranks = start(SURVIVOR, 2, *args, KERAS_SPMD_TIMEOUT="5")
    try:
        batches_of(ranks[stopped], 2)
        os.kill(ranks[stopped].pid, signal.SIGSTOP)
        begin = time.monotonic()
        _, error = ranks[1 - stopped].communicate(timeout=90)
        assert time.monotonic() - begin < 60
    finally:
        os.kill(ranks[stopped].pid, signal.SIGKILL)
        outcomes(ranks, 30)
    assert ranks[1 - stopped].returncode != 0
    named = f"Rank {stopped} gave no sign" in error or "gave no answer" in error
    assert named or f"Rank {stopped} is at" in error, error
    if f"Rank {stopped} gave no sign" in error:
        assert re.search(r"It was at \w+\.py:\d+: ", error), error


def test_an_interrupted_rank_ends_all(tmp_path):
    args = [tmp_path / "saved", "slow", 0, "", tmp_path / "result"]
    ranks = start(SURVIVOR, 2, *args)
    batches_of(ranks[1], 2)
    os.kill(ranks[1].pid, signal.SIGINT)
    codes, errors = outcomes(ranks, 60)
    assert all(codes), codes
    assert "rank 1 failed" in errors[0]
    assert "KeyboardInterrupt" in errors[1]


def test_a_job_that_is_told_to_end_saves_and_goes_on_later(tmp_path):
    result = tmp_path / "result"
    args = [tmp_path / "saved", "slow", 0, "", result]
    ranks = start(SURVIVOR, 2, *args)
    batches_of(ranks[0], 3)
    os.kill(ranks[0].pid, signal.SIGTERM)
    codes, errors = outcomes(ranks, 60)
    assert codes == [143, 143], errors
    assert "ends, as it was told to" in errors[0]
    assert "Traceback" not in errors[0] + errors[1]
    # It was saved at that moment, not only after every second batch.
    codes, errors = outcomes(start(SURVIVOR, 2, *args), 180)
    assert codes == [0, 0], errors
    training.assert_equal(result_of(result), bench_of(2).run(undisturbed, {"jit": False}, 180)[0])


@on_ranks(2)
def test_a_number_that_is_none_in_the_rows_of_one_rank_stops_all():
    import keras

    with shared_folder() as folder, training.of_ranks("data").scope():
        model = training.make()
        x, y = training.arrays()
        x[5] = np.nan  # In the second half of the first batch: rows of rank 1.
        history = model.fit(
            x,
            y,
            batch_size=8,
            shuffle=False,
            epochs=3,
            verbose=0,
            callbacks=[keras.callbacks.TerminateOnNaN(), keras_spmd.ShardedCheckpoint(folder)],
        )
        assert history.epoch == [0]
