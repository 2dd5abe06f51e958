"""Reading a checkpoint: every rank what its shards need, whatever mesh wrote it."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keras_spmd import _layouts, _raised
from keras_spmd._generators import set_random_states
from keras_spmd._loading import bytes_held
from keras_spmd._progress import progress_of_bytes
from keras_spmd._words import Words
from keras_spmd.checkpoints import _index, _saving
from keras_spmd.checkpoints._errors import CheckpointError
from keras_spmd.checkpoints._index import Checkpoint
from keras_spmd.checkpoints._names import OPTIMIZERS, matched
from keras_spmd.checkpoints._state import (
    check_fit,
    have_same_shape,
    make_what_is_missing,
    other_optimizers,
    variables_of,
)

_counter = itertools.count()


def latest_checkpoint(path: Any) -> Path | None:
    """The newest complete checkpoint of a folder; None if there is none.

    Example:

    >>> import keras_spmd
    >>> keras_spmd.latest_checkpoint("no such folder") is None
    True
    """
    _saving.finish()
    return next(reversed(_index.steps_in(Path(path)).values()), None)


def load_checkpoint(model: Any, path: Any, *, step: int | None = None) -> int:
    """Set a model's state to that of a checkpoint, on the mesh that the model is on.

    Example:

    >>> import keras, keras_spmd
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    >>> _ = keras_spmd.save_checkpoint(model, "checkpoints", step=40)
    >>> keras_spmd.load_checkpoint(model, "checkpoints")
    40

    All ranks call it. The random states are set, too. A `fit` that follows begins anew; to go on in
    the middle of an epoch, give it a `ShardedCheckpoint`. Metrics that the model doesn't have yet
    are left out.

    Args:
        model: A built model.
        path: A checkpoint, or a folder of them, of which the newest complete one is taken.
        step: Which one of the folder to take instead.

    Returns:
        The step of the checkpoint.
    """
    checkpoint = opened(Path(path), step)
    restore(model, checkpoint)
    set_random_states(checkpoint.index["training"]["now"])
    return checkpoint.step


def newest_first(path: Path) -> list[Path]:
    """All complete checkpoints of a folder, or the one that it is, as rank 0 sees it."""
    _saving.finish()
    words = Words(f"checkpoints/{next(_counter)}")
    is_one = (path / _index.INDEX).is_file()
    found = [str(folder) for folder in reversed(_index.steps_in(path).values())]
    found = [str(path)] if is_one else found
    of_0 = words.gathered(json.dumps(found), f"look for checkpoints in '{path}'")[0]
    return [Path(folder) for folder in json.loads(of_0)]


def opened(path: Path, step: int | None = None) -> Checkpoint:
    """The checkpoint at a path, or the newest one of a folder."""
    if step is not None:
        _saving.finish()
        return opened_by_all(_index.folder_of(path, step))
    folders = newest_first(path)
    if not folders:
        raise FileNotFoundError(
            f"There is no complete checkpoint in '{path}'"
            + ("." if path.is_dir() else ", which is not a folder.")
        )
    return opened_by_all(folders[0])


def opened_by_all(folder: Path) -> Checkpoint:
    """A checkpoint that all ranks see, and see as the same one."""
    with agreed(f"open the checkpoint '{folder}'"):
        checkpoint = Checkpoint(folder)
    words = Words(f"checksums/{next(_counter)}")
    sums = words.gathered(checkpoint.checksum, f"open the checkpoint '{folder}'")
    if len(set(sums)) > 1:
        raise CheckpointError(f"Ranks don't see the same index in '{folder}'.")
    return checkpoint


def restore(model: Any, checkpoint: Checkpoint) -> None:
    """Set all variables; if one rank can't, all of them raise, and nothing has been set."""
    if not model.built:
        raise ValueError(
            f"The model '{model.name}' has no variables yet. Build it, or call it on a batch."
        )
    make_what_is_missing(model, checkpoint.variables)
    variables = variables_of(model)
    check_fit(variables, checkpoint.variables, model)
    values: list[tuple[Any, torch.Tensor]] = []
    with agreed("load a checkpoint"):
        values = _read(model, variables, checkpoint)
    _set(values)
    for layer in model._flatten_layers():
        # Such as `Normalization`, which computes with numbers that it derives from its variables.
        if layer.built and callable(getattr(layer, "finalize_state", None)):
            layer.finalize_state()
    for name, optimizer in other_optimizers(model):
        if not optimizer.built:
            _restore_when_built(model, name, optimizer, checkpoint)


def restore_metrics(model: Any, checkpoint: Checkpoint) -> None:
    """Set the metrics' variables alone."""
    _restore_those("metrics/", model, checkpoint)


def _restore_those(prefix: str, model: Any, checkpoint: Checkpoint) -> None:
    variables = {n: v for n, v in variables_of(model).items() if n.startswith(prefix)}
    _set(_read(model, variables, checkpoint))


def _restore_when_built(model: Any, name: str, optimizer: Any, checkpoint: Checkpoint) -> None:
    """An optimizer of the model's own has its state only when it has seen its variables."""

    def build(variables: Any) -> None:
        optimizer.__dict__.pop("build")
        optimizer.build(variables)
        _restore_those(f"{OPTIMIZERS}{name}/", model, checkpoint)

    optimizer.__dict__["build"] = build


def _read(
    model: Any, variables: dict[str, Any], checkpoint: Checkpoint
) -> list[tuple[Any, torch.Tensor]]:
    """The parts of variables that this rank holds, in host memory."""
    saved = checkpoint.variables
    found = [
        (variables[name], old)
        for name, old in matched(variables, saved, model).items()
        if have_same_shape(variables[name], saved[old])
    ]
    size = sum(bytes_held(variable) for variable, _ in found)
    values = []
    with progress_of_bytes(f"Loading '{checkpoint.folder}'", total=size) as advance:
        for variable, old in found:
            values.append((variable, _part(variable._value, checkpoint, old)))
            advance(bytes_held(variable))
    return values


def _part(x: Any, checkpoint: Checkpoint, name: str) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return checkpoint.read(name)
    shape, start = _layouts.local_shape_and_offset(x.shape, x.device_mesh, x.placements)
    return checkpoint.read(name, start, shape)


def _set(values: list[tuple[Any, torch.Tensor]]) -> None:
    while values:
        # What is set needs no copy in host memory any more.
        variable, part = values.pop()
        x = variable._value
        part = part.to(x.device, x.dtype)
        if isinstance(x, DTensor):
            part = _layouts.wrap_local(part, x.device_mesh, x.placements, x.shape)
        variable._direct_assign(part)


@contextlib.contextmanager
def agreed(doing: str) -> Iterator[None]:
    """What one rank can't do, no rank has done: all of them raise."""
    words, problem = Words(f"agreed/{next(_counter)}"), None
    try:
        yield
    except Exception as error:
        problem = error
    said = words.gathered("" if problem is None else _raised.as_word(problem), doing)
    if problem is not None:
        raise problem
    for rank, word in enumerate(said):
        if word:
            raise CheckpointError(f"Rank {rank} could not {doing}: {word}")
