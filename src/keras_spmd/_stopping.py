"""`stop_training` set on one rank stops all of them.

After each batch every rank casts a vote, and reads it after the next batch, when it has long
arrived: nobody waits. Only a rank that wants to stop waits for the count. If all ranks want to,
they stop at once, as on one device. If not, the others have begun the next step already, so it is
taken together, and then all stop. What is saved in between says so.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from keras_spmd import _layouts


class _Vote:
    """One vote of all ranks."""

    def __init__(self, wants_to_stop: bool) -> None:
        self.count = torch.tensor([int(wants_to_stop)])
        self.work = dist.all_reduce(self.count, async_op=True)

    def votes(self) -> int:
        self.work.wait()
        return int(self.count)


class Outlook(StrEnum):
    """What will come of the votes."""

    GO_ON = "goes on"
    STOP = "stops"
    ONE_MORE = "stops after one more step"


class Ballot:
    """The votes on one attribute, such as `stop_training` of a model."""

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute
        self.last: _Vote | None = None

    def after_batch(self, model: Any) -> None:
        if self._is_decided():
            setattr(model, self.attribute, True)
            return
        wants_to_stop = bool(getattr(model, self.attribute, False))
        self.last = _Vote(wants_to_stop)
        if wants_to_stop:
            setattr(model, self.attribute, self.last.votes() == dist.get_world_size())

    def now(self, model: Any) -> None:
        decided = self._is_decided()
        vote = _Vote(decided or bool(getattr(model, self.attribute, False)))
        setattr(model, self.attribute, vote.votes() > 0)

    def outlook(self, model: Any, *, is_epoch_end: bool) -> Outlook:
        """For callbacks that save: they run before the votes are counted. Takes all ranks."""
        votes = _Vote(bool(getattr(model, self.attribute, False))).votes()
        is_decided = self.last is not None and self.last.votes() > 0
        if is_decided or votes == dist.get_world_size() or (votes and is_epoch_end):
            return Outlook.STOP
        return Outlook.ONE_MORE if votes else Outlook.GO_ON

    def expect_one_more(self) -> None:
        """Go on from where some ranks had voted to stop."""
        self.last = _Vote(True)

    def _is_decided(self) -> bool:
        last, self.last = self.last, None
        return last is not None and last.votes() > 0


def is_wanted_by_any(wanted: bool) -> bool:
    """Whether any rank wants something. Takes all ranks, and waits for them."""
    return _Vote(wanted).votes() > 0


def batch_end_or(attribute: str) -> Callable[[Callable], Callable]:
    """`CallbackList.on_train_batch_end` and its like: callbacks may have set the attribute."""

    def wrap(original: Callable) -> Callable:
        def on_batch_end(self: Any, batch: int, logs: Any = None) -> None:
            original(self, batch, logs)
            if self.model is not None and _layouts.active_mesh() is not None:
                ballot_of(self, attribute).after_batch(self.model)

        on_batch_end.__doc__ = original.__doc__
        return on_batch_end

    return wrap


def epoch_end_or(original: Callable) -> Callable:
    """`CallbackList.on_epoch_end`: an epoch is long, so its vote is counted at once."""

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        original(self, epoch, logs)
        if self.model is not None and _layouts.active_mesh() is not None:
            ballot_of(self, "stop_training").now(self.model)

    on_epoch_end.__doc__ = original.__doc__
    return on_epoch_end


def ballot_of(callbacks: Any, attribute: str) -> Ballot:
    """The votes that the callbacks of a `CallbackList` cast."""
    ballots = callbacks.__dict__.setdefault("_keras_spmd_ballots", {})
    if attribute not in ballots:
        ballots[attribute] = Ballot(attribute)
    return ballots[attribute]
