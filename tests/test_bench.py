"""The test bench itself: failures are told with the rank, nothing hangs, nothing is left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

import bench
from bench import on_ranks


@on_ranks(2, 4)
def test_ranks_run_together():
    import torch
    import torch.distributed as dist

    import keras_spmd.distribution_lib as lib

    assert lib.num_processes() in (2, 4)
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == lib.num_processes()


def body_failing_on_one(rank):
    from keras_spmd.distribution_lib import process_id

    assert process_id() != rank, "this rank is told to fail"


def body_leaving_others_in_a_collective(how):
    import torch
    import torch.distributed as dist

    from keras_spmd.distribution_lib import process_id

    if process_id() == 1:
        if how == "raise":
            raise RuntimeError("rank 1 left")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stall":
            time.sleep(1000)
    dist.all_reduce(torch.ones(()))


def body_fine():
    return os.getpid()


def test_a_failure_names_its_rank_and_the_ranks_stay_alive():
    with bench.fresh_bench(2) as ranks:
        pids = ranks.run(body_fine, {}, 60)
        with pytest.raises(bench.RankFailure, match=r"rank 1 of 2[\s\S]*this rank is told to fail"):
            ranks.run(body_failing_on_one, {"rank": 1}, 60)
        assert ranks.run(body_fine, {}, 60) == pids


@pytest.mark.parametrize(
    ("how", "message"),
    [("raise", "rank 1 left"), ("die", "process died"), ("stall", "did not finish within")],
)
def test_a_rank_that_leaves_the_others_does_not_hang_the_test(how, message, monkeypatch):
    monkeypatch.setattr(bench, "GRACE", 1.0)
    with bench.fresh_bench(2) as ranks:
        pids = ranks.run(body_fine, {}, 60)
        started = time.monotonic()
        with pytest.raises(bench.RankFailure, match=message):
            ranks.run(body_leaving_others_in_a_collective, {"how": how}, 4)
        assert time.monotonic() - started < 15
        assert not any(_is_alive(pid) for pid in pids)
        assert len(ranks.run(body_fine, {}, 60)) == 2


def body_hanging():
    time.sleep(1000)


SESSION = """
import bench, test_bench
ranks = bench.Bench(2)
ranks.run(test_bench.body_fine, {}, 60)
print(*[p.pid for p in ranks.processes], flush=True)
ranks.run(test_bench.body_hanging, {}, 1000)
"""


def test_ranks_end_with_the_session_even_if_it_is_killed():
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION], cwd=bench.HERE, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in session.stdout.readline().split()]
    assert len(pids) == 2
    session.kill()
    session.communicate()
    deadline = time.monotonic() + 10
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_is_alive(pid) for pid in pids)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
