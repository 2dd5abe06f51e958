"""Jobs on two hosts: whose ranks are killed, whose cable is pulled, and that come back smaller."""

import os
import re
import signal
import time

import pytest

import keras_spmd
import training
from bench import bench_of
from hosts import two_hosts
from jobs import SURVIVOR, result_of
from test_surviving import assert_close, undisturbed

TIMEOUT = 8


@pytest.fixture
def hosts():
    with two_hosts() as found:
        yield found


def reference(ranks=2):
    return bench_of(ranks).run(undisturbed, {"jit": False}, 180)[0]


def start(hosts, folder, kind="slow", **options):
    """The slow training, one rank on each host."""
    args = [SURVIVOR, folder / "saved", kind, 0, "", folder / "result"]
    return [host.torchrun(*args, KERAS_SPMD_TIMEOUT=str(TIMEOUT), **options) for host in hosts]


def ends(jobs, timeout=90):
    codes = [job.end(timeout) for job in jobs]
    assert codes == [0] * len(jobs), jobs[0].text()[-4000:] + jobs[-1].text()[-4000:]


def pid_after(job, batches):
    """The process of a rank, when it has done so many batches."""
    line = job.wait_for("batch", "stdout", batches)[-1]
    return int(re.search(r"of process (\d+)", line)[1])


@pytest.mark.exhaustive
def test_two_hosts_compute_what_one_process_does(tmp_path, hosts):
    """Nobody says which network joins the hosts, and both of them call themselves 127.0.0.1."""
    ends(start(hosts, tmp_path))
    assert_close(result_of(tmp_path / "result"), reference(1))


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "kind", ["slow", pytest.param("slow backup", marks=pytest.mark.exhaustive)]
)
def test_a_rank_that_is_killed_on_one_host(tmp_path, hosts, killed, kind):
    """Both launchers start their ranks again, and the training ends as if nothing had happened."""
    jobs = start(hosts, tmp_path, kind)
    first = pid_after(jobs[killed], 9)
    os.kill(first, signal.SIGKILL)
    ends(jobs)
    assert pid_after(jobs[killed], 10) != first
    training.assert_equal(result_of(tmp_path / "result"), reference())


def test_a_host_whose_link_goes_down_for_a_while(tmp_path, hosts):
    """Ranks end in time and say which one can't be reached; the job goes on when it is back."""
    jobs = start(hosts, tmp_path)
    pid_after(jobs[1], 9)
    hosts[1].plug("down")
    begin = time.monotonic()
    for other, job in zip((1, 0), jobs, strict=True):
        (said,) = job.wait_for("keras_spmd: rank", timeout=3 * TIMEOUT)[:1]
        assert re.search(rf"[Rr]ank {other}\b.*can't be reached", said), job.text()
    assert time.monotonic() - begin < 2 * TIMEOUT
    hosts[1].plug("up")
    ends(jobs)
    training.assert_equal(result_of(tmp_path / "result"), reference())


@pytest.mark.exhaustive
def test_a_job_that_comes_back_on_one_host(tmp_path, hosts):
    jobs = start(hosts, tmp_path, restarts=0)
    pid_after(jobs[1], 9)
    hosts[1].plug("down")
    hosts[1].kill()
    assert jobs[0].end(60) != 0
    assert keras_spmd.latest_checkpoint(tmp_path / "saved") is not None
    assert not (tmp_path / "result").exists()
    ends(start(hosts[:1], tmp_path, nodes="1"))
    assert_close(result_of(tmp_path / "result"), reference())


@pytest.mark.exhaustive
def test_a_job_that_goes_on_without_a_host_that_is_lost(tmp_path, hosts):
    """With `--nnodes 1:2` the launcher that is left starts its ranks again as a smaller job."""
    jobs = start(hosts, tmp_path, nodes="1:2")
    pid_after(jobs[1], 9)
    hosts[1].plug("down")
    hosts[1].kill()
    ends(jobs[:1])
    assert_close(result_of(tmp_path / "result"), reference())
