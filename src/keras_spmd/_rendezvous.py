"""Where the processes of this job meet: read from arguments, torchrun's or Slurm's variables."""

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of a job, and this process's place in it."""

    host: str
    port: int
    rank: int
    world_size: int
    local_rank: int
    source: str
    agent_store: bool = False

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def from_arguments(
    job_addresses: str | None, num_processes: int | None, process_id: int | None
) -> Rendezvous:
    """The arguments of `keras.distribution.initialize`, or its environment variables."""
    addresses = [a.strip() for a in (job_addresses or "").split(",") if a.strip()]
    if not addresses and "MASTER_ADDR" in os.environ:
        addresses = [f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '29500')}"]
    if not addresses:
        raise ValueError(
            "keras.distribution.initialize() got num_processes or process_id but no "
            "`job_addresses`. Pass the coordinator's address, e.g. job_addresses='10.0.0.1:1234'."
        )
    if len(addresses) > 1:
        if num_processes is not None and num_processes != len(addresses):
            raise ValueError(
                f"The provided job_addresses {addresses} has {len(addresses)} jobs, "
                f"but num_processes is {num_processes}."
            )
        num_processes = len(addresses)
    if num_processes is None or process_id is None:
        missing = "num_processes" if num_processes is None else "process_id"
        raise ValueError(
            f"keras.distribution.initialize() needs `{missing}` beside job_addresses="
            f"{job_addresses!r}. Pass it, or set KERAS_DISTRIBUTION_{missing.upper()}."
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id must be between 0 and num_processes - 1 = {num_processes - 1}, "
            f"got {process_id}."
        )
    host, colon, port = addresses[0].rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(
            f"The coordinator's address {addresses[0]!r} must be 'host:port', e.g. '10.0.0.1:1234'."
        )
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", process_id)))
    return Rendezvous(
        host.strip("[]"),
        int(port),
        process_id,
        num_processes,
        local_rank,
        "the arguments of keras.distribution.initialize()",
    )


def from_torchrun() -> Rendezvous | None:
    """The variables that torchrun (or anything that speaks its protocol) sets."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in needed):
        return None
    return Rendezvous(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
        "torchrun's environment variables",
        # torchrun's own agent already serves a store at this address: rank 0 must not open another.
        agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def from_slurm() -> Rendezvous | None:
    """The variables that `srun` sets for each task of a step."""
    needed = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes or any(name not in os.environ for name in needed):
        return None
    # Every task must come to the same port without talking to the others first.
    port = os.environ.get("MASTER_PORT") or 20000 + int(os.environ["SLURM_JOB_ID"]) % 20000
    return Rendezvous(
        os.environ.get("MASTER_ADDR") or first_slurm_host(nodes),
        int(port),
        int(os.environ["SLURM_PROCID"]),
        int(os.environ["SLURM_NTASKS"]),
        int(os.environ.get("SLURM_LOCALID", 0)),
        "Slurm's environment variables",
    )


def first_slurm_host(node_list: str) -> str:
    """The first host of a Slurm node list.

    >>> first_slurm_host("gpu[007-009,012],login1")
    'gpu007'
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", node_list)
    if match is None:
        raise ValueError(f"Cannot read the Slurm node list {node_list!r}.")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")
