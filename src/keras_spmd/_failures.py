"""A rank that fails takes the others along, and its traceback is the one that is shown.

Ranks wait for each other in collectives, so when one of them dies of an exception the others would
hang, or fail with a message about a closed connection. The one that fails writes its traceback into
the job's store; the others look there once a second, and end.

Each rank also leaves a sign there that it is alive, with the line of the program that it was at
last. One that gives no sign for too long (it was stopped, or its host is gone) is named, and the
others end.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

import torch.distributed as dist

from keras_spmd import _settings, _whereabouts

INTERVAL = 1.0
FIRST, TEXT, HEARD = "failure/first", "failure/text", "failure/heard"
ENDED = "has ended"
# The store may be gone, with the process that held it.
_UNREACHABLE = (dist.DistError, RuntimeError)


class Watch:
    """Tells the others of this rank's failure, and this rank of theirs."""

    def __init__(
        self, store: dist.Store, own_store: dist.Store, rank: int, world_size: int
    ) -> None:
        self.store, self.own_store, self.rank, self.world_size = store, own_store, rank, world_size
        self.signs = _Signs(self.own_store, rank, world_size)
        _whereabouts.note()
        self.signs.give()
        self.stopped, self.over = threading.Event(), threading.Event()
        self.last_answer = time.monotonic()
        # When patience ends, if this rank is already on its way to its end.
        self.deadline: float | None = None
        self.previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        self.threads = [
            threading.Thread(target=target, name=f"keras_spmd {name}", daemon=True)
            for name, target in (("watch", self._look), ("patience", self._be_patient))
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.threads[0].join()
        self.over.set()
        with contextlib.suppress(*_UNREACHABLE):
            self.signs.give(ENDED)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self.previous_hook

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        _ending.set()
        now = time.monotonic()
        # A store that has been silent for a while won't answer, most likely.
        is_silent = now - self.last_answer > 3 * INTERVAL
        self.deadline = now + (3 * INTERVAL if is_silent else _settings.timeout())
        text = "".join(traceback.format_exception(kind, error, trace))
        if kind is KeyboardInterrupt:
            text = "KeyboardInterrupt\n"
        if not self._is_first(text):
            self._say(f"ends, because rank {self._first()} failed (see there).")
            return
        self.previous_hook(kind, error, trace)
        sys.stderr.flush()
        self._wait_until_heard(self.store)
        if _is_about_others(error):
            # They have heard, and said where they are.
            self._say(f"waited for others. {self._about_others()}")

    def _about_others(self) -> str:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return " ".join(self._about(rank) for rank in others[:16])

    def _about(self, rank: int) -> str:
        with contextlib.suppress(*_UNREACHABLE):
            seconds = self.signs.silence_of(rank)
            if seconds > 3 * INTERVAL:
                return _about_silent(rank, seconds, self.signs.read([rank])[0][1])
        return whereabouts(rank)

    def _is_first(self, text: str, rank: int | None = None) -> bool:
        with contextlib.suppress(*_UNREACHABLE):
            if self.store.add("failure/claims", 1) > 1:
                return False
            self.store.set(TEXT, text)
            self.store.set(FIRST, str(self.rank if rank is None else rank))
        return True

    def _first(self) -> str:
        with contextlib.suppress(*_UNREACHABLE):
            return self.store.get(FIRST).decode()
        return "0"

    def _wait_until_heard(self, store: dist.Store) -> None:
        """The store may live in this process: the others need it to hear what happened."""
        deadline = time.monotonic() + 3 * INTERVAL
        with contextlib.suppress(*_UNREACHABLE):
            while time.monotonic() < deadline:
                if store.add(HEARD, 0) >= self.world_size - 1:
                    return
                time.sleep(0.05)

    def _look(self) -> None:
        while not self.stopped.wait(INTERVAL):
            try:
                self.signs.give()
                self.last_answer = time.monotonic()
                if not self.own_store.check([FIRST]):
                    self._look_for_silent()
                    continue
                self.signs.give(_whereabouts.of_main_thread())
                rank = self.own_store.get(FIRST).decode()
                text = self.own_store.get(TEXT).decode()
                self.own_store.add(HEARD, 1)
            except _UNREACHABLE:
                self.over.set()
                return  # The process that held the store has ended, as it should at the end.
            if self.stopped.is_set():
                return
            lowest = 0 if rank != "0" else 1
            if self.rank == lowest:
                self._say(f"ends, because rank {rank} failed:\n{text}")
            else:
                self._say(f"ends, because rank {rank} failed.")
            self._wait_until_heard(self.own_store)
            self._end()

    def _be_patient(self) -> None:
        """End if the store, which the other thread asks, never answers: torch waits forever."""
        while not self.over.wait(INTERVAL):
            now = time.monotonic()
            waited = now - self.last_answer
            if now > (self.deadline or self.last_answer + _settings.timeout() + 2 * INTERVAL):
                self._end(
                    f"ends, because the job's meeting point gave no answer for {waited:.0f} s: "
                    "rank 0 (or the launcher of the first host) is stopped, or can't be reached. "
                    f"This rank is {_whereabouts.of_main_thread()}. KERAS_SPMD_TIMEOUT sets how "
                    "many seconds to wait."
                )

    def _look_for_silent(self) -> None:
        silent = self.signs.silent()
        if silent is None:
            return
        rank, seconds, where = silent
        text = _about_silent(rank, seconds, where)
        text += " KERAS_SPMD_TIMEOUT sets how many seconds to wait.\n"
        if self._is_first(text, rank):
            self._say(f"ends. {text}".rstrip())
            self._wait_until_heard(self.own_store)
            self._end()

    def _end(self, why: str = "") -> None:
        if why:
            self._say(why)
        sys.stdout.flush()
        os._exit(1)

    def _say(self, what: str) -> None:
        if _settings.failure_was_shown():
            return
        sys.stderr.write(f"keras_spmd: rank {self.rank} {what}\n")
        sys.stderr.flush()


class _Signs:
    """Signs of life. Rank 0 looks for those of all ranks, and rank 1 for those of rank 0."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.count = store, rank, 0
        self.watched = list(range(1, world_size)) if rank == 0 else [0] if rank == 1 else []
        self.seen: dict[int, tuple[Any, float]] = {}

    def give(self, where: str | None = None) -> None:
        self.count += 1
        sign = [self.count, where or _whereabouts.noted()]
        self.store.set(_sign_of(self.rank), json.dumps(sign))

    def silent(self) -> tuple[int, float, str] | None:
        """A rank that gave no sign for too long, for how long, and where it was."""
        there = [r for r in self.watched if r in self.seen or self.store.check([_sign_of(r)])]
        now = time.monotonic()
        for rank, (count, where) in zip(there, self.read(there), strict=True):
            before, since = self.seen.get(rank, (None, now))
            if count != before or where == ENDED:
                self.seen[rank] = (count, now)
            elif now - since > _settings.timeout():
                return rank, now - since, where
        return None

    def silence_of(self, rank: int) -> float:
        """For how many seconds a rank gave no sign; 0 if that isn't known."""
        if rank not in self.seen:
            return 0.0
        before, since = self.seen[rank]
        ((count, where),) = self.read([rank])
        return 0.0 if count != before or where == ENDED else time.monotonic() - since

    def read(self, ranks: list[int]) -> list[Any]:
        """The last signs of ranks that gave one: a count, and where they were."""
        words = self.store.multi_get([_sign_of(r) for r in ranks]) if ranks else []
        return [json.loads(word) for word in words]


def _about_silent(rank: int, seconds: float, where: str) -> str:
    return (
        f"Rank {rank} gave no sign for {seconds:.0f} s: it is stopped, or its host can't be "
        f"reached. It was {where}."
    )


def _sign_of(rank: int) -> str:
    return f"sign/{rank}"


def _is_about_others(error: BaseException) -> bool:
    """Whether it is a collective that failed, and not what this rank did."""
    text = str(error).lower()
    words = ("gloo", "nccl", "timed out", "timeout", "connection closed", "connection reset")
    return isinstance(error, (dist.DistError, TimeoutError)) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


_watch: Watch | None = None
_ending = threading.Event()


def is_ending() -> bool:
    """Whether this process ends with an error: what threads wait for will never come."""
    return _ending.is_set()


def whereabouts(rank: int) -> str:
    """What a rank was doing when it gave its last sign of life; nothing if that isn't known."""
    if _watch is None:
        return ""
    with contextlib.suppress(*_UNREACHABLE):
        if _watch.store.check([_sign_of(rank)]):
            _, where = json.loads(_watch.store.get(_sign_of(rank)))
            return f"Rank {rank} {where if where == ENDED else f'is {where}'}."
    return ""


def start(store: dist.Store, own_store: dist.Store, rank: int, world_size: int) -> None:
    """Watch the other ranks, until `stop`; `own_store` is never waiting for an answer."""
    global _watch
    if world_size > 1 and _watch is None:
        _watch = Watch(store, own_store, rank, world_size)


def stop() -> None:
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None
