"""A rank that fails ends all ranks within seconds, and its traceback is the one that is shown."""

import os
import re
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from bench import on_ranks
from jobs import start
from keras_spmd import _failures, _whereabouts

SCRIPT = """
import os, time
os.environ["KERAS_BACKEND"] = "torch"
import numpy as np, keras, keras_spmd
from keras_spmd.distribution_lib import process_id

class Fail(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if process_id() == FAILING and batch == 2:
            print("failing", time.time(), flush=True)
            raise LookupError("the rows have run away")

keras.distribution.set_distribution(keras.distribution.DataParallel())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
model.fit(np.ones((64, 4)), np.ones((64, 2)), batch_size=4, verbose=0, callbacks=[Fail()])
"""


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_on_one_rank_ends_all(failing):
    ranks = start(SCRIPT.replace("FAILING", str(failing)), 3)
    texts = [rank.communicate(timeout=120) for rank in ranks]
    ended = time.time()
    failed_at = float(texts[failing][0].split()[1])
    # A collective would wait for half an hour. Leaving takes a while on a busy machine.
    assert ended - failed_at < 20
    assert all(rank.returncode for rank in ranks)
    assert texts[failing][1].rstrip().endswith("LookupError: the rows have run away")
    for rank in range(3):
        if rank != failing:
            error = texts[rank][1]
            assert error.startswith(f"keras_spmd: rank {rank} ends, because rank {failing} failed")
    lowest = 0 if failing else 1
    assert "LookupError: the rows have run away" in texts[lowest][1]


def test_with_torchrun_the_traceback_comes_first():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = SCRIPT.replace("FAILING", "1")
    result = subprocess.run(
        [*command, "--no-python", sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode
    first = next(line for line in result.stderr.splitlines() if "Error" in line)
    assert "LookupError" in first


def test_ranks_that_end_at_different_times_are_left_alone():
    script = """
import os, time
os.environ["KERAS_BACKEND"] = "torch"
import keras, keras_spmd
from keras_spmd.distribution_lib import process_id

keras.distribution.set_distribution(keras.distribution.DataParallel())
if process_id() == 1:
    time.sleep(4)
print("done")
"""
    ranks = start(script, 2)
    texts = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [text[0] for text in texts] == ["done\n", "done\n"]
    assert [text[1] for text in texts] == ["", ""]


@on_ranks(2)
def test_a_job_that_goes_on_does_not_look_at_ananother_threads_frames():
    """They may be freed meanwhile: it crashed trainings."""
    asked = []
    original = sys._current_frames
    sys._current_frames = lambda: asked.append(1) or original()
    try:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        watch = _failures._watch
        count = watch.signs.count
        np.asarray(keras.layers.Dense(2)(np.ones((2, 3), "float32")))
        while watch.signs.count < count + 2:
            time.sleep(0.1)
    finally:
        sys._current_frames = original
    assert not asked
    assert re.search(r"^at test_failures.py:\d+: np.asarray\(keras", _whereabouts.noted())
