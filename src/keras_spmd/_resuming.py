"""Where a `fit` is, so that another one can go on exactly there: what callbacks are told of it."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_spmd import _callbacks, _feeds, _layouts, _stopping
from keras_spmd._feeds import Feed, expected_of, feed_of
from keras_spmd._generators import random_states
from keras_spmd._stopping import Outlook

_CALLBACKS = "_keras_spmd_callbacks"


def state_of(model: Any) -> dict[str, Any]:
    """Where the `fit` of a model is, as JSON; without one, only the random states.

    Takes all ranks: one of them may have set `stop_training`.
    """
    state: dict[str, Any] = {"now": random_states()}
    feed = feed_of(model)
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
    feed = feed_of(model)
    return [] if feed is None else feed.callbacks


def train_begin_or(original: Callable) -> Callable:
    """`CallbackList.on_train_begin`: the history goes on, and what callbacks know."""

    def on_train_begin(self: Any, logs: Any = None) -> None:
        if self.model is None:
            original(self, logs)
            return
        feed = _feeds.new_feed(self.model)
        self.model.__dict__[_CALLBACKS] = self.callbacks
        with _callbacks.rows_kept(self.callbacks):
            original(self, logs)
        expected = expected_of(self.model)
        if expected is None:
            _callbacks.forget_rows(self.callbacks)
            return
        state = expected.state
        feed.go_on_from(state)
        if self._history is not None and "history" in state:
            self._history.epoch[:] = state["history"]["epoch"]
            for name, values in state["history"]["logs"].items():
                self._history.history[name] = [*values]
        _callbacks.set_states(self.callbacks, state.get("callbacks", []), expected.read)
        if feed.was_stopped and feed.step == 0:
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
    _feeds.forget_expected(model)
    feed = feed_of(model)
    if feed is not None:
        # A model doesn't keep the data it was trained with.
        feed.source, feed.callbacks, feed.ballot = None, [], None
        feed.was_stopped |= bool(model.stop_training)


def epoch_begin_or(original: Callable) -> Callable:
    """`CallbackList.on_epoch_begin`: what is iterated next is the data of this training."""

    def on_epoch_begin(self: Any, epoch: int, logs: Any = None) -> None:
        _feeds.start(None)
        if self.model is None:
            original(self, epoch, logs)
            return
        feed = feed_of(self.model)
        assert feed is not None, "made when the training began"
        feed.epoch, feed.step, feed.logs = epoch, 0, None
        feed.callbacks = self.callbacks
        if _layouts.active_mesh() is not None:
            feed.ballot = _stopping.ballot_of(self, "stop_training")
        expected = expected_of(self.model)
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
        _feeds.start(feed)

    return on_epoch_begin


def batch_end_or(original: Callable) -> Callable:
    """`CallbackList.on_train_batch_end`: callbacks that save know how far the epoch is."""

    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        feed = None if self.model is None else feed_of(self.model)
        if feed is not None:
            feed.step = batch + 1
        original(self, batch, logs)

    return on_train_batch_end


def epoch_end_or(original: Callable) -> Callable:
    """`CallbackList.on_epoch_end`: the next batch is the first one of the next epoch."""

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        feed = None if self.model is None else feed_of(self.model)
        if feed is not None:
            feed.epoch, feed.step, feed.logs = epoch + 1, 0, (epoch, dict(logs or {}))
        original(self, epoch, logs)

    return on_epoch_end


def metrics_result_or_logs_or(original: Callable) -> Callable:
    """`Trainer._get_metrics_result_or_logs`: of an epoch that is resumed after its last batch."""

    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        feed, expected = feed_of(self), expected_of(self)
        if logs or feed is None or expected is None or expected.state["epoch"] != feed.epoch:
            return original(self, logs)
        return self.get_metrics_result()

    return _get_metrics_result_or_logs
