"""A rank that fails takes the others along, and its traceback is the one that is shown.

Ranks wait for each other in collectives, so when one of them dies of an exception the others would
hang, or fail with a message about a closed connection. The one that fails writes its traceback into
the job's store; the others look there once a second, and end.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

import torch.distributed as dist

INTERVAL = 1.0
FIRST, TEXT, HEARD = "failure/first", "failure/text", "failure/heard"


class Watch:
    """Tells the others of this rank's failure, and this rank of theirs."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        # A connection of its own: the other one may be waiting for an answer.
        self.own_store = store.clone()
        self.stopped = threading.Event()
        self.previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        self.thread = threading.Thread(target=self._look, name="keras_spmd watch", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self.previous_hook

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        if kind is KeyboardInterrupt:
            self.previous_hook(kind, error, trace)
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        if not self._is_first(text):
            self._say(f"ends, because rank {self._first()} failed (see there).")
            return
        self.previous_hook(kind, error, trace)
        sys.stderr.flush()
        self._wait_until_heard(self.store)

    def _is_first(self, text: str) -> bool:
        # The store may be gone, with the process that held it.
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self.store.add("failure/claims", 1) > 1:
                return False
            self.store.set(TEXT, text)
            self.store.set(FIRST, str(self.rank))
        return True

    def _first(self) -> str:
        with contextlib.suppress(dist.DistError, RuntimeError):
            return self.store.get(FIRST).decode()
        return "0"

    def _wait_until_heard(self, store: dist.Store) -> None:
        """The store may live in this process: the others need it to hear what happened."""
        deadline = time.monotonic() + 3 * INTERVAL
        with contextlib.suppress(dist.DistError, RuntimeError):
            while time.monotonic() < deadline:
                if store.add(HEARD, 0) >= self.world_size - 1:
                    return
                time.sleep(0.05)

    def _look(self) -> None:
        while not self.stopped.wait(INTERVAL):
            try:
                if not self.own_store.check([FIRST]):
                    continue
                rank = self.own_store.get(FIRST).decode()
                text = self.own_store.get(TEXT).decode()
                self.own_store.add(HEARD, 1)
            except (dist.DistError, RuntimeError):
                return  # The process that held the store has ended, as it should at the end.
            if self.stopped.is_set():
                return
            lowest = 0 if rank != "0" else 1
            if self.rank == lowest:
                self._say(f"ends, because rank {rank} failed:\n{text}")
            else:
                self._say(f"ends, because rank {rank} failed.")
            sys.stdout.flush()
            self._wait_until_heard(self.own_store)
            os._exit(1)

    def _say(self, what: str) -> None:
        sys.stderr.write(f"keras_spmd: rank {self.rank} {what}\n")
        sys.stderr.flush()


_watch: Watch | None = None


def start(store: Any, rank: int, world_size: int) -> None:
    """Watch the other ranks, until `stop`."""
    global _watch
    if world_size > 1 and _watch is None:
        _watch = Watch(store, rank, world_size)


def stop() -> None:
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None
