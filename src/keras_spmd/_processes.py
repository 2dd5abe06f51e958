"""The processes of the job: joining them, this one's device, one seed for all, leaving.

One process drives one device. A process that was not started with others stands alone, and needs
no process group for that.
"""

import atexit
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from keras.src.backend.torch import core as keras_torch

from keras_spmd import _failures, _random_state, _rendezvous, _settings
from keras_spmd._notices import warn_once
from keras_spmd._rendezvous import Rendezvous

_left_by_us = False


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Join the other processes of the job; this is what `keras.distribution.initialize` calls.

    Example:

    >>> import keras, keras_spmd
    >>> keras.distribution.initialize()  # torchrun, Slurm, or alone
    """
    if dist.is_initialized():
        _check_against_group(num_processes, process_id)
        return
    if (job_addresses, num_processes, process_id) == (None, None, None):
        meeting = _rendezvous.from_torchrun() or _rendezvous.from_slurm()
    else:
        meeting = _rendezvous.from_arguments(job_addresses, num_processes, process_id)
    if meeting is not None and meeting.world_size > 1:
        _join(meeting)


def ensure_joined() -> None:
    """Join by itself at the first use of a mesh, when torchrun started this process."""
    if dist.is_initialized():
        _random_state.agree()
        return
    meeting = _rendezvous.from_torchrun()
    if meeting is not None and meeting.world_size > 1:
        _join(meeting)


def ensure_group() -> None:
    """A process group even for a process that stands alone: torch's DeviceMesh wants one."""
    ensure_joined()
    if not dist.is_initialized():
        _init_group(dist.HashStore(), rank=0, world_size=1)


def num_processes() -> int:
    ensure_joined()
    return dist.get_world_size() if dist.is_initialized() else 1


def process_id() -> int:
    ensure_joined()
    return dist.get_rank() if dist.is_initialized() else 0


def default_device_type() -> str:
    """'gpu' where Keras puts its tensors on a GPU, else 'cpu'."""
    return "gpu" if torch.device(keras_torch.DEFAULT_DEVICE).type == "cuda" else "cpu"


def list_devices(device_type: str | None = None) -> list[str]:
    """All devices of the job, one for each process: 'gpu:0', 'gpu:1', ..."""
    device_type = (device_type or default_device_type()).lower().replace("cuda", "gpu")
    if device_type not in ("cpu", "gpu") or (
        device_type == "gpu" and not torch.cuda.is_available()
    ):
        return []
    count = num_processes()
    if device_type == "gpu" and count == 1 and torch.cuda.device_count() > 1:
        warn_once(
            "idle gpus",
            f"This machine has {torch.cuda.device_count()} GPUs and this job is one process, "
            "which uses one of them. To use them all, start it with\n    "
            + launch_command(torch.cuda.device_count()),
        )
    return [f"{device_type}:{rank}" for rank in range(count)]


def launch_command(count: int) -> str:
    """The command that starts this program with `count` processes."""
    script = " ".join(sys.argv) if sys.argv and sys.argv[0] not in ("", "-c") else "your_script.py"
    return f"torchrun --nproc-per-node {count} {script}"


def bind_device(local_rank: int | None = None) -> None:
    """Make 'cuda' mean this process's own GPU, before anything is allocated on another."""
    if local_rank is None:
        meeting = _rendezvous.from_torchrun()
        if meeting is None:
            return
        local_rank = meeting.local_rank
    if default_device_type() != "gpu" or torch.device(keras_torch.DEFAULT_DEVICE).index is not None:
        return
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"Process {local_rank} of this machine has no GPU of its own: the machine has "
            f"{torch.cuda.device_count()}. Start at most that many processes on it, or set "
            "KERAS_TORCH_DEVICE=cpu to run on CPUs."
        )
    torch.cuda.set_device(local_rank)


def _check_against_group(num_processes: int | None, process_id: int | None) -> None:
    found = (dist.get_world_size(), dist.get_rank())
    asked = (num_processes, process_id)
    if any(a is not None and a != f for a, f in zip(asked, found, strict=True)):
        raise ValueError(
            f"keras.distribution.initialize() was called with num_processes={num_processes} and "
            f"process_id={process_id}, but this process has joined a group already, as process "
            f"{found[1]} of {found[0]}."
        )
    _random_state.agree()


def _join(meeting: Rendezvous) -> None:
    bind_device(meeting.local_rank)
    store = _open_store(meeting)
    _await_all(store, meeting)
    _init_group(store, meeting.rank, meeting.world_size)
    _failures.start(store, meeting.rank, meeting.world_size)
    _random_state.agree()


def _open_store(meeting: Rendezvous) -> dist.Store:
    try:
        store = dist.TCPStore(
            meeting.host,
            meeting.port,
            is_master=meeting.rank == 0 and not meeting.agent_store,
            timeout=timedelta(seconds=_settings.join_timeout()),
            wait_for_workers=False,
        )
    except (dist.DistStoreError, dist.DistNetworkError, ValueError) as error:
        role = (
            "could not open the meeting point"
            if meeting.rank == 0 and not meeting.agent_store
            else f"waited {_settings.join_timeout():g} s, but process 0 never answered"
        )
        raise RuntimeError(
            f"Process {meeting.rank} of {meeting.world_size} {role} at {meeting.address} "
            f"(from {meeting.source}). Is the address right, is the port free and open between "
            "the hosts, and did process 0 start? KERAS_SPMD_JOIN_TIMEOUT sets how many seconds "
            "to wait."
        ) from error
    # A restarted job finds the keys of its earlier life in torchrun's store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"keras_spmd/{attempt}", store)


def _await_all(store: dist.Store, meeting: Rendezvous) -> None:
    """Wait until every process has arrived, or say which ones did not."""
    store.set(f"here/{meeting.rank}", "1")
    arrived = store.add("arrived", 1)
    deadline = time.monotonic() + _settings.join_timeout()
    while arrived < meeting.world_size:
        if store.check(["verdict"]):
            _give_up(meeting, store.get("verdict").decode())
        if time.monotonic() > deadline:
            here = [r for r in range(meeting.world_size) if store.check([f"here/{r}"])]
            absent = sorted(set(range(meeting.world_size)) - set(here))
            verdict = f"{len(here)} of {meeting.world_size} processes arrived, {absent} did not"
            # The others should hear it before the process that serves the meeting point ends.
            store.set("verdict", verdict)
            time.sleep(1)
            _give_up(meeting, verdict)
        time.sleep(0.02)
        arrived = store.add("arrived", 0)


def _give_up(meeting: Rendezvous, verdict: str) -> None:
    raise TimeoutError(
        f"Process {meeting.rank} waited at {meeting.address} (from {meeting.source}): {verdict} "
        f"within {_settings.join_timeout():g} s. Did they start, and can their hosts reach that "
        "address? KERAS_SPMD_JOIN_TIMEOUT sets how many seconds to wait."
    )


def _init_group(store: dist.Store, rank: int, world_size: int) -> None:
    global _left_by_us
    if default_device_type() == "gpu":
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=torch.device("cuda", torch.cuda.current_device()),
        )
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if not _left_by_us:
        atexit.register(leave)
        _left_by_us = True


def leave() -> None:
    """Leave the process group; called at exit, after errors too."""
    _failures.stop()
    if dist.is_initialized():
        # gloo's threads need the interpreter's lock to drop their last tensors. One that asks for
        # it while the interpreter shuts down aborts the process, so let them have it now.
        time.sleep(0.1)
        dist.destroy_process_group()
