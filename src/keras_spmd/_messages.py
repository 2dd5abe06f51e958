"""Rank 0 does the talking: what Keras prints and warns of appears once."""

import os
from collections.abc import Callable
from typing import Any

import keras

from keras_spmd import _layouts, _processes
from keras_spmd._notices import ShardingWarning

_KERAS = os.path.dirname(os.path.abspath(keras.__file__)) + os.sep
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def is_listener() -> bool:
    """Whether another process says what this one would say."""
    return _layouts.active_distribution() is not None and _processes.process_id() > 0


def print_msg_or(original: Callable) -> Callable:
    """`io_utils.print_msg`, behind the progress bar and every message of Keras."""

    def print_msg(message: str, line_break: bool = True) -> None:
        if not is_listener():
            original(message, line_break)

    return print_msg


def print_summary_or(original: Callable) -> Callable:
    """`print_summary`, behind `model.summary()`, prints by itself in a terminal."""

    def print_summary(model: Any, *args: Any, **kwargs: Any) -> Any:
        takes_elsewhere = kwargs.get("print_fn") is not None or len(args) > 2
        if takes_elsewhere or not is_listener():
            return original(model, *args, **kwargs)
        return None

    print_summary.__doc__ = original.__doc__
    return print_summary


def show_warning_or(original: Callable) -> Callable:
    """`warnings.showwarning`: of warnings by Keras and by this package, those of rank 0."""

    def showwarning(
        message: Any,
        category: Any,
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        about_keras = issubclass(category, ShardingWarning) or filename.startswith((_KERAS, _OURS))
        if not (about_keras and is_listener()):
            original(message, category, filename, lineno, file, line)

    return showwarning
