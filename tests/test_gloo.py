"""Groups of gloo."""

import os
import subprocess
import sys
from datetime import timedelta

import keras
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import jobs
from bench import on_ranks
from keras_spmd._gloo import with_one_thread

GATHERS_AND_SUMS = """
import torch
import torch.distributed as dist
import keras_spmd

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
name, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional
x = torch.ones(2)
for _ in range(400):
    results = []
    for _ in range(500):
        results += [ops.all_reduce(x, "sum", name), ops.all_gather_into_tensor(x, 1, name)]
    for y in results:
        ops.wait_tensor(y)
print("done")
"""


def test_gathers_and_sums_at_the_same_time_leave_the_heap_alone():
    """With torch's own groups the process dies: 'unaligned tcache chunk', a segmentation fault."""
    words = [sys.executable, "-c", GATHERS_AND_SUMS]
    env = {**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"


@on_ranks(2)
def test_a_group_has_torchs_own_settings_but_for_its_threads():
    keras.distribution.initialize()
    group = dist.new_group(timeout=timedelta(seconds=77))
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, dist.ProcessGroupGloo)
    assert isinstance(backend, c10d.ProcessGroupGloo)
    assert backend.options._timeout == timedelta(seconds=77)
    assert backend.options._threads == 1
    assert backend.name() == "gloo"


JOINED_BEFORE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")

import keras
import numpy as np
import keras_spmd
from keras_spmd import _gloo, _layouts

mesh = keras.distribution.DeviceMesh((2,), ("batch",))
keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
group = _layouts.backend_mesh(mesh).get_group()
assert _gloo.has_threads(dist.group.WORLD) and not _gloo.has_threads(group)
dist.destroy_process_group()
"""


def test_a_mesh_does_not_use_a_group_that_was_there_before():
    codes, errors = jobs.outcomes(jobs.start(JOINED_BEFORE, 2), 120)
    assert codes == [0, 0], errors


class Gloo:
    """Keeps what torch's class would get."""

    _Options = dist.ProcessGroupGloo._Options
    create_device = staticmethod(dist.ProcessGroupGloo.create_device)
    create_default_device = staticmethod(dist.ProcessGroupGloo.create_default_device)

    def __init__(self, store, rank, size, options):
        self.given = options


@pytest.mark.parametrize(("names", "count"), [("", 1), ("lo", 1), ("lo,lo", 2)])
def test_interfaces_that_a_user_chose(monkeypatch, names, count):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    timeout = timedelta(seconds=5)
    make = with_one_thread(Gloo)
    for group in (make(None, 0, 1, timeout=timeout), make(None, 0, 1, timeout)):
        assert (len(group.given._devices), group.given._threads) == (count, 1)
        assert group.given._timeout == timeout


def test_options_of_a_user_are_kept():
    options = Gloo._Options()
    options._threads = 3
    make = with_one_thread(Gloo)
    assert make(None, 0, 1, options).given is options
    assert make(None, 0, 1, options=options).given is options
