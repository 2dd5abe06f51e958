"""What `BackupAndRestore` needs besides Keras's files to go on exactly: a small file of its own,
and one beside it if callbacks have arrays, such as the best weights.

It is written before the weights and says for how many updates it holds. So whichever weights are
complete when a job is killed, there is a file for them.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from keras import ops

from keras_spmd import _callbacks, _layouts, _messages, _resuming, _saving
from keras_spmd._feeds import Expected, expect
from keras_spmd.checkpoints import _safetensors
from keras_spmd.checkpoints._names import OPTIMIZER, OPTIMIZERS, matched
from keras_spmd.checkpoints._safetensors import Part
from keras_spmd.checkpoints._state import variables_of

_PATTERN = "training-*.json"


def _file(callback: Any, updates: int) -> Path:
    return Path(callback.backup_dir) / f"training-{updates:010d}.json"


def _updates_of(model: Any) -> int:
    return int(model.optimizer.iterations)


def _small_state(model: Any) -> dict[str, Any]:
    """Seeds and metrics, which Keras's files of weights leave out."""
    weights = {id(v) for v in model.weights}
    return {
        name: v
        for name, v in variables_of(model).items()
        if not name.startswith((OPTIMIZER, OPTIMIZERS)) and id(v) not in weights
    }


def save_model_or(original: Callable) -> Callable:
    """`BackupAndRestore._save_model`."""

    def _save_model(self: Any) -> None:
        if _layouts.active_distribution() is None:
            original(self)
            return
        file = _file(self, _updates_of(self.model))
        callbacks = _callbacks.kept(_resuming.callbacks_of(self.model))
        training = {**_resuming.state_of(self.model), "callbacks": callbacks.states}
        values = {n: ops.convert_to_numpy(v) for n, v in _small_state(self.model).items()}
        _saving.done_by_rank_0(
            lambda: _write(file, values, training, callbacks.arrays),
            f"save what goes with a backup in '{self.backup_dir}'",
        )
        original(self)
        if not _messages.is_listener():
            # One more is kept, for the weights before these.
            for old in sorted(file.parent.glob(_PATTERN))[:-2]:
                _arrays_file(old).unlink(missing_ok=True)
                old.unlink()

    return _save_model


def _write(
    file: Path,
    values: dict[str, np.ndarray],
    training: dict[str, Any],
    arrays: dict[str, torch.Tensor],
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lists = {n: [str(x.dtype), x.tolist()] for n, x in values.items()}
    state: dict[str, Any] = {"variables": lists, "training": training}
    parts = {n: Part(x, (0,) * x.ndim) for n, x in arrays.items()}
    state["arrays"] = _safetensors.write(_arrays_file(file), parts) if parts else None
    new = file.with_name(f".{file.name}")
    new.write_text(json.dumps(state))
    new.replace(file)


def load_model_or(original: Callable) -> Callable:
    """`BackupAndRestore._load_model`."""

    def _load_model(self: Any) -> None:
        original(self)
        if _layouts.active_distribution() is None or not self.model.optimizer.built:
            return
        file = _file(self, _updates_of(self.model))
        if not file.exists():
            return
        state = json.loads(file.read_text())
        _set(self.model, state["variables"])
        set_metrics = lambda: _set(self.model, state["variables"], only="metrics/")  # noqa: E731
        read = partial(_read, _arrays_file(file), state.get("arrays"))
        expect(self.model, Expected(state["training"], set_metrics, read))

    return _load_model


def _arrays_file(file: Path) -> Path:
    return file.with_suffix(_safetensors.SUFFIX)


def _read(path: Path, record: dict[str, Any], name: str) -> torch.Tensor:
    part = record["tensors"][name]
    box = [slice(0, size) for size in part["shape"]]
    return _safetensors.File(path, record["bytes"], record["header"]).read(name, part, box)


def _set(model: Any, saved: dict[str, Any], only: str = "") -> None:
    variables = _small_state(model)
    for name, old in matched(variables, saved, model).items():
        dtype, numbers = saved[old]
        if name.startswith(only):
            variables[name].assign(np.array(numbers, dtype))
