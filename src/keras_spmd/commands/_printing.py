"""The same job as a file for Slurm's `sbatch`, or as a command for each of many hosts."""

import argparse
import shlex
import sys
from collections.abc import Callable

from keras_spmd.commands import _torchrun

# What the printed commands say themselves, or say in their place.
_SAID = (
    *("help", "nproc_per_node", "nnodes", "module", "no_python", "standalone"),
    *("training_script", "training_script_args", "node_rank", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id"),
)


def slurm(arguments: argparse.Namespace) -> str:
    """One launcher on each node, which starts the ranks of that node."""
    nodes, count = _nodes(arguments), int(arguments.nproc_per_node)
    return f"""\
#!/bin/bash
#SBATCH --job-name={_name(arguments)}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={count}
#SBATCH --cpus-per-task={8 * count}
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out

# Submit with: sbatch this_file. Adjust the time, the cores, and the partition if there are several.
set -euo pipefail
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export KERAS_BACKEND=torch

# Each task starts the {count} ranks of its node; they meet at the first node.
srun --kill-on-bad-exit=1 {_launcher()} run -n {count} \\
    --nnodes {nodes} --rdzv-backend c10d \\
    --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head_node:{_torchrun.PORT}" \\
    {_program(arguments)}
"""


def hosts(arguments: argparse.Namespace) -> str:
    """The same command on every host, but for the number of the host."""
    nodes, count = _nodes(arguments), int(arguments.nproc_per_node)
    address = getattr(arguments, "master_addr", None)
    head = address if address not in (None, "127.0.0.1") else "HOST0"
    port = getattr(arguments, "master_port", None) or _torchrun.PORT
    lines = [
        f"# {nodes} hosts with {count} processes each. {head} is the first host's name or address;",
        f"# its port {port} must be open to the others. Start them within five minutes.",
    ]
    for node in range(nodes):
        lines += [
            f"\n# on host {node}:",
            f"keras-spmd run -n {count} --nnodes {nodes} --node-rank {node} "
            f"--master-addr {head} --master-port {port} {_program(arguments)}",
        ]
    return "\n".join(lines) + "\n"


KINDS: dict[str, Callable[[argparse.Namespace], str]] = {"slurm": slurm, "hosts": hosts}


def _nodes(arguments: argparse.Namespace) -> int:
    nodes = int(str(arguments.nnodes).split(":")[-1])
    # Who asks for many hosts without a number gets an example with two.
    return nodes if nodes > 1 else 2


def _program(arguments: argparse.Namespace) -> str:
    options = _further_options(arguments)
    options += ["-m"] if arguments.module else ["--no-python"] if arguments.no_python else []
    return shlex.join([*options, arguments.training_script, *arguments.training_script_args])


def _further_options(arguments: argparse.Namespace) -> list[str]:
    """The other options of torchrun that the user gave."""
    options = [] if arguments.output == "rank0" else ["--output", arguments.output]
    for action in _torchrun.parser()._actions:
        value = getattr(arguments, action.dest, action.default)
        if action.dest in _SAID or value == action.default or value is None:
            continue
        options += [action.option_strings[0]] + ([] if value is True else [str(value)])
    return options


def _launcher() -> str:
    return shlex.join([sys.executable, "-m", "keras_spmd"])


def _name(arguments: argparse.Namespace) -> str:
    return arguments.training_script.split("/")[-1].removesuffix(".py")
