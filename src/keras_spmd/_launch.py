"""`keras_spmd.launch`: a function on several processes, for notebooks and scripts without launcher.

The processes are started afresh, never forked, so it doesn't matter what this one has done to its
GPUs or threads before. They speak with it over a pipe each, and end when it ends.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from keras_spmd import _sending

SECONDS_TO_END = 10.0
IS_RANK = "KERAS_SPMD_LAUNCHED"


def launch(fn: Callable, n: int | None = None, *args: Any, **kwargs: Any) -> list[Any]:
    """Run a function on `n` new processes, the ranks of a job, and return what each returned.

    Example:

    >>> import keras_spmd
    >>> def train(rate):
    ...     import keras
    ...     keras.distribution.set_distribution(keras.distribution.DataParallel())
    ...     return rate * len(keras.distribution.list_devices())
    >>> keras_spmd.launch(train, 2, 0.5)  # doctest: +SKIP
    [1.0, 1.0]

    The function may be a lambda, a closure, or one of a notebook: it is sent with the values that
    it uses. Its results are sent back, so let it return numbers, arrays and the like; with
    single-device semantics they are mostly the same on all ranks. What rank 0 prints appears here.

    Args:
        fn: The function. Each rank calls `fn(*args, **kwargs)`.
        n: How many processes; by default one for each GPU, or 2 on a host without any.

    Raises:
        RuntimeError: A rank failed; with that rank's traceback, and its exception as the cause.
            No processes are left, neither then nor after Ctrl-C.
    """
    _check_place()
    count = _check_count(n)
    payload = _payload(fn, args, kwargs)
    from torch.distributed import TCPStore

    # Held by this process, the meeting point is there before the ranks, and after them.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    try:
        for rank in range(count):
            ranks.append(Rank(rank, count, store.port, payload))
        return _results(ranks)
    finally:
        _end(ranks)


class Rank:
    """One process, the pipe to it, and what it writes."""

    def __init__(self, rank: int, count: int, port: int, payload: bytes) -> None:
        self.rank, self.count = rank, count
        self.errors: IO[bytes] | None = None
        self.relays: list[threading.Thread] = []
        self.pipe, theirs = Pipe()
        streams = self._streams()
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "keras_spmd._launched", str(theirs.fileno())],
            env=_environment(rank, count, port),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **streams,
        )
        theirs.close()
        self._relay(self.process.stdout, "stdout")
        self._relay(self.process.stderr, "stderr")
        with contextlib.suppress(BrokenPipeError):  # it died at once; `_results` finds out how
            self.pipe.send_bytes(payload)

    def _streams(self) -> dict[str, Any]:
        if self.rank > 0:
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115
            return {"stdout": subprocess.DEVNULL, "stderr": self.errors}
        return {"stdout": _inherited("stdout", 1), "stderr": _inherited("stderr", 2)}

    def _relay(self, source: IO[bytes] | None, name: str) -> None:
        """In a notebook `sys.stdout` is not the process's own."""
        if source is None:
            return

        def copy() -> None:
            for line in source:
                getattr(sys, name).write(line.decode(errors="replace"))

        self.relays.append(threading.Thread(target=copy, daemon=True))
        self.relays[-1].start()

    def death(self) -> str:
        """How the process ended, without a word."""
        code = self.process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        written = b""
        if self.errors is not None:
            self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 8192))
            written = self.errors.read().strip()
        return f"the process ended with {how}.\n{written.decode(errors='replace')}".strip()


def _inherited(name: str, number: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if getattr(sys, name).fileno() == number:
            return None
    return subprocess.PIPE


def _check_place() -> None:
    backend = os.environ.get("KERAS_BACKEND", "torch")
    if backend != "torch":
        raise ValueError(
            f"keras_spmd.launch() starts processes for Keras on torch, and KERAS_BACKEND is "
            f"'{backend}'. On other backends call the function itself."
        )
    if IS_RANK in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            f"keras_spmd.launch() was called in rank {os.environ.get('RANK')} of a job. Call the "
            "function itself there; in a script that launches, do it behind "
            'if __name__ == "__main__":'
        )


def _check_count(n: int | None) -> int:
    import torch

    on_cpu = os.environ.get("KERAS_TORCH_DEVICE", "").startswith("cpu")
    gpus = 0 if on_cpu else torch.cuda.device_count()
    if n is not None and (not isinstance(n, int) or isinstance(n, bool)):
        raise TypeError(
            f"keras_spmd.launch(fn, n, *args): n must be a number of processes, got {n!r}."
        )
    if n is not None and n < 1:
        raise ValueError(f"keras_spmd.launch() needs at least one process, got n={n}.")
    if n is not None and gpus and n > gpus:
        raise ValueError(
            f"keras_spmd.launch() got n={n}, and this host has {gpus} GPUs: each process needs one "
            "of its own. Set KERAS_TORCH_DEVICE=cpu to run on CPUs."
        )
    if gpus and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 0:
        from keras_spmd._notices import warn_once

        warn_once(
            "launch on a used gpu",
            f"This process holds {torch.cuda.memory_reserved() / 2**30:.1f} GiB of GPU "
            f"{torch.cuda.current_device()}, which one of the launched ranks uses, too. Make "
            "models and tensors inside the function only, or free them before.",
        )
    return n if n is not None else gpus or 2


def _payload(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> bytes:
    if not callable(fn):
        raise TypeError(f"keras_spmd.launch(fn, n, *args): fn must be a function, got {fn!r}.")
    try:
        call = _sending.dumps((fn, args, kwargs))
    except Exception as error:  # whatever the pickling of a user's object may raise
        named = {f"{i + 1}": value for i, value in enumerate(args)} | kwargs
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"keras_spmd.launch() can't send '{name}' to other processes, because of "
            f"{_sending.why_not(fn, named)}."
        ) from error
    return pickle.dumps((sys.path, call))


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    from keras_spmd.commands.run import cores

    return {
        "OMP_NUM_THREADS": str(max(1, cores() // count)),
        **os.environ,
        "KERAS_BACKEND": "torch",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        IS_RANK: "1",
    }


def _results(ranks: list[Rank]) -> list[Any]:
    results: dict[int, Any] = {}
    waiting: dict[Connection, Rank] = {rank.pipe: rank for rank in ranks}
    while waiting:
        for pipe in wait(list(waiting)):
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                kind, value, *more = pickle.loads(rank.pipe.recv_bytes())
            except (EOFError, OSError):
                raise RuntimeError(f"Rank {rank.rank} of {rank.count}: {rank.death()}") from None
            if kind == "error":
                cause = pickle.loads(more[0]) if more[0] is not None else None
                message = f"Rank {rank.rank} of {rank.count} failed:\n{value}"
                raise RuntimeError(message) from cause
            results[rank.rank] = pickle.loads(value)
    return [results[rank.rank] for rank in ranks]


def _end(ranks: list[Rank]) -> None:
    """Let ranks that are done leave; end the others."""
    is_failure = sys.exc_info()[0] is not None
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.pipe.send_bytes(b"end")
    if is_failure:
        _signal(ranks, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_END
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
    if is_failure or any(rank.process.poll() is None for rank in ranks):
        _signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        for thread in rank.relays:
            thread.join(timeout=1)
        for closable in (rank.pipe, rank.errors, rank.process.stdout, rank.process.stderr):
            if closable is not None:
                closable.close()


def _signal(ranks: list[Rank], number: signal.Signals) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, number)
