"""What callbacks know, so that a training goes on with it: patience, best values, rows of a table.

Those of Keras by a table of attributes; others by methods of their own:

    class Counter(keras.callbacks.Callback):
        def get_state(self):
            return {"count": self.count}

        def set_state(self, state):
            self.count = state["count"]

States are JSON. Arrays, such as the best weights, are kept beside them as tensors.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from keras import callbacks as of_keras

from keras_spmd import _layouts, _messages

PREFIX = "callbacks/"
_COUNTERS = ("_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch")
_NUMBERS: dict[type, tuple[str, ...]] = {
    of_keras.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch"),
    of_keras.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    of_keras.ModelCheckpoint: ("best", *_COUNTERS),
    of_keras.BackupAndRestore: _COUNTERS,
    of_keras.SwapEMAWeights: ("_ema_weights_in_model",),
}
# Each is None, or a list of arrays.
_ARRAYS: dict[type, tuple[str, ...]] = {of_keras.EarlyStopping: ("best_weights",)}


class Kept(NamedTuple):
    """What callbacks know: JSON, and arrays by name."""

    states: list[dict[str, Any]]
    arrays: dict[str, torch.Tensor]


def savers_last(callbacks: list[Any]) -> None:
    """Who saves comes last: what the others do at the same moment is saved, too."""
    callbacks.sort(key=_is_saver)


def _is_saver(callback: Any) -> bool:
    if isinstance(callback, of_keras.BackupAndRestore):
        return _layouts.active_distribution() is not None
    return _is_ours(callback)


def _is_ours(callback: Any) -> bool:
    return getattr(callback, "_keras_spmd_saves", False)


def give_back(callback: Any) -> None:
    """What one of ours took for the time of a `fit`."""
    if _is_ours(callback):
        callback._give_back()


def kept(callbacks: Iterable[Any]) -> Kept:
    """What to save. Takes all ranks, for a state may be computed from sharded variables."""
    found = Kept([], {})
    for callback in callbacks:
        state = _state_of(callback)
        if state is None:
            continue
        counts = {}
        for name in _of_class(callback, _ARRAYS):
            values = getattr(callback, name, None)
            if values is not None:
                counts[name] = len(values)
                prefix = f"{PREFIX}{len(found.states)}/{name}"
                found.arrays.update((f"{prefix}/{i}", _tensor(x)) for i, x in enumerate(values))
        entry = {"class": type(callback).__qualname__, "state": state, "arrays": counts}
        found.states.append(entry)
    return found


def set_states(
    callbacks: Iterable[Any], states: list[dict[str, Any]], read: Callable[[str], torch.Tensor]
) -> None:
    """Give each callback the state of the one of its class that was at its place.

    Args:
        callbacks: Those of the training that goes on.
        states: What `kept` had as JSON.
        read: Returns an array by its name.
    """
    left = list(enumerate(states))
    for callback in callbacks:
        name = type(callback).__qualname__
        entry = next((entry for entry in left if entry[1]["class"] == name), None)
        if entry is None:
            continue
        left.remove(entry)
        number, found = entry
        _set(callback, found["state"])
        for attribute, count in found["arrays"].items():
            names = [f"{PREFIX}{number}/{attribute}/{i}" for i in range(count)]
            setattr(callback, attribute, [_array(read(name)) for name in names])


def _of_class(callback: Any, table: dict[type, tuple[str, ...]]) -> tuple[str, ...]:
    return next((table[kind] for kind in type(callback).__mro__ if kind in table), ())


def _has_methods(callback: Any) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(
        getattr(callback, "set_state", None)
    )


def _state_of(callback: Any) -> dict[str, Any] | None:
    if _has_methods(callback):
        state = callback.get_state()
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"get_state() of the callback {type(callback).__qualname__} must return what JSON "
                f"can hold: numbers, strings, None, lists and dicts of them. {error}."
            ) from None
    if isinstance(callback, of_keras.CSVLogger):
        return {"bytes": _size(callback)}
    attributes = _of_class(callback, _NUMBERS)
    found = {name: _plain(getattr(callback, name, None)) for name in attributes}
    return found or None


def _set(callback: Any, state: dict[str, Any]) -> None:
    if _has_methods(callback):
        callback.set_state(state)
    elif isinstance(callback, of_keras.CSVLogger):
        _cut(callback, state["bytes"])
    else:
        for name in _of_class(callback, _NUMBERS):
            if name in state:
                setattr(callback, name, state[name])


def _plain(x: Any) -> Any:
    return x if x is None or isinstance(x, (bool, int, float, str)) else np.asarray(x).item()


def _tensor(x: Any) -> torch.Tensor:
    x = np.ascontiguousarray(x).reshape(np.shape(x))
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(x)


def _array(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


# A table's file is one that rank 0 writes. Keras empties it when a training begins, which is too
# early to know whether this one goes on: so it is opened for more rows, and cut then.


@contextlib.contextmanager
def rows_kept(callbacks: Iterable[Any]) -> Iterator[None]:
    """While `on_train_begin` of all callbacks runs, tables stay as they are."""
    callbacks = list(callbacks)
    loggers = [c for c in callbacks if isinstance(c, of_keras.CSVLogger) and not c.append]
    if not any(map(_is_saver, callbacks)):
        loggers = []
    for logger in loggers:
        logger.append = True
    try:
        yield
    finally:
        for logger in loggers:
            logger.append = False


def forget_rows(callbacks: Iterable[Any]) -> None:
    """Of a training that begins anew: tables are emptied, unless rows are to be appended."""
    for callback in callbacks:
        if isinstance(callback, of_keras.CSVLogger) and not callback.append:
            _cut(callback, 0)


def _size(logger: Any) -> int | None:
    is_there = logger.csv_file is not None and os.path.exists(logger.filename)
    return os.path.getsize(logger.filename) if is_there else None


def _cut(logger: Any, size: int | None) -> None:
    """Rows of epochs that will be run again would be there twice."""
    if size is None or _messages.is_listener():
        return
    found = _size(logger)
    if found is not None and found > size:
        os.truncate(logger.filename, size)
        found = size
    logger.append_header = not found
