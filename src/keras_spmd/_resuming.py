"""Where a `fit` is, so that another one can go on exactly there.

The order of batches is drawn from the random state when an epoch's iterator is made. So this state
is kept from then on, with how many batches were taken. To go on, the iterator is made from the same
state, that many batches are passed over, and the random state is set to what it was at the end.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from keras.src.trainers.data_adapters import TorchDataLoaderAdapter

from keras_spmd import _callbacks, _layouts, _stopping
from keras_spmd._generators import as_text, random_states, set_random_states
from keras_spmd._stopping import Ballot, Outlook

_FEED, _EXPECTED = "_keras_spmd_feed", "_keras_spmd_expected"
_CALLBACKS = "_keras_spmd_callbacks"


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


def state_of(model: Any) -> dict[str, Any]:
    """Where the `fit` of a model is, as JSON; without one, only the random states.

    Takes all ranks: one of them may have set `stop_training`.
    """
    state: dict[str, Any] = {"now": random_states()}
    feed: Feed | None = model.__dict__.get(_FEED)
    if feed is None:
        return state
    state["now"] = feed.states()
    state |= {"epoch": feed.epoch, "step": feed.step, "consumed": feed.consumed}
    state |= {"made": feed.made, "started": feed.started, "data": feed.about}
    state["outlook"] = _outlook(feed)
    history = getattr(model, "history", None)
    epochs = [*getattr(history, "epoch", [])]
    logs = {name: [*values] for name, values in getattr(history, "history", {}).items()}
    if feed.logs is not None and feed.logs[0] not in epochs:
        epochs.append(feed.logs[0])
        for name, value in feed.logs[1].items():
            logs.setdefault(name, []).append(value)
    plain = {name: [np.asarray(v).tolist() for v in values] for name, values in logs.items()}
    return {**state, "history": {"epoch": epochs, "logs": plain}}


def _outlook(feed: Feed) -> Outlook:
    if feed.ballot is not None:
        return feed.ballot.outlook(feed.model, is_epoch_end=feed.step == 0)
    is_stopped = bool(feed.model.stop_training) if feed.callbacks else feed.was_stopped
    return Outlook.STOP if is_stopped else Outlook.GO_ON


def callbacks_of(model: Any) -> list[Any]:
    """Those of the `fit` that is under way."""
    feed: Feed | None = model.__dict__.get(_FEED)
    return [] if feed is None else feed.callbacks


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


def train_begin_or(original: Callable) -> Callable:
    """`CallbackList.on_train_begin`: the history goes on, and what callbacks know."""

    def on_train_begin(self: Any, logs: Any = None) -> None:
        if self.model is None:
            original(self, logs)
            return
        self.model.__dict__.pop(_FEED, None)
        self.model.__dict__[_CALLBACKS] = self.callbacks
        with _callbacks.rows_kept(self.callbacks):
            original(self, logs)
        expected = _expected(self.model)
        if expected is None:
            _callbacks.forget_rows(self.callbacks)
            return
        state = expected.state
        if self._history is not None and "history" in state:
            self._history.epoch[:] = state["history"]["epoch"]
            for name, values in state["history"]["logs"].items():
                self._history.history[name] = [*values]
        _callbacks.set_states(self.callbacks, state.get("callbacks", []), expected.read)
        if state.get("outlook") == Outlook.STOP and state["step"] == 0:
            # It ended by itself: no epoch is left.
            self.model._initial_epoch = max(state["epoch"], self.params.get("epochs", 0))

    return on_train_begin


def train_end_or(original: Callable) -> Callable:
    """`CallbackList.on_train_end`: what was expected of this `fit` is not expected of the next."""

    def on_train_end(self: Any, logs: Any = None) -> None:
        original(self, logs)
        if self.model is not None:
            _forget(self.model)

    return on_train_end


def fit_or(original: Callable) -> Callable:
    """`Trainer.fit`: one that ends with an error leaves nothing behind for the next one."""

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            for callback in self.__dict__.get(_CALLBACKS, []):
                _callbacks.give_back(callback)
            _forget(self)
            raise

    return fit


def _forget(model: Any) -> None:
    model.__dict__.pop(_CALLBACKS, None)
    if model.__dict__.pop(_EXPECTED, None) is not None:
        model._initial_epoch = None
    feed: Feed | None = model.__dict__.get(_FEED)
    if feed is not None:
        # A model doesn't keep the data it was trained with.
        feed.source, feed.callbacks, feed.ballot = None, [], None
        feed.was_stopped = bool(model.stop_training)


def _expected(model: Any) -> Expected | None:
    return None if model is None else model.__dict__.get(_EXPECTED)


_starting: Feed | None = None


def epoch_begin_or(original: Callable) -> Callable:
    """`CallbackList.on_epoch_begin`: what is iterated next is the data of this training."""

    def on_epoch_begin(self: Any, epoch: int, logs: Any = None) -> None:
        global _starting
        _starting = None
        if self.model is None:
            original(self, epoch, logs)
            return
        feed = self.model.__dict__.setdefault(_FEED, Feed(self.model))
        feed.epoch, feed.step, feed.logs = epoch, 0, None
        feed.callbacks = self.callbacks
        if _layouts.active_mesh() is not None:
            feed.ballot = _stopping.ballot_of(self, "stop_training")
        expected = _expected(self.model)
        if expected is None or expected.state["epoch"] != epoch or expected.state["step"] == 0:
            original(self, epoch, logs)
        else:
            # This epoch has begun before: schedules must not act on what they have made already.
            rates = [v for v in self.model.optimizer.variables if v.path.endswith("learning_rate")]
            values = [np.array(v) for v in rates]
            original(self, epoch, logs)
            for variable, value in zip(rates, values, strict=True):
                variable.assign(value)
            expected.set_metrics()
        # Only now: a callback may iterate over other data.
        _starting = feed

    return on_epoch_begin


def batch_end_or(original: Callable) -> Callable:
    """`CallbackList.on_train_batch_end`: callbacks that save know how far the epoch is."""

    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        feed = None if self.model is None else self.model.__dict__.get(_FEED)
        if feed is not None:
            feed.step = batch + 1
        original(self, batch, logs)

    return on_train_batch_end


def epoch_end_or(original: Callable) -> Callable:
    """`CallbackList.on_epoch_end`: the next batch is the first one of the next epoch."""

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        feed = None if self.model is None else self.model.__dict__.get(_FEED)
        if feed is not None:
            feed.epoch, feed.step, feed.logs = epoch + 1, 0, (epoch, dict(logs or {}))
        original(self, epoch, logs)

    return on_epoch_end


def metrics_result_or_logs_or(original: Callable) -> Callable:
    """`Trainer._get_metrics_result_or_logs`: of an epoch that is resumed after its last batch."""

    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        feed, expected = self.__dict__.get(_FEED), _expected(self)
        if logs or feed is None or expected is None or expected.state["epoch"] != feed.epoch:
            return original(self, logs)
        return self.get_metrics_result()

    return _get_metrics_result_or_logs


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


def feed_of(epoch_iterator: Any) -> Feed | None:
    return epoch_iterator.__dict__.get(_FEED)


def pass_over(epoch_iterator: Any) -> None:
    """Pass over the batches that were taken before, if this is the epoch to go on with."""
    feed = feed_of(epoch_iterator)
    expected = _expected(None if feed is None else feed.model)
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
