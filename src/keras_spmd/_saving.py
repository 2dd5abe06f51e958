"""Keras's own files, written by rank 0 for all.

Every rank runs Keras's code, so they meet at each variable. Its parts are sent to rank 0, where it
is whole until it is written; other ranks write nothing. A file gets its name when it is complete.
What goes wrong on rank 0 is raised on all ranks.
"""

import contextlib
import ctypes
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from keras.src.utils import file_utils, io_utils
from torch.distributed.tensor import DTensor

from keras_spmd import _layouts, _processes, _raised, _whereabouts
from keras_spmd._gathering import whole_on_rank_0
from keras_spmd._loading import files_variables
from keras_spmd._progress import progress_of_bytes


class _Stopped(Exception):
    """Rank 0 can't go on; it says why."""


class _Save:
    """A file that all ranks are saving.

    Before each variable rank 0 says "next", or what went wrong; in the end "done".
    """

    def __init__(self, advance: Callable[[int], object]) -> None:
        self.is_writer = _processes.process_id() == 0
        self.advance = advance

    def whole(self, value: Any) -> Any:
        """What is to be written, on rank 0."""
        x = getattr(value, "value", value)
        self.advance(getattr(x, "nbytes", 0))
        if not isinstance(x, DTensor):
            return value
        word = heard("next")
        if word != "next":
            raise _Stopped(word)
        return whole_on_rank_0(x)


_current: _Save | None = None


def is_under_way() -> bool:
    """Whether a file is being saved."""
    return _current is not None


def heard(word: Any) -> Any:
    """What rank 0 says."""
    words = [word]
    if _processes.num_processes() > 1:
        _whereabouts.note()
        dist.broadcast_object_list(words, src=0)
    return words[0]


def done_by_rank_0(action: Callable[[], object], doing: str) -> None:
    """Rank 0 acts; all ranks return when it has, or raise what it raised."""
    if _processes.process_id() == 0:
        try:
            action()
        except Exception as error:
            heard(_raised.as_word(error))
            raise
    problem = heard("")
    if problem:
        raise _raised.of_rank_0(problem, doing)


def set_item_or(original: Callable) -> Callable:
    """`store[key] = variable`, with which Keras writes h5 files."""

    def __setitem__(self: Any, key: str, value: Any) -> None:
        if _current is not None:
            value = _current.whole(value)
        if _current is None or _current.is_writer:
            original(self, key, value)

    return __setitem__


def save_own_variables_or(original: Callable) -> Callable:
    """Of an optimizer: Keras makes arrays of its variables before it hands them on."""

    def save_own_variables(self: Any, store: Any) -> None:
        if _current is None:
            original(self, store)
            return
        for i, variable in enumerate(self.variables):
            store[str(i)] = variable

    return save_own_variables


def save_or(original: Callable) -> Callable:
    """`save_model` and `save_weights`: all ranks take part, and return when the file is there."""
    save_file = save_file_or(
        lambda model, path, *args, **kw: original(model, path, True, *args, **kw)
    )

    def save(model: Any, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        if not is_shared(model):
            return original(model, filepath, overwrite, *args, **kwargs)
        if not overwrite and not _may_overwrite(filepath):
            return None
        return save_file(model, filepath, *args, **kwargs)

    save.__doc__ = original.__doc__
    return save


def save_file_or(original: Callable) -> Callable:
    """The functions behind these, which libraries also call by themselves."""

    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_shared(model):
            return original(model, filepath, *args, **kwargs)
        size = sum(v._value.nbytes for v in files_variables(model) if v._value is not None)
        with (
            progress_of_bytes(f"Saving '{filepath}'", total=size) as advance,
            _saving(filepath, advance) as path,
        ):
            return original(model, path, *args, **kwargs)

    save.__doc__ = original.__doc__
    return save


def is_shared(model: Any) -> bool:
    """Whether all ranks are needed to save it: also outside of the scope that made it."""
    return _layouts.active_distribution() is not None or any(
        isinstance(v._value, DTensor) for v in model.variables
    )


def _may_overwrite(filepath: Any) -> bool:
    may = True
    is_path = not isinstance(filepath, io.IOBase)
    if _processes.process_id() == 0 and is_path and os.path.exists(filepath):
        may = io_utils.ask_to_proceed_with_overwrite(str(filepath))
    return heard(may)


@contextlib.contextmanager
def _saving(filepath: Any, advance: Callable[[int], object]) -> Iterator[Any]:
    """Where this rank writes to. On leaving, rank 0 has put it where it belongs."""
    global _current
    if _current is not None:  # A save that saves something else, too.
        yield filepath
        return
    _current = save = _Save(advance)
    word = ""
    try:
        with _place(filepath) if save.is_writer else _nowhere(filepath) as path:
            yield path
    except _Stopped as stopped:
        word = str(stopped)
    except Exception as error:
        heard(_raised.as_word(error))
        raise
    finally:
        _current = None
    word = word or heard("done")
    if word != "done":
        raise _raised.of_rank_0(word, f"save '{filepath}'")
    if isinstance(filepath, io.BytesIO):
        _share(filepath)


def _share(buffer: io.BytesIO) -> None:
    """What rank 0 has in its buffer, for the other ranks, which will want to read it."""
    content = heard(buffer.getvalue())
    if _processes.process_id() > 0:
        buffer.write(content)


@contextlib.contextmanager
def _place(filepath: Any) -> Iterator[Any]:
    """A name in the same folder, until what is written there is complete.

    A job that was killed leaves it behind, and the next one that saves there removes it.
    """
    if isinstance(filepath, io.IOBase) or file_utils.is_remote_path(str(filepath)):
        yield filepath
        return
    path = Path(filepath)
    folder = path.parent / f".{path.name}.incomplete"
    shutil.rmtree(folder, ignore_errors=True)
    # Keras makes the folders in which it makes one.
    folder.mkdir(parents=path.suffix not in (".keras", ".h5", ".json"))
    try:
        yield str(folder / path.name)
        # A file that lists others comes last.
        for file in sorted(folder.iterdir(), key=lambda file: file.suffix == ".json"):
            _put(file, path.parent / file.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(new: Path, target: Path) -> None:
    if not new.is_dir():
        with new.open("rb") as file:
            os.fsync(file.fileno())
    elif target.is_dir() and _exchange(new, target):
        return
    elif target.exists():
        # A folder can't replace one that has something in it.
        target.replace(new.with_name(f"{new.name}.old"))
    new.replace(target)


def _exchange(a: Path, b: Path) -> bool:
    """Let two folders have each other's names, at once; False where the system can't."""
    in_this_folder, exchange = -100, 2
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    status = rename(in_this_folder, os.fsencode(a), in_this_folder, os.fsencode(b), exchange)
    return status == 0


@contextlib.contextmanager
def _nowhere(filepath: Any) -> Iterator[Any]:
    if isinstance(filepath, io.IOBase):
        yield io.BytesIO()
        return
    name = os.path.basename(str(filepath))
    if str(filepath).startswith("hf://"):
        # Rank 0 uploads it.
        name = f"{name}.keras"
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, name)
