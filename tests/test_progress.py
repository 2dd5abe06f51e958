"""A spinner for what takes long, in a terminal; lines in a log; on rank 0 alone."""

import os
import pty
import re
import subprocess
import sys
import time

import pytest

from bench import _free_port
from keras_spmd import _progress
from keras_spmd._progress import progress, progress_of_bytes

CODE = """
import time
from keras_spmd._progress import progress
with progress("Weighing [things]"):
    with progress("inside"):
        time.sleep(0.5)
with progress("Counting", total=3) as advance:
    for _ in range(3):
        advance()
print("done")
"""


def shown_in_a_terminal(code=CODE, **env):
    """What a process writes to a terminal, and to its stdout."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "KERAS_BACKEND": "torch", "TERM": "xterm", "COLUMNS": "80", **env}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], env=env, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side has closed
            break
        if not chunk:
            break
        text += chunk
    out = process.communicate(timeout=60)[0]
    os.close(ours)
    assert process.returncode == 0, text
    return text.decode(), out.decode()


def test_a_terminal_shows_what_is_done_and_for_how_long():
    text, out = shown_in_a_terminal()
    assert "Weighing [things]" in text
    assert "0:00:00" in text
    assert "3/3" in text
    assert "inside" not in text
    assert out == "done\n"


@pytest.mark.parametrize("env", [{"KERAS_SPMD_PROGRESS": "0"}, {"RANK": "1"}])
def test_other_ranks_and_who_does_not_want_it_see_nothing(env):
    assert shown_in_a_terminal(**env) == ("", "done\n")


def test_nothing_is_written_to_what_is_not_a_terminal(capfd):
    with progress("Counting", total=2) as advance:
        advance()
        advance(1)
    assert capfd.readouterr() == ("", "")


def test_a_log_is_told_of_what_takes_really_long(capfd, monkeypatch):
    monkeypatch.setattr(_progress, "LONG", 0.2)
    with progress("Weighing"), progress_of_bytes("inside"):
        time.sleep(0.5)
        assert capfd.readouterr().err == "keras-spmd: Weighing ...\n"
    assert re.fullmatch(r"keras-spmd: Weighing took \d s\n", capfd.readouterr().err)
    with progress_of_bytes("Saving 'x'") as advance:
        advance(7)
    monkeypatch.setenv("RANK", "1")
    with progress("Weighing"):
        time.sleep(0.5)
    assert capfd.readouterr() == ("", "")


PLANS = """
import keras, keras_spmd
def make():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
CALL
"""


def test_planning_is_shown():
    batch = "((8, 2), (8, 1))"
    call = f'keras_spmd.plan(make, (2,), ("batch",), None, {batch})'
    assert "Planning a step" in shown_in_a_terminal(PLANS.replace("CALL", call))[0]
    mesh = 'keras.distribution.DeviceMesh((1,), ("batch",))'
    call = f"keras_spmd.layouts.auto(make, {mesh}, batch={batch})"
    text, _ = shown_in_a_terminal(PLANS.replace("CALL", call))
    assert "Planning layouts" in text
    assert "3/3" in text
    assert "Planning a step" not in text


def test_compiling_a_step_is_shown():
    code = """
import keras, keras_spmd, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="line")
model.compile("sgd", "mse", jit_compile=True)
model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
"""
    text, _ = shown_in_a_terminal(code, KERAS_SPMD_COMPILER="none")
    assert "Capturing the train step of line" in text
    assert "Compiling the train step of line" in text


FILES = """
import sys, warnings
import keras, keras_spmd
from keras_spmd import _progress
warnings.simplefilter("ignore")
_progress.MOMENT = MOMENT
folder = "FOLDER"
keras.distribution.set_distribution(keras.distribution.DataParallel())
model = keras.Sequential([keras.Input((500,)), keras.layers.Dense(500), keras.layers.Dense(500)])
keras_spmd.save_checkpoint(model, folder + "/steps", step=1)
keras_spmd.load_checkpoint(model, folder + "/steps")
model.save(folder + "/m.keras")
model.save_weights(folder + "/m.weights.h5")
model.load_weights(folder + "/m.weights.h5")
keras.saving.load_model(folder + "/m.keras")
"""


def shown_of_files(folder, moment):
    """What rank 0 of two writes to a terminal."""
    code = FILES.replace("= MOMENT", f"= {moment}").replace("FOLDER", str(folder))
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "KERAS_BACKEND": "torch", **env, "RANK": "1"},
        stderr=subprocess.PIPE,
    )
    try:
        return shown_in_a_terminal(code, COLUMNS="200", RANK="0", **env)
    finally:
        _, error = other.communicate(timeout=60)
        assert (other.returncode, error) == (0, b"")


def test_files_are_shown_by_bytes(tmp_path):
    text, out = shown_of_files(tmp_path, -1)
    for done in ("Saving", "Loading"):
        for file in ("steps/step-00000001", "m.keras", "m.weights.h5"):
            assert re.search(rf"{done} '\S*{file}'", text), (done, file)
    # Of two megabytes, and how fast.
    assert re.search(r"2\.0/2\.0 MB.*MB/s", text)
    assert out == ""


def test_files_that_take_only_a_moment_are_not_shown(tmp_path):
    assert shown_of_files(tmp_path, 1e9) == ("", "")
