"""The batches of a `fit`: how far it has come, and how another one comes to the same place.

The order of batches is drawn from the random state when an epoch's iterator is made. So this state
is kept from then on, with how many batches were taken. To go on, the iterator is made from the same
state, that many batches are passed over, and the random state is set to what it was at the end.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from keras.src.trainers.data_adapters import TorchDataLoaderAdapter

from keras_spmd._generators import as_text, random_states, set_random_states
from keras_spmd._stopping import Ballot, Outlook

_FEED, _EXPECTED = "_keras_spmd_feed", "_keras_spmd_expected"


class Feed:
    """What a `fit` takes its batches from, and how far it has come."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.epoch = self.step = self.consumed = 0
        # The random states when the iterator was made, and when its first batch was taken.
        self.made: Any = None
        self.started: Any = None
        self.source: Any = None
        # Those that the batches' order is drawn from, beside the common ones.
        self.generators: list[torch.Generator] = []
        # How many rows a batch has, and how many batches an epoch, as far as that is known.
        self.about: dict[str, int | None] = {}
        # What is being repeated, while it is.
        self.repeated: dict[str, Any] | None = None
        # Of an epoch that has ended but is not in the history yet.
        self.logs: tuple[int, dict] | None = None
        # Those of the `fit`, while it lasts, and the ranks' votes to stop it.
        self.callbacks: list[Any] = []
        self.ballot: Ballot | None = None
        # Whether it was stopped, when it is over.
        self.was_stopped = False

    def counted(self, make: Callable[[], Iterable[Any]], adapter: Any) -> "_Counted":
        """The batches that `make` returns, which may draw random numbers for their order."""
        return _Counted(self, make, adapter)

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Until the next epoch begins, if one does, it is where another one was."""
        self.epoch, self.step, self.consumed = state["epoch"], state["step"], state["consumed"]
        self.made, self.started, self.about = state["made"], state["started"], state.get("data", {})
        self.was_stopped = state.get("outlook") == Outlook.STOP

    def states(self) -> dict[str, Any]:
        """All random states that the order of batches may come from, as JSON."""
        return {**random_states(), "loader": [as_text(g.get_state()) for g in self.generators]}


class _Counted:
    """Batches that a feed knows of."""

    def __init__(self, feed: Feed, make: Callable[[], Iterable[Any]], adapter: Any) -> None:
        self.feed, self.make = feed, make
        feed.generators = _generators_of(adapter)

    def __iter__(self) -> Iterator[Any]:
        self.feed.source, self.feed.consumed = self, 0
        self._repeat("made")
        self.feed.made, self.feed.started = self.feed.states(), None
        self.iterator = iter(self.make())
        return self

    def __next__(self) -> Any:
        if self.feed.started is None and self.feed.source is self:
            self._repeat("started")
            self.feed.started = self.feed.states()
        batch = next(self.iterator)
        self.feed.consumed += 1
        return batch

    def _repeat(self, what: str) -> None:
        if self.feed.repeated is not None:
            set_random_states(self.feed.repeated[what], self.feed.generators)


def _generators_of(adapter: Any) -> list[torch.Generator]:
    """Those that a DataLoader draws from instead of the common one."""
    if type(adapter) is not TorchDataLoaderAdapter:
        return []
    loader = adapter._dataloader
    given = [loader.generator, getattr(loader.sampler, "generator", None)]
    return list({id(g): g for g in given if isinstance(g, torch.Generator)}.values())


def feed_of(owner: Any) -> Feed | None:
    """That of a model's last `fit`, or of the data that a `fit` iterates over."""
    return owner.__dict__.get(_FEED)


def new_feed(model: Any) -> Feed:
    """A `fit` begins."""
    feed = model.__dict__[_FEED] = Feed(model)
    return feed


class Expected(NamedTuple):
    """What a `fit` that is about to begin goes on from."""

    # What `state_of` said, with the states of callbacks.
    state: dict[str, Any]
    # Sets the metrics' variables, which Keras resets before an epoch.
    set_metrics: Callable[[], object]
    # Returns an array of the callbacks.
    read: Callable[[str], torch.Tensor]


def expect(model: Any, expected: Expected) -> None:
    """Let the `fit` of a model, whose variables have been set, go on."""
    if "epoch" in expected.state:
        model._initial_epoch = expected.state["epoch"]
        model.__dict__[_EXPECTED] = expected


def expected_of(model: Any) -> Expected | None:
    return None if model is None else model.__dict__.get(_EXPECTED)


def forget_expected(model: Any) -> None:
    """What was expected of one `fit` is not expected of the next."""
    if model.__dict__.pop(_EXPECTED, None) is not None:
        model._initial_epoch = None


# Of the training whose data is iterated next.
_starting: Feed | None = None


def start(feed: Feed | None) -> None:
    """What is iterated next is the data of a training, or not."""
    global _starting
    _starting = feed


def begin_iterating(epoch_iterator: Any) -> None:
    """Before the data of an epoch is iterated: is it that of a training?"""
    global _starting
    feed, _starting = _starting, None
    if feed is not None:
        epoch_iterator.__dict__[_FEED] = feed
        adapter = epoch_iterator.data_adapter
        feed.about = {
            "rows of a batch": adapter.batch_size,
            "batches of an epoch": epoch_iterator.steps_per_epoch or adapter.num_batches,
        }


def pass_over(epoch_iterator: Any) -> None:
    """Pass over the batches that were taken before, if this is the epoch to go on with."""
    feed = feed_of(epoch_iterator)
    expected = expected_of(None if feed is None else feed.model)
    if feed is None or expected is None or expected.state["epoch"] != feed.epoch:
        return
    state = expected.state
    if state["step"] or epoch_iterator.steps_per_epoch is not None:
        _check_same_batches(state, feed.about)
    feed.repeated = state
    try:
        _repeat(epoch_iterator, state)
    except StopIteration:
        raise ValueError(
            f"The training was saved after {state['consumed']} batches, but the data has only "
            f"{feed.consumed}. Use the same data, or begin the training anew."
        ) from None
    feed.repeated = None
    feed.step = state["step"]
    set_random_states(state["now"], _generators_of(epoch_iterator.data_adapter))
    outlook = state.get("outlook")
    if outlook == Outlook.ONE_MORE and feed.ballot is not None:
        feed.ballot.expect_one_more()
    elif outlook in (Outlook.STOP, Outlook.ONE_MORE):
        feed.model.stop_training = True
        epoch_iterator._epoch_iterator = iter(())


def _repeat(epoch_iterator: Any, state: dict[str, Any]) -> None:
    steps = epoch_iterator._epoch_iterator
    if epoch_iterator.steps_per_epoch is not None and state["made"] is not None:
        # One iterator serves many epochs.
        source = iter(epoch_iterator._get_iterator())
        _take(source, state["consumed"])
        epoch_iterator._current_iterator = source
        epoch_iterator._steps_seen = state["consumed"] - state["step"]
        _take(steps, state["step"])
        return
    for _ in range(state["step"]):
        _, _, source = next(steps)
        _take(source, 1)


def _check_same_batches(state: dict[str, Any], about: dict[str, int | None]) -> None:
    """In the middle of an epoch, as many batches as before must be as many rows."""
    before = state.get("data") or {}
    if {**about, **before} == about:
        return
    raise ValueError(
        f"The training was saved after {state['step']} batches of its epoch {state['epoch'] + 1}. "
        f"It can't go on there with other batches: the data had {_listed(before)}, and now has "
        f"{_listed(about)}. Use the same `batch_size` and data, or begin the training anew."
    )


def _listed(about: dict[str, int | None]) -> str:
    return ", ".join(f"{count} {what}" for what, count in about.items())


def _take(source: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(source)
