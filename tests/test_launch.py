"""`keras_spmd.launch`: a function on new processes, and nothing left of them."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import keras_spmd
from jobs import is_running


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


def train(epochs, *, batch_size):
    import keras

    keras.utils.set_random_seed(3)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    x = np.arange(64.0).reshape(16, 4) / 64
    history = model.fit(x, x[:, :2], batch_size=batch_size, epochs=epochs, verbose=0)
    devices = keras.distribution.list_devices()
    return history.history["loss"], len(devices), keras_spmd.distribution_lib.process_id()


def test_ranks_return_what_one_device_would():
    (alone,) = keras_spmd.launch(train, 1, 2, batch_size=8)
    both = keras_spmd.launch(train, 2, 2, batch_size=8)
    for rank, (losses, devices, number) in enumerate(both):
        np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
        assert (devices, number) == (2, rank)


def test_closures_and_lambdas_are_sent_with_their_values():
    base, table = 10, {"b": np.arange(3)}

    def power(x, y):  # refers to itself
        return 1 if y == 0 else x * power(x, y - 1)

    results = keras_spmd.launch(lambda: (power(base, 2), table["b"].sum().item()), 1)
    assert results == [(100, 3)]


def test_what_rank_0_prints_appears_here(capfd):
    keras_spmd.launch(lambda: print("from rank", os.environ["RANK"]), 2)
    assert capfd.readouterr().out == "from rank 0\n"


def fail_on_1(pids):
    import torch

    from keras_spmd.distribution_lib import process_id

    rank = process_id()
    with open(f"{pids}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    if rank == 1:
        raise LookupError("the rows have run away")
    while True:
        torch.distributed.all_reduce(torch.ones(2))


def test_the_traceback_of_a_failing_rank_is_raised_here(tmp_path):
    with pytest.raises(RuntimeError, match="Rank 1 of 2 failed:\nTraceback") as caught:
        keras_spmd.launch(fail_on_1, 2, tmp_path)
    text = str(caught.value)
    assert "in fail_on_1" in text
    assert text.rstrip().endswith("LookupError: the rows have run away")
    assert "_launched.py" not in text
    assert isinstance(caught.value.__cause__, LookupError)
    assert not [pid for pid in (tmp_path / "0", tmp_path / "1") if is_running(pid.read_text())]


def test_a_rank_that_dies_is_reported():
    def die():
        print("last words", file=sys.stderr, flush=True)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RuntimeError, match=r"Rank 1 of 2: .* signal SIGKILL.\nlast words"):
        keras_spmd.launch(die, 2)


def test_a_result_that_cannot_be_sent_is_named():
    with pytest.raises(RuntimeError, match="its result of type lock can't be sent back"):
        keras_spmd.launch(threading.Lock, 1)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((train, 0), ValueError, "got n=0"),
        ((train, "2"), TypeError, "got '2'"),
        ((2, train), TypeError, "n must be a number"),
        ((5, 2), TypeError, "fn must be a function, got 5"),
        ((print, 1, threading.Lock()), TypeError, "can't send 'print'.* the argument 1"),
    ],
)
def test_mistakes_are_named_before_anything_starts(arguments, kind, message):
    with pytest.raises(kind, match=message):
        keras_spmd.launch(*arguments)


def test_a_value_that_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="'lock', which it uses: cannot pickle"):
        keras_spmd.launch(lambda: lock.locked(), 1)


def test_other_backends_are_refused(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(ValueError, match="KERAS_BACKEND is 'jax'"):
        keras_spmd.launch(train, 2)


def test_a_rank_cannot_launch_again():
    with pytest.raises(RuntimeError, match="was called in rank 0 of a job"):
        keras_spmd.launch(keras_spmd.launch, 1, print, 1)


def python(code, path=None, **kwargs):
    env = {**os.environ, "KERAS_BACKEND": "torch"}
    if path is not None:
        path.write_text(textwrap.dedent(code))
    start = [str(path)] if path is not None else ["-c", textwrap.dedent(code)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *start], env=env, text=True, **pipes, **kwargs)


def test_functions_of_a_notebook_find_each_other():
    """What is typed in has no file: code, globals and modules are sent."""
    code = """
    import keras_spmd, os.path
    import numpy as np
    scale = np.array([2.0, 3.0])
    def helper(x): return (scale * x).tolist()
    def work(x, *, more=1): return helper(x + more), os.path.basename("a/b")
    print(keras_spmd.launch(work, 2, 1))
    """
    out, err = python(code).communicate(timeout=120)
    assert out == "[([4.0, 6.0], 'b'), ([4.0, 6.0], 'b')]\n", err


def test_classes_of_a_script_are_read_from_its_file(tmp_path):
    code = """
    import keras, keras_spmd
    class Double(keras.layers.Layer):
        def call(self, x): return super().__call__ and x * 2
    def work(): return float(Double()(keras.ops.ones(()))), Double.__name__
    if __name__ == "__main__":
        print(keras_spmd.launch(work, 1))
    """
    out, err = python(code, tmp_path / "script.py").communicate(timeout=120)
    assert out == "[(2.0, 'Double')]\n", err


def test_an_interrupt_leaves_no_processes(tmp_path):
    code = f"""
    import os, signal, time, keras_spmd
    # Ignored by what a shell runs in the background, such as these tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    def work():
        with open(f"{tmp_path}/{{os.environ['RANK']}}", "w") as file: file.write(str(os.getpid()))
        time.sleep(300)
    keras_spmd.launch(work, 2)
    """
    process = python(code)
    try:
        ids = [wait_for(tmp_path / str(rank)) for rank in (0, 1)]
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=120)[1]
    finally:
        process.kill()
        process.communicate()
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert not [i for i in ids if is_running(i)]


def test_ranks_end_when_their_caller_is_killed(tmp_path):
    code = f"""
    import os, time, keras_spmd
    def work():
        with open(f"{tmp_path}/id", "w") as file: file.write(str(os.getpid()))
        time.sleep(300)
    keras_spmd.launch(work, 1)
    """
    process = python(code)
    try:
        number = wait_for(tmp_path / "id")
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 20
    while is_running(number) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(number)


def wait_for(path, timeout=90):
    deadline = time.monotonic() + timeout
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} was never written"
        time.sleep(0.05)
    return path.read_text()
