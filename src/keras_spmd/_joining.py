"""The meeting point of a job: opening it, and waiting there until every process has come.

A job that torchrun restarts meets in the same store again, where the words of its earlier lives
are. Launchers of several hosts count restarts differently (one that finds its processes healthy,
and restarts them for the sake of another host, doesn't count that). So rank 0 gives each life a
name, and tells it to the processes that ask.
"""

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from keras_spmd import _addresses, _settings
from keras_spmd._rendezvous import Rendezvous

_PAUSE = 0.02
_QUESTIONS, _ANSWERS = "keras_spmd/questions", "keras_spmd/answers"


def join(meeting: Rendezvous) -> dist.Store:
    """The store of this life of the job, once all processes have come."""
    store = _open(meeting)
    deadline = time.monotonic() + _settings.join_timeout()
    answers = None
    if not meeting.agent_store:
        # Rank 0 has opened it a moment ago: nobody was there before.
        name = "keras_spmd"
    elif meeting.rank == 0:
        name = f"keras_spmd/{secrets.token_hex(8)}"
        answers = _Answers(store, name)
    else:
        name = _asked_name(store, meeting, deadline)
    ours = dist.PrefixStore(name, store)
    _await_all(ours, meeting, deadline, answers)
    return ours


def _open(meeting: Rendezvous) -> dist.Store:
    is_master = meeting.rank == 0 and not meeting.agent_store
    try:
        return dist.TCPStore(
            meeting.host,
            meeting.port,
            is_master=is_master,
            timeout=timedelta(seconds=_settings.join_timeout()),
            wait_for_workers=False,
        )
    except (dist.DistStoreError, dist.DistNetworkError, ValueError) as error:
        role = (
            "could not open the meeting point"
            if is_master
            else f"waited {_settings.join_timeout():g} s, but process 0 never answered"
        )
        raise RuntimeError(
            f"Process {meeting.rank} of {meeting.world_size} {role} at {meeting.address} "
            f"(from {meeting.source}). Is the address right, is the port free and open between "
            "the hosts, and did process 0 start? KERAS_SPMD_JOIN_TIMEOUT sets how many seconds "
            "to wait."
        ) from error


class _Answers:
    """What rank 0 says to those who ask for the name of this life.

    Questions of earlier lives are answered, too. No process is left that could hear it: launchers
    end theirs before they meet for another life.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self.store, self.name = store, name
        self.count = 0
        self.open: list[int] = []

    def give(self) -> None:
        count = self.store.add(_QUESTIONS, 0)
        self.open += range(self.count + 1, count + 1)
        self.count = count
        # A process may have been killed when it had a number, but had not asked yet.
        for i in [i for i in self.open if self.store.check([f"{_QUESTIONS}/{i}"])]:
            question = self.store.get(f"{_QUESTIONS}/{i}").decode()
            self.store.set(f"{_ANSWERS}/{question}", self.name)
            self.open.remove(i)


def _asked_name(store: dist.Store, meeting: Rendezvous, deadline: float) -> str:
    question = secrets.token_hex(8)
    store.set(f"{_QUESTIONS}/{store.add(_QUESTIONS, 1)}", question)
    while not store.check([f"{_ANSWERS}/{question}"]):
        if time.monotonic() > deadline:
            _give_up(meeting, "process 0 did not come")
        time.sleep(_PAUSE)
    return store.get(f"{_ANSWERS}/{question}").decode()


def _await_all(
    store: dist.Store, meeting: Rendezvous, deadline: float, answers: _Answers | None
) -> None:
    """Wait until every process has arrived, or say which ones did not."""
    store.set(f"here/{meeting.rank}", _addresses.towards(meeting.host, meeting.port))
    arrived = store.add("arrived", 1)
    while arrived < meeting.world_size:
        if answers is not None:
            answers.give()
        if store.check(["verdict"]):
            _give_up(meeting, store.get("verdict").decode())
        if time.monotonic() > deadline:
            here = [r for r in range(meeting.world_size) if store.check([f"here/{r}"])]
            absent = sorted(set(range(meeting.world_size)) - set(here))
            verdict = f"{len(here)} of {meeting.world_size} processes arrived, {absent} did not"
            # The others should hear it before the process that serves the meeting point ends.
            store.set("verdict", verdict)
            time.sleep(1)
            _give_up(meeting, verdict)
        time.sleep(_PAUSE)
        arrived = store.add("arrived", 0)


def _give_up(meeting: Rendezvous, verdict: str) -> None:
    raise TimeoutError(
        f"Process {meeting.rank} waited at {meeting.address} (from {meeting.source}): {verdict} "
        f"within {_settings.join_timeout():g} s. Did they start, and can their hosts reach that "
        "address? KERAS_SPMD_JOIN_TIMEOUT sets how many seconds to wait."
    )
