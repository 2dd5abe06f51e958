"""A spinner, or a bar, while something takes long; on rank 0.

What is not a terminal, a log for instance, gets a line about what takes really long, and one when
it is done.

with progress("Compiling the train step"):
    ...

with progress("Reading files", total=len(files)) as advance:
    for file in files:
        ...
        advance()

with progress_of_bytes("Saving 'model.keras'", total=size) as advance:
    for variable in variables:
        ...
        advance(variable.nbytes)
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_spmd import _settings

_is_shown = False
# Files are small more often than not: a bar that is gone in a moment is in the way.
MOMENT = 0.5
LONG = 10.0  # seconds after which a log is told


@contextlib.contextmanager
def progress(what: str, *, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show what is being done and for how long, until the block ends.

    Example:

    >>> from keras_spmd._progress import progress
    >>> with progress("Counting", total=3) as advance:
    ...     for _ in range(3):
    ...         advance()

    Args:
        what: What is being done, without dots at its end.
        total: How many parts it has; each call of the function that the block gets is one of them
            (or as many as its argument says). Without a total the spinner shows the time alone.
    """
    global _is_shown
    if not _has_terminal() or not _wants_to_be_seen():
        with _told_in_lines(what):
            yield _ignore
        return
    bar = _new_bar(total)
    task = bar.add_task(what, total=total)
    _is_shown = True
    try:
        with bar:
            yield lambda count=1: bar.advance(task, count)
    finally:
        _is_shown = False


@contextlib.contextmanager
def progress_of_bytes(what: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are done, of how many and how fast, once that takes more than a moment.

    Args:
        what: What is being done, without dots at its end.
        total: How many bytes there are, if that is known. The block gets a function that is told of
            those that are done.
    """
    if not _has_terminal() or not _wants_to_be_seen():
        with _told_in_lines(what):
            yield _ignore
        return
    late = _Late(what, total)
    try:
        yield late.advance
    finally:
        late.stop()


@contextlib.contextmanager
def _told_in_lines(what: str) -> Iterator[None]:
    global _is_shown
    if not _wants_to_be_seen():
        yield
        return
    start = time.monotonic()
    timer = threading.Timer(LONG, _write_line, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    _is_shown = True
    try:
        yield
    finally:
        _is_shown = False
        timer.cancel()
    seconds = time.monotonic() - start
    if seconds > LONG:
        _write_line(f"{what} took {seconds:.0f} s")


def _write_line(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # of a stream that was closed meanwhile
        sys.stderr.write(f"keras-spmd: {text}\n")
        sys.stderr.flush()


class _Late:
    """A bar that appears when a moment has passed."""

    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total = what, total
        self.start, self.done = time.monotonic(), 0
        self.bar: Any = None
        self.task: Any = None

    def advance(self, count: int) -> None:
        global _is_shown
        self.done += count
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done)
        elif time.monotonic() - self.start > MOMENT and not _is_shown:
            self.bar, _is_shown = _new_bar_of_bytes(self.total), True
            self.task = self.bar.add_task(self.what, total=self.total, completed=self.done)
            self.bar.start()

    def stop(self) -> None:
        global _is_shown
        if self.bar is not None:
            self.bar.stop()
            _is_shown = False


def _ignore(count: int = 1) -> None:
    return None


def _wants_to_be_seen() -> bool:
    # One display at a time: what happens inside a longer thing is a part of it.
    if _is_shown or os.environ.get("RANK", "0") != "0" or not _settings.progress():
        return False
    return sys.stderr is not None  # some hosts have none at all


def _has_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _new_bar(total: int | None) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn

    return _bar_of(*([] if total is None else [BarColumn(), MofNCompleteColumn()]))


def _new_bar_of_bytes(total: int | None) -> Any:
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn

    bar = [] if total is None else [BarColumn()]
    return _bar_of(*bar, DownloadColumn(), TransferSpeedColumn())


def _bar_of(*columns: Any) -> Any:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    return Progress(
        *(SpinnerColumn(), text, *columns, TimeElapsedColumn()),
        console=Console(stderr=True),
        transient=True,
        # What others print meanwhile is theirs, and tests may have put a stream of their own there.
        redirect_stdout=False,
        redirect_stderr=False,
    )
