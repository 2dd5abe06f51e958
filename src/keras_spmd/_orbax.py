"""`OrbaxCheckpoint`: rank 0 gets the state and writes it, as one device would.

Orbax is JAX's, and takes every process of a torch job for the only one. So only rank 0 lets it
write where the user wants; the other ranks have a folder of their own, where nothing is written.
"""

import tempfile
from collections.abc import Callable
from typing import Any

from keras import ops, tree
from torch.distributed.tensor import DTensor

from keras_spmd import _messages, _processes
from keras_spmd._gathering import whole_on_rank_0
from keras_spmd._saving import done_by_rank_0, heard, is_shared


def init_or(original: Callable) -> Callable:
    """`OrbaxCheckpoint.__init__` opens the folder."""

    def __init__(self: Any, directory: Any, *args: Any, **kwargs: Any) -> None:
        if not _messages.is_listener():
            original(self, directory, *args, **kwargs)
            return
        self._keras_spmd_folder = tempfile.TemporaryDirectory()
        original(self, self._keras_spmd_folder.name, *args, **kwargs)
        self.directory = directory

    __init__.__doc__ = original.__doc__
    return __init__


def get_state_tree_or(original: Callable) -> Callable:
    """`_get_state_tree`: each variable becomes whole on rank 0 only; others have Nones."""

    def _get_state_tree(model: Any) -> Any:
        if not is_shared(model):
            return original(model)
        return tree.map_structure(_on_rank_0, model.get_state_tree())

    return _get_state_tree


def _on_rank_0(x: Any) -> Any:
    whole = whole_on_rank_0(x) if isinstance(x, DTensor) else x
    if whole is None or _processes.process_id() > 0:
        return None
    # Orbax takes numbers without dims as Python's.
    array = ops.convert_to_numpy(whole)
    return array if array.ndim else array.item()


def save_or(original: Callable) -> Callable:
    """`OrbaxCheckpoint._save_checkpoint`: all ranks send, and hear whether it was written."""

    def _save_checkpoint(self: Any, step: int, logs: Any = None) -> None:
        if not is_shared(self.model):
            original(self, step, logs)
            return
        if _processes.process_id() > 0:
            _state_of(self.model)
        doing = f"save a checkpoint in '{self.directory}'"
        done_by_rank_0(lambda: original(self, step, logs), doing)

    return _save_checkpoint


def _state_of(model: Any) -> Any:
    from keras.src.callbacks import orbax_checkpoint

    return orbax_checkpoint._get_state_tree(model)


def together(original: Callable) -> Callable:
    """A method after which what was being saved is there: for all ranks."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_shared(self.model):
            heard("")

    method.__doc__ = original.__doc__
    return method
