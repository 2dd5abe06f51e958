"""What the ranks of this host write: each line with its rank in front, or kept for a bad end."""

import contextlib
import os
import selectors
import sys
import threading
from collections.abc import Iterator

KEPT = 64 * 1024
INTERVAL = 0.1


class Streams:
    """Reads the pipes that ranks write into, by name, since launchers don't hand them down.

    Args:
        folder: Where the pipes are made.
        count: How many ranks this host has.
        prefixed: Whether lines are printed as they come; otherwise the last ones are kept.
    """

    def __init__(self, folder: str, count: int, *, prefixed: bool) -> None:
        self.folder, self.prefixed = folder, prefixed
        self.kept = [b""] * count
        self.partial: dict[int, bytes] = {}
        self.stopped = threading.Event()
        self.selector = selectors.DefaultSelector()
        for local_rank in range(count):
            for kind in ("out", "err"):
                path = os.path.join(folder, f"{local_rank}.{kind}")
                os.mkfifo(path)
                # Opened for both, a pipe has no end before its first writer, nor after its last.
                pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                self.selector.register(pipe, selectors.EVENT_READ, (local_rank, kind))
        self.thread = threading.Thread(target=self._read, name="keras-spmd output", daemon=True)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        self.thread.start()
        try:
            yield
        finally:
            self.stopped.set()
            self.thread.join()

    def _read(self) -> None:
        while True:
            # What is there when the ranks have ended is read, too.
            is_last = self.stopped.is_set()
            ready = self.selector.select(0 if is_last else INTERVAL)
            for key, _ in ready:
                self._take(key.fd, *key.data)
            if is_last and not ready:
                break
        for key in list(self.selector.get_map().values()):
            if self.partial.get(key.fd):
                local_rank, kind = key.data
                self._write(local_rank, kind, self.partial[key.fd] + b"\n")
            os.close(key.fd)
        self.selector.close()

    def _take(self, pipe: int, local_rank: int, kind: str) -> None:
        chunk = os.read(pipe, 65536)
        if not self.prefixed:
            self.kept[local_rank] = (self.kept[local_rank] + chunk)[-KEPT:]
            return
        whole, newline, rest = (self.partial.get(pipe, b"") + chunk).rpartition(b"\n")
        self.partial[pipe] = rest
        if newline:
            self._write(local_rank, kind, whole + newline)

    def _write(self, local_rank: int, kind: str, lines: bytes) -> None:
        prefix = f"[{self._rank(local_rank)}] ".encode()
        stream = sys.stdout.buffer if kind == "out" else sys.stderr.buffer
        stream.write(b"".join(prefix + line for line in lines.splitlines(keepends=True)))
        stream.flush()

    def _rank(self, local_rank: int) -> str:
        with open(os.path.join(self.folder, f"{local_rank}.pid")) as file:
            return file.read().split()[1]
