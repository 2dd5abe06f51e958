"""Start a script on all devices of this host, or of many: torchrun with fewer things to know.

Every option of torchrun works, and stands before the script; what stands behind it is the script's.
Without -n there is a process for each GPU, or two processes on a host without GPUs.

examples:
  keras-spmd run train.py --epochs 3
  keras-spmd run -n 4 --output prefix train.py
  keras-spmd run -n 2 -m my_package.train
  keras-spmd run --max-restarts 2 train.py
  keras-spmd run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29500 train.py
  keras-spmd run --nnodes 4 -n 8 --print slurm train.py > train.sbatch
"""

import argparse
import os

from keras_spmd.commands import Mistake, _printing, _torchrun

USAGE = "keras-spmd run [-n N] [--output rank0|prefix|all] [any option of torchrun] script.py ..."


def parents() -> list[argparse.ArgumentParser]:
    return [_torchrun.parser()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("options of keras-spmd")
    own.add_argument("-n", type=int, metavar="N", help="processes on each host: one for each GPU")
    own.add_argument(
        "--output",
        choices=("rank0", "prefix", "all"),
        default="rank0",
        help="rank0: what rank 0 writes, as it is, and of other ranks only why they failed; "
        "prefix: every line of every rank, behind its number; all: everything as it is",
    )
    own.add_argument(
        "--print",
        choices=tuple(_printing.KINDS),
        dest="print_as",
        help="print the file for Slurm's sbatch, or the commands for many hosts, and start nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    _check_script(arguments)
    arguments.nproc_per_node = str(count_of(arguments))
    if arguments.print_as:
        print(_printing.KINDS[arguments.print_as](arguments), end="")
        return 0
    set_environment(int(arguments.nproc_per_node))
    return _torchrun.run(arguments)


def count_of(arguments: argparse.Namespace) -> int:
    """How many processes this host gets."""
    asked = _torchrun.given_count(arguments)
    if arguments.n is not None and asked is not None:
        raise Mistake(f"-n {arguments.n} and --nproc-per-node {asked} mean the same; give one.")
    count = arguments.n if arguments.n is not None else asked
    gpus = _torchrun.gpu_count()
    if count is None:
        return gpus or 2
    if count < 1:
        raise Mistake(f"-n must be at least 1, got {count}.")
    if gpus and count > gpus and not arguments.print_as:
        raise Mistake(
            f"{count} processes need as many GPUs, and this host has {gpus}. Use -n {gpus}, or set "
            "KERAS_TORCH_DEVICE=cpu to run on CPUs."
        )
    return count


def set_environment(count: int) -> None:
    """What every rank finds in its environment: the backend, and its share of the cores."""
    backend = os.environ.get("KERAS_BACKEND", "torch")
    if backend != "torch":
        raise Mistake(
            f"KERAS_BACKEND is '{backend}', and keras-spmd is for 'torch'. On other backends start "
            "the script with python; or `export KERAS_BACKEND=torch`."
        )
    os.environ["KERAS_BACKEND"] = "torch"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_script(arguments: argparse.Namespace) -> None:
    script = arguments.training_script
    is_file = not arguments.module and not arguments.no_python
    if is_file and not arguments.print_as and not os.path.exists(script):
        raise Mistake(
            f"there is no file '{script}' in {os.getcwd()}. For a module, use -m {script}; for a "
            "program that is not Python, --no-python."
        )
