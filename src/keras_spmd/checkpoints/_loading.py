"""Reading a checkpoint: every rank what its shards need, whatever mesh wrote it."""

import itertools
import json
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from keras_spmd import _layouts
from keras_spmd._generators import set_random_states
from keras_spmd._loading import bytes_held
from keras_spmd._progress import progress_of_bytes
from keras_spmd._words import Words
from keras_spmd.checkpoints import _index, _saving
from keras_spmd.checkpoints._errors import CheckpointError
from keras_spmd.checkpoints._index import Checkpoint
from keras_spmd.checkpoints._state import (
    check_fit,
    have_same_shape,
    make_what_is_missing,
    matched,
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
    """All complete checkpoints of a folder, as rank 0 sees it."""
    _saving.finish()
    words = Words(f"checkpoints/{next(_counter)}")
    found = [str(folder) for folder in reversed(_index.steps_in(path).values())]
    of_0 = words.gathered(json.dumps(found), f"look for checkpoints in '{path}'")[0]
    return [Path(folder) for folder in json.loads(of_0)]


def opened(path: Path, step: int | None = None) -> Checkpoint:
    """The checkpoint at a path, or the newest one of a folder."""
    if step is not None:
        _saving.finish()
        return Checkpoint(_index.folder_of(path, step))
    if (path / _index.INDEX).is_file():
        return Checkpoint(path)
    folders = newest_first(path)
    if not folders:
        raise FileNotFoundError(
            f"There is no complete checkpoint in '{path}'"
            + ("." if path.is_dir() else ", which is not a folder.")
        )
    return Checkpoint(folders[0])


def restore(model: Any, checkpoint: Checkpoint) -> None:
    """Set all variables; if one rank can't, all of them raise."""
    if not model.built:
        raise ValueError(
            f"The model '{model.name}' has no variables yet. Build it, or call it on a batch."
        )
    make_what_is_missing(model, checkpoint.variables)
    variables = variables_of(model)
    check_fit(variables, checkpoint.variables, model)
    problem = None
    try:
        _set_all(model, variables, checkpoint)
    except CheckpointError as error:
        problem = error
    _agree_on(problem)


def restore_metrics(model: Any, checkpoint: Checkpoint) -> None:
    """Set the metrics' variables alone."""
    variables = variables_of(model)
    metrics = {n: v for n, v in variables.items() if n.startswith("metrics/")}
    _set_all(model, metrics, checkpoint)


def _set_all(model: Any, variables: dict[str, Any], checkpoint: Checkpoint) -> None:
    found = [
        (variables[name], saved)
        for name, saved in matched(variables, checkpoint.variables, model).items()
        if have_same_shape(variables[name], checkpoint.variables[saved])
    ]
    size = sum(bytes_held(variable) for variable, _ in found)
    with progress_of_bytes(f"Loading '{checkpoint.folder}'", total=size) as advance:
        for variable, saved in found:
            _set(variable, checkpoint, saved)
            advance(bytes_held(variable))


def _set(variable: Any, checkpoint: Checkpoint, name: str) -> None:
    x = variable._value
    if not isinstance(x, DTensor):
        variable._direct_assign(checkpoint.read(name).to(x.device, x.dtype))
        return
    mesh, placements = x.device_mesh, x.placements
    shape, start = _layouts.local_shape_and_offset(x.shape, mesh, placements)
    local = checkpoint.read(name, start, shape).to(x.device, x.dtype)
    variable._direct_assign(_layouts.wrap_local(local, mesh, placements, x.shape))


def _agree_on(problem: Exception | None) -> None:
    words = Words(f"loading/{next(_counter)}")
    problems = words.gathered("" if problem is None else str(problem), "load a checkpoint")
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text:
            raise CheckpointError(f"Rank {rank} could not load the checkpoint: {text}")
