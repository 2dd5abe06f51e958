"""From one kind of file to another, in one process and without a mesh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from keras_spmd.checkpoints import _index
from keras_spmd.checkpoints._index import Checkpoint
from keras_spmd.checkpoints._loading import opened, restore
from keras_spmd.checkpoints._saving import save_checkpoint

MODEL, WEIGHTS = ".keras", ".weights.h5"


def convert(
    source: Any,
    target: Any,
    *,
    make_model: Callable[[], Any] | None = None,
    step: int | None = None,
) -> Path:
    """Turn a sharded checkpoint, a `.keras` or a `.weights.h5` file into another of these.

    Args:
        source: A file, a checkpoint, or a folder of checkpoints.
        target: A file, or a folder in which a checkpoint is made.
        make_model: Makes the model. Not needed where the source says how.
        step: Which checkpoint of a folder to read, or the number of the one that is made.

    Returns:
        What was written.
    """
    source, target = Path(source), Path(target)
    _check(source, target)
    model, found = _loaded(source, make_model, step)
    if target.name.endswith(MODEL):
        model.save(target)
    elif target.name.endswith(WEIGHTS):
        model.save_weights(target)
    else:
        return save_checkpoint(model, target, step=found if step is None else step)
    return target


def _check(source: Path, target: Path) -> None:
    if not source.exists():
        raise FileNotFoundError(f"There is no '{source}'.")
    is_file = source.name.endswith((MODEL, WEIGHTS))
    if not is_file and not source.is_dir():
        raise ValueError(
            f"'{source}' is neither a checkpoint's folder nor a {MODEL} or {WEIGHTS} file."
        )
    if target.suffix in (".h5", ".hdf5") and not target.name.endswith(WEIGHTS):
        raise ValueError(f"'{target}' must end with {WEIGHTS}, as Keras wants it.")


def _loaded(source: Path, make_model: Callable | None, step: int | None) -> tuple[Any, int | None]:
    """The model with its state, and the number of the checkpoint it is from."""
    if source.name.endswith(MODEL) and make_model is None:
        return keras.saving.load_model(source), None
    if source.name.endswith((MODEL, WEIGHTS)):
        model = _made(make_model, f"'{source}' does not say which model it is of.")
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            # Its state is in Keras's files of weights, too.
            optimizer.build(model.trainable_variables)
        model.load_weights(source)
        return model, None
    checkpoint = opened(source, None if (source / _index.INDEX).is_file() else step)
    model = _from_config(checkpoint) if make_model is None else _made(make_model, "")
    restore(model, checkpoint)
    return model, checkpoint.step


def _made(make_model: Callable | None, why: str) -> Any:
    if make_model is None:
        raise ValueError(f"{why} Say how to make it: --model module:function.")
    model = make_model()
    if not getattr(model, "built", False):
        raise ValueError(f"The model that {make_model.__name__}() makes must be built.")
    return model


def _from_config(checkpoint: Checkpoint) -> Any:
    config = checkpoint.index["model"]
    if config is None:
        raise ValueError(
            f"The checkpoint '{checkpoint.folder}' is of a model that can't say how it is made. "
            "Say it: --model module:function."
        )
    return keras.saving.deserialize_keras_object(config)
