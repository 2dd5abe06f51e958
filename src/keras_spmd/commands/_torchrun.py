"""torchrun, called from here: its options, its processes, and how they end."""

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from keras_spmd.commands import Mistake
from keras_spmd.commands._streams import Streams

SECONDS_TO_END = 10
PORT = 29500  # torchrun's, where several hosts meet


def parser() -> argparse.ArgumentParser:
    """torchrun's parser, with names of ours for what the user leaves out."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    for action in parser._actions:
        if action.dest == "training_script":
            action.metavar, action.help = "script.py", "what to run, with its arguments behind it"
        elif action.dest == "training_script_args":
            action.metavar, action.help = "...", argparse.SUPPRESS
        elif action.dest == "nproc_per_node":
            # Else a given "1" and none at all would look the same.
            action.default = os.environ.get("PET_NPROC_PER_NODE")
        elif action.dest == "master_port" and action.default is not None:
            action.default = os.environ.get("PET_MASTER_PORT")
    return parser


def given_count(arguments: argparse.Namespace) -> int | None:
    """What --nproc-per-node says, in torchrun's words: a number, or 'cpu', 'gpu', 'auto'."""
    if arguments.nproc_per_node is None:
        return None
    from torch.distributed.run import determine_local_world_size

    try:
        return determine_local_world_size(arguments.nproc_per_node)
    except ValueError as error:
        raise Mistake(f"--nproc-per-node {arguments.nproc_per_node}: {error}") from error


def gpu_count() -> int:
    """The GPUs that ranks would use. Counting them doesn't start CUDA."""
    import torch

    wants_cpu = os.environ.get("KERAS_TORCH_DEVICE", "").startswith("cpu")
    return 0 if wants_cpu else torch.cuda.device_count()


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks, wait for them, and return the exit code of the job."""
    folder = tempfile.mkdtemp(prefix="keras_spmd_run_")
    try:
        return Job(arguments, Path(folder)).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Job:
    """The ranks of this host, from their start to their end."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.count = int(arguments.nproc_per_node)
        self.interrupts = 0

    def run(self) -> int:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        _quieten()
        _choose_meeting_point(self.arguments)
        output = self.arguments.output
        os.environ["KERAS_SPMD_RUN_FOLDER"] = str(self.folder)
        os.environ["KERAS_SPMD_RUN_OUTPUT"] = output
        streams = Streams(str(self.folder), self.count, prefixed=output == "prefix")
        self._direct_to_ranks()
        try:
            with streams.reading(), self._interruptible(SignalException):
                torchrun.run(self.arguments)
            return 0
        except ChildFailedError as error:
            self._kill()
            return self._report(error.failures, streams)
        except SignalException as end:
            self._kill()
            return 128 + end.sigval
        except KeyboardInterrupt:
            self._kill()
            return 130
        except (AssertionError, ValueError) as error:  # of torchrun, about its options
            raise Mistake(str(error)) from error

    def _direct_to_ranks(self) -> None:
        """Have torchrun start `_rank.py`, which runs the script."""
        given = self.arguments
        if given.module and given.no_python:
            raise Mistake("-m is for Python modules and --no-python for other programs; give one.")
        # A folder or an archive is run by Python itself.
        if not given.module and not given.no_python and not os.path.isfile(given.training_script):
            given.no_python = True
            given.training_script_args = ["-u", given.training_script, *given.training_script_args]
            given.training_script = sys.executable
        kind = "module" if given.module else "program" if given.no_python else "script"
        start = ["-u", str(Path(__file__).with_name("_rank.py")), kind, given.training_script]
        given.training_script_args = [*start, *given.training_script_args]
        given.training_script = os.environ.get("PYTHON_EXEC", sys.executable)
        given.module, given.no_python, given.run_path = False, True, False
        # The agent's handler would not let the ranks know that it was the user who ended them.
        signals = given.signals_to_handle.split(",")
        given.signals_to_handle = ",".join(s for s in signals if s.strip() != "SIGINT")
        if getattr(given, "shutdown_timeout", 0) is None:
            given.shutdown_timeout = SECONDS_TO_END

    @contextlib.contextmanager
    def _interruptible(self, kind: type[Exception]) -> Iterator[None]:
        def interrupt(number: int, frame: FrameType | None) -> None:
            self.interrupts += 1
            if self.interrupts > 1:
                self._kill()
                return
            (self.folder / "interrupted").touch()
            # Not by Python's stream, which may be in the middle of a write.
            with contextlib.suppress(OSError):
                os.write(2, b"\nkeras-spmd: interrupted. Another Ctrl-C ends the ranks at once.\n")
            raise kind("interrupted", signal.SIGINT)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _kill(self) -> None:
        """End what ranks, and the processes that they started, are still there."""
        for file in self.folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, PermissionError, ValueError, IndexError):
                os.killpg(int(file.read_text().split()[0]), signal.SIGKILL)

    def _report(self, failures: dict[int, Any], streams: Streams) -> int:
        rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
        claims = sorted(self.folder.glob("failed.*"), key=lambda path: int(path.suffix[1:]))
        if claims:
            # Waiting for the others to hear of its exception, it may have been ended by a signal.
            first = json.loads(claims[-1].read_text())
            rank, local_rank, code = first["rank"], first["local_rank"], 1
        else:
            local_rank, code = failure.local_rank, failure.exitcode
        kept = streams.kept[local_rank].decode(errors="replace").strip()
        if kept:
            sys.stderr.write(f"keras-spmd: rank {rank} had written to stderr:\n{kept}\n")
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        sys.stderr.write(f"keras-spmd: rank {rank} ended with {how}, and the job with it.\n")
        return code if code >= 0 else 128 - code


def _choose_meeting_point(given: argparse.Namespace) -> None:
    """A free port for a job of one host, as newer versions of torchrun choose it themselves.

    With torch 2.11 all jobs of a host would meet at one port.
    """
    from torch.distributed.run import parse_min_max_nnodes

    if given.master_port is not None:
        return
    given.master_port = PORT
    if given.rdzv_backend == "static" and not given.rdzv_endpoint and not given.standalone:
        given.standalone = parse_min_max_nnodes(given.nnodes)[1] == 1


def _quieten() -> None:
    """torchrun's log repeats what the job itself says; `LOGLEVEL` brings it back."""
    if "LOGLEVEL" not in os.environ:
        for name in logging.root.manager.loggerDict:
            if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
