"""Ranks that stay alive across tests.

    @on_ranks(1, 2, 4)
    def test_something():
        ...  # runs on every rank

A body that fails on a rank fails the test with that rank's traceback. A rank that dies or stalls
fails it too, within seconds, and the ranks are started again for the next test.
"""

import contextlib
import inspect
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
GRACE = 5.0


class RankFailure(AssertionError):
    """What went wrong, with the ranks it went wrong on."""


class Bench:
    """`size` processes that run test bodies together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[subprocess.Popen] = []
        self.pipes: list[Connection] = []
        self.logs: list[Any] = []

    def start(self) -> None:
        port = _free_port()
        for rank in range(self.size):
            ours, theirs = Pipe()
            log = tempfile.TemporaryFile()  # noqa: SIM115
            env = {
                **os.environ,
                "KERAS_BACKEND": "torch",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            }
            if self.size > 1:
                env |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self.size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            process = subprocess.Popen(
                [sys.executable, str(HERE / "bench_worker.py"), str(theirs.fileno())],
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
            self.logs.append(log)

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for closable in [*self.pipes, *self.logs]:
            closable.close()
        self.processes, self.pipes, self.logs = [], [], []

    def run(self, body: Callable, kwargs: dict, timeout: float) -> list[Any]:
        """Run `body` on every rank and return what each returned."""
        if not self.processes:
            self.start()
            timeout += 60  # importing torch and Keras on a busy machine
        task = (inspect.getfile(body), body.__name__, kwargs)
        log_starts = [_size(log) for log in self.logs]
        results: dict[int, tuple[str, Any]] = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send(task)
            except OSError:
                results[rank] = ("died", None)
        deadline = time.monotonic() + timeout
        while len(results) < self.size and time.monotonic() < deadline:
            waiting = [p for r, p in enumerate(self.pipes) if r not in results]
            for pipe in wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
                rank = self.pipes.index(pipe)
                try:
                    results[rank] = pipe.recv()
                except (EOFError, OSError):
                    results[rank] = ("died", None)
                if results[rank][0] != "ok":
                    # The others may be waiting for this one in a collective.
                    deadline = min(deadline, time.monotonic() + GRACE)
        if len(results) == self.size and all(kind == "ok" for kind, _ in results.values()):
            return [results[rank][1] for rank in range(self.size)]
        report = self._report(results, log_starts, timeout)
        if len(results) < self.size or any(kind == "died" for kind, _ in results.values()):
            self.stop()
        raise RankFailure(report)

    def _report(self, results: dict, log_starts: list[int], timeout: float) -> str:
        order = {"error": 0, "died": 1, "stalled": 2}
        rows = []
        for rank in range(self.size):
            kind, what = results.get(rank, ("stalled", None))
            if kind == "ok":
                continue
            log = self.logs[rank]
            log.seek(log_starts[rank])
            printed = log.read().decode(errors="replace")[-4000:].strip()
            if kind == "died":
                code = self.processes[rank].wait()
                what = f"the process died (exit status {code})"
            elif kind == "stalled":
                what = f"did not finish within {timeout:g} s, or waited for a rank that failed"
            rows.append((order[kind], f"--- rank {rank} of {self.size}: {what}\n{printed}".strip()))
        return "\n".join(["", *(text for _, text in sorted(rows))])


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _size(log: Any) -> int:
    return log.seek(0, os.SEEK_END)


_benches: dict[int, Bench] = {}


def bench_of(size: int) -> Bench:
    return _benches.setdefault(size, Bench(size))


def stop_all() -> None:
    for bench in _benches.values():
        bench.stop()


@contextlib.contextmanager
def fresh_bench(size: int) -> Iterator[Bench]:
    """Ranks for a test that must not share them."""
    bench = Bench(size)
    try:
        yield bench
    finally:
        bench.stop()


def sample(names: Iterable[str], *kept: str) -> list[Any]:
    """Parameters of a test, of which all but those that are kept run with `make test-all` only."""
    names = list(names)
    assert set(kept) <= set(names)
    return [n if n in kept else pytest.param(n, marks=pytest.mark.exhaustive) for n in names]


def on_ranks(
    *sizes: int, timeout: float = 180.0, exhaustive: tuple[int, ...] = ()
) -> Callable[[Callable], Callable]:
    """Make a test whose body runs on every rank, once for each number of ranks.

    With the numbers in `exhaustive` it runs with `make test-all` only.
    """

    def decorate(body: Callable) -> Callable:
        def test(ranks: int, **kwargs: Any) -> None:
            __tracebackhide__ = True
            bench_of(ranks).run(body, kwargs, timeout)

        return _as_test(test, body, sizes, exhaustive)

    return decorate


def same_on_ranks(
    *sizes: int,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    timeout: float = 180.0,
    exhaustive: tuple[int, ...] = (),
) -> Callable[[Callable], Callable]:
    """Make a test whose body returns on every rank of a job what it returns in a job of one.

    For what has no reference without a distribution, such as random numbers. A body returns arrays,
    numbers, strings, None, and lists, tuples or dicts of them.
    """
    references: dict[tuple, Any] = {}

    def decorate(body: Callable) -> Callable:
        def test(ranks: int, **kwargs: Any) -> None:
            __tracebackhide__ = True
            key = tuple(sorted(kwargs.items()))
            if key not in references:
                (references[key],) = bench_of(1).run(body, kwargs, timeout)
            for rank, result in enumerate(bench_of(ranks).run(body, kwargs, timeout)):
                assert_equal_results(result, references[key], f"rank {rank}", rtol, atol)

        return _as_test(test, body, sizes, exhaustive)

    return decorate


def _as_test(
    test: Callable, body: Callable, sizes: tuple[int, ...], exhaustive: tuple[int, ...]
) -> Callable:
    """`test` with the name, the doc, the marks and the parameters of the body, for pytest."""
    names = ["ranks", *inspect.signature(body).parameters]
    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    test.__name__, test.__doc__ = body.__name__, body.__doc__
    test.__module__ = body.__module__
    test.body = body  # type: ignore[attr-defined]
    test.pytestmark = list(getattr(body, "pytestmark", []))  # type: ignore[attr-defined]
    marked = [pytest.param(size, marks=pytest.mark.exhaustive) for size in exhaustive]
    return pytest.mark.parametrize("ranks", [*sizes, *marked])(test)


def assert_equal_results(
    actual: Any, expected: Any, where: str, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Nested results are equal, arrays and floats within the tolerances."""
    assert type(actual) is type(expected), f"{where}: {actual!r} is not {expected!r}"
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key, value in expected.items():
            assert_equal_results(actual[key], value, f"{where}[{key!r}]", rtol, atol)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, value in enumerate(expected):
            assert_equal_results(actual[i], value, f"{where}[{i}]", rtol, atol)
    elif isinstance(expected, (float, np.ndarray, np.generic)):
        np.testing.assert_allclose(actual, expected, rtol, atol, err_msg=where)
    else:
        assert actual == expected, where
