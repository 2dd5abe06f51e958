"""Joining: from torchrun, Keras's variables, arguments, Slurm, or alone; and leaving cleanly."""

import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from bench import on_ranks
from keras_spmd import _processes, _rendezvous

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
REPORT = """
import sys, torch
from keras_spmd.distribution_lib import num_processes, process_id
total = torch.ones(())
if num_processes() > 1:
    torch.distributed.all_reduce(total)
found = [process_id(), num_processes(), int(total), len(keras.distribution.list_devices())]
sys.stdout.write(" ".join(["joined", *map(str, found)]) + chr(10))
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(code, **env):
    code = "import warnings\nwarnings.simplefilter('error')\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes, timeout=120):
    outputs = [p.communicate(timeout=timeout) for p in processes]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, outputs, strict=True)]


def assert_joined(results):
    count = len(results)
    for rank, (code, out, err) in enumerate(results):
        assert code == 0, err
        assert f"joined {rank} {count} {count} {count}" in out
        assert err == "", "no warnings when the group is left"


def joining(arguments=""):
    return f"import keras, keras_spmd\nkeras.distribution.initialize({arguments})\n" + REPORT


@pytest.mark.parametrize("addresses", ["all", "coordinator"])
def test_explicit_arguments(addresses):
    ports = [free_port(), free_port()]
    text = ",".join(f"127.0.0.1:{p}" for p in ports[: 2 if addresses == "all" else 1])
    assert_joined(
        finish([start(joining(f"'{text}', num_processes=2, process_id={i}")) for i in (0, 1)])
    )


def test_keras_environment_variables():
    port = free_port()
    assert_joined(
        finish(
            [
                start(
                    joining(),
                    KERAS_DISTRIBUTION_JOB_ADDRESSES=f"127.0.0.1:{port}",
                    KERAS_DISTRIBUTION_NUM_PROCESSES="2",
                    KERAS_DISTRIBUTION_PROCESS_ID=str(i),
                )
                for i in (0, 1)
            ]
        )
    )


def test_slurm():
    env = {"SLURM_JOB_ID": str(free_port()), "SLURM_NTASKS": "2", "MASTER_PORT": str(free_port())}
    env |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_JOB_NODELIST": "elsewhere[1-2]"}
    assert_joined(
        finish([start(joining(), SLURM_PROCID=str(i), SLURM_LOCALID=str(i), **env) for i in (0, 1)])
    )


def torchrun(code, tmp_path, *options, **env):
    script = tmp_path / "script.py"
    script.write_text("import warnings\nwarnings.simplefilter('error')\n" + textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options, script],
        env={**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("call", ["", "keras.distribution.initialize()\n" * 2])
def test_torchrun_with_and_without_a_call(call, tmp_path):
    result = torchrun("import keras, keras_spmd\n" + call + REPORT, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "joined 0 2 2 2" in result.stdout
    assert "joined 1 2 2 2" in result.stdout
    assert "Warning" not in result.stderr


def test_a_group_of_the_users_is_used_as_it_is(tmp_path):
    code = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    import keras, keras_spmd
    mesh = keras.distribution.DeviceMesh((2,), ("batch",))
    keras.distribution.initialize()
    keras.distribution.initialize(num_processes=2)
    assert mesh.backend_mesh.size() == 2
    assert dist.group.WORLD is group
    try:
        keras.distribution.initialize(num_processes=3)
    except ValueError as e:
        assert "num_processes=3" in str(e) and "of 2" in str(e)
        print("refused")
    dist.destroy_process_group()
    """
    result = torchrun(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("refused") == 2


def test_alone():
    code, out, err = finish([start(joining())])[0]
    assert code == 0, err
    assert "joined 0 1 1 1" in out
    assert err == ""


def test_an_error_leaves_cleanly(tmp_path):
    code = """
    import keras, keras_spmd
    mesh = keras.distribution.DeviceMesh((2,), ("batch",))
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
    keras.layers.Dense(4).build((None, 4))
    raise ValueError("the user's own error")
    """
    started = time.monotonic()
    result = torchrun(code, tmp_path)
    assert result.returncode != 0
    assert "the user's own error" in result.stderr
    assert "destroy_process_group" not in result.stderr
    # Much less than ranks wait for each other, also on a busy machine.
    assert time.monotonic() - started < 240


def test_a_rank_that_never_arrives_is_named():
    port = free_port()
    code = [joining(f"'127.0.0.1:{port}', num_processes=3, process_id={i}") for i in (0, 2)]
    started = time.monotonic()
    results = finish([start(c, KERAS_SPMD_JOIN_TIMEOUT="6") for c in code])
    assert time.monotonic() - started < 240
    for rank, (status, _, err) in zip((0, 2), results, strict=True):
        assert status != 0
        assert f"Process {rank} waited at 127.0.0.1:{port}" in err
        assert "2 of 3 processes arrived, [1] did not within 6 s" in err


def test_a_coordinator_that_never_arrives_is_named():
    port = free_port()
    code = joining(f"'127.0.0.1:{port}', num_processes=2, process_id=1")
    status, _, err = finish([start(code, KERAS_SPMD_JOIN_TIMEOUT="3")])[0]
    assert status != 0
    assert "Process 1 of 2 waited 3 s, but process 0 never answered" in err
    assert f"127.0.0.1:{port}" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("10.0.0.1:1,10.0.0.2:1", 3, 0), "has 2 jobs, but num_processes is 3"),
        (("10.0.0.1:1", None, 0), "needs `num_processes`"),
        (("10.0.0.1:1", 2, None), "KERAS_DISTRIBUTION_PROCESS_ID"),
        (("10.0.0.1:1", 2, 2), "between 0 and num_processes - 1 = 1, got 2"),
        (("10.0.0.1", 2, 1), "must be 'host:port'"),
        ((None, 2, 1), "no `job_addresses`"),
    ],
)
def test_wrong_arguments(arguments, message, monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError) as e:
        _rendezvous.from_arguments(*arguments)
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("gpu[007-009,012],login1", "gpu007"),
        ("a1,a2", "a1"),
        ("rack2-n[3,5]-ib", "rack2-n3-ib"),
        ("10.0.0.5", "10.0.0.5"),
    ],
)
def test_slurm_node_lists(nodes, host):
    assert _rendezvous.first_slurm_host(nodes) == host


def test_launch_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    assert _processes.launch_command(8) == "torchrun --nproc-per-node 8 train.py --lr 0.1"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert _processes.launch_command(2).endswith("your_script.py")


def test_one_process_on_a_machine_with_many_gpus_is_told_once(monkeypatch):
    import torch

    import keras_spmd

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(_processes.keras_torch, "DEFAULT_DEVICE", "cuda")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.warns(keras_spmd.ShardingWarning, match="has 4 GPUs") as caught:
        assert _processes.list_devices() == ["gpu:0"]
    assert "torchrun --nproc-per-node 4 train.py" in str(caught[0].message)
    assert _processes.list_devices() == ["gpu:0"]
    assert _processes.list_devices("tpu") == []


def test_more_processes_than_gpus_is_an_error(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(_processes.keras_torch, "DEFAULT_DEVICE", "cuda")
    with pytest.raises(RuntimeError, match=r"Process 2 .* has no GPU of its own: .* has 2"):
        _processes.bind_device(2)


def test_slurm_may_bind_each_task_to_a_gpu(monkeypatch):
    import torch

    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(_processes.keras_torch, "DEFAULT_DEVICE", "cuda")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    _processes.bind_device(3)
    assert taken == [0]


def test_what_fails_while_leaving_does_not_keep_the_group(monkeypatch):
    left = []

    def fail():
        raise OSError("the disk is full")

    monkeypatch.setattr(_processes, "_before_leaving", [fail, lambda: left.append("finished")])
    monkeypatch.setattr(_processes._failures, "stop", lambda: left.append("unwatched"))
    with pytest.raises(OSError, match="the disk is full"):
        _processes.leave()
    assert left == ["finished", "unwatched"]


@on_ranks(2)
def test_joining_twice_is_fine():
    import keras

    keras.distribution.initialize()
    keras.distribution.initialize()
    assert len(keras.distribution.list_devices()) == 2
