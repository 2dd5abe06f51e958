"""Files of callbacks are written once: by rank 0, for all.

Ranks run the same callbacks with the same logs. So every rank does what Keras does, and what the
other ranks write goes nowhere.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from keras.src.utils import file_utils

from keras_spmd import _layouts, _messages
from keras_spmd._saving import done_by_rank_0


class _QuietFiles(type(file_utils)):  # type: ignore[misc]
    """`file_utils` for a callback that writes logs: on other ranks than 0 to nowhere."""

    def __getattr__(self, name: str) -> Any:
        return getattr(file_utils, name)

    def File(self, path: str, mode: str = "r") -> Any:
        if _is_reading(mode) or _layouts.active_mesh() is None:
            return file_utils.File(path, mode)
        files: list[Any] = []
        done_by_rank_0(lambda: files.append(file_utils.File(path, mode)), f"open '{path}'")
        return files[0] if files else open(os.devnull, mode)


class _SharedFiles(_QuietFiles):
    """`file_utils` for a callback that all ranks run: rank 0 looks, writes and deletes for all."""

    def exists(self, path: str) -> bool:
        if _layouts.active_mesh() is None:
            return file_utils.exists(path)
        answer = [file_utils.exists(path) if not _messages.is_listener() else None]
        dist.broadcast_object_list(answer, src=0)
        return bool(answer[0])

    def makedirs(self, path: str) -> None:
        self._on_rank_0(file_utils.makedirs, path)

    def remove(self, path: str) -> None:
        self._on_rank_0(file_utils.remove, path)

    def rmtree(self, path: str) -> None:
        self._on_rank_0(file_utils.rmtree, path)

    def copy(self, src: str, dst: str) -> None:
        self._on_rank_0(file_utils.copy, src, dst)

    def _on_rank_0(self, function: Callable, *paths: str) -> None:
        if _layouts.active_mesh() is None:
            function(*paths)
        else:
            doing = f"{function.__name__} {', '.join(map(repr, map(str, paths)))}"
            done_by_rank_0(lambda: function(*paths), doing)


quiet_files = _QuietFiles("keras_spmd_quiet_files")
shared_files = _SharedFiles("keras_spmd_shared_files")


def tensorboard_set_model_or(original: Callable) -> Callable:
    """`TensorBoard.set_model`: it reads weights, so all ranks run it, each with its own folder."""

    def set_model(self: Any, model: Any) -> None:
        if _messages.is_listener():
            self._keras_spmd_folder = tempfile.TemporaryDirectory()
            self.log_dir = self._keras_spmd_folder.name
        original(self, model)

    return set_model


def on_rank_0(original: Callable) -> Callable:
    """A method that only sends something away."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _messages.is_listener():
            original(self, *args, **kwargs)

    method.__doc__ = original.__doc__
    return method


def _is_reading(mode: str) -> bool:
    return "r" in mode and "+" not in mode
