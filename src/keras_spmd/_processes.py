"""The processes of the job: joining them, this one's device, one seed for all, leaving.

One process drives one device. A process that was not started with others stands alone, and needs
no process group for that.
"""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from keras.src.backend.torch import core as keras_torch

from keras_spmd import _addresses, _failures, _joining, _random_state, _rendezvous, _settings
from keras_spmd._notices import warn_once
from keras_spmd._rendezvous import Rendezvous

_left_by_us = False
_store: dist.Store | None = None
_aside: tuple[dist.Store, dist.Store] | None = None  # the job's store, and its other connection


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
    """The command that starts this program with `count` processes, as this one was started."""
    script = " ".join(sys.argv) if sys.argv and sys.argv[0] not in ("", "-c") else "your_script.py"
    by_ours = "KERAS_SPMD_RUN_FOLDER" in os.environ
    return f"{'keras-spmd run -n' if by_ours else 'torchrun --nproc-per-node'} {count} {script}"


def bind_device(local_rank: int | None = None) -> None:
    """Make 'cuda' mean this process's own GPU, before anything is allocated on another."""
    if local_rank is None:
        meeting = _rendezvous.from_torchrun()
        if meeting is None:
            return
        local_rank = meeting.local_rank
    if default_device_type() != "gpu" or torch.device(keras_torch.DEFAULT_DEVICE).index is not None:
        return
    if _sees_its_own_gpu_only():
        torch.cuda.set_device(0)
        return
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"Process {local_rank} of this machine has no GPU of its own: the machine has "
            f"{torch.cuda.device_count()}. Start at most that many processes on it, or set "
            "KERAS_TORCH_DEVICE=cpu to run on CPUs."
        )
    torch.cuda.set_device(local_rank)


def _sees_its_own_gpu_only() -> bool:
    """Whether Slurm has bound each of its tasks to one GPU (`--gpus-per-task=1`)."""
    bound = os.environ.get("SLURM_GPUS_PER_TASK") or os.environ.get("SLURM_TRES_PER_TASK")
    return bool(bound) and torch.cuda.device_count() == 1


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


def store() -> dist.Store:
    """Where the processes of the job leave words for each other."""
    return dist.distributed_c10d._get_default_store() if _store is None else _store


def store_aside() -> dist.Store:
    """The same by a connection of its own: the other one may be waiting for an answer.

    It is made once, when the process joins. One that is made after rank 0 was killed would try to
    reach the store for minutes; one that is there fails at once.
    """
    global _aside
    if _aside is None or _aside[0] is not store():
        _aside = store(), store().clone()
    return _aside[1]


def _join(meeting: Rendezvous) -> None:
    global _store
    bind_device(meeting.local_rank)
    _store = store = _joining.join(meeting)
    _addresses.choose_interface(store, meeting.rank, meeting.world_size)
    try:
        _init_group(store, meeting.rank, meeting.world_size)
    except RuntimeError as error:
        chosen = os.environ.get(_addresses.VARIABLE)
        raise RuntimeError(
            f"Process {meeting.rank} of {meeting.world_size} met the others at {meeting.address}, "
            "but could not connect to them"
            + (f" by the interface '{chosen}'" if chosen else "")
            + f". Set {_addresses.VARIABLE} on each host to its interface in the network "
            f"between the hosts. What torch says: {error}"
        ) from error
    _failures.start(store, store_aside(), meeting.rank, meeting.world_size)
    _random_state.agree()


def _init_group(store: dist.Store, rank: int, world_size: int) -> None:
    global _left_by_us
    timeout = timedelta(seconds=_settings.timeout())
    if default_device_type() == "gpu":
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=torch.device("cuda", torch.cuda.current_device()),
        )
    else:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    if not _left_by_us:
        atexit.register(leave)
        _left_by_us = True


# What has to come to its end while the others can still be reached.
_before_leaving: list[Callable[[], object]] = []


def before_leaving(finish: Callable[[], object]) -> None:
    _before_leaving.append(finish)


def leave() -> None:
    """Leave the process group; called at exit, after errors too."""
    with contextlib.ExitStack() as rest:
        rest.callback(_leave_group)
        for finish in reversed(_before_leaving):
            rest.callback(finish)


def _leave_group() -> None:
    global _store, _aside
    _failures.stop()
    _store = _aside = None
    if dist.is_initialized():
        # gloo's threads need the interpreter's lock to drop their last tensors. One that asks for
        # it while the interpreter shuts down aborts the process, so let them have it now.
        time.sleep(0.1)
        dist.destroy_process_group()
