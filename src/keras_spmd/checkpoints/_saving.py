"""Writing a checkpoint: every rank its own file, and rank 0 the index when all are there."""

import contextlib
import itertools
import json
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import torch
from keras.src.utils.torch_utils import TorchModuleWrapper

from keras_spmd import _callbacks, _failures, _processes, _raised, _resuming
from keras_spmd._progress import progress_of_bytes
from keras_spmd._words import Words
from keras_spmd.checkpoints import _index
from keras_spmd.checkpoints._errors import CheckpointError
from keras_spmd.checkpoints._safetensors import SUFFIX, Part, code_of, write
from keras_spmd.checkpoints._state import own_parts, variables_of

_counter = itertools.count()


# One thread, which stays: to start one means to wait until it runs. It is joined at exit.
_writer = ThreadPoolExecutor(1, "keras_spmd checkpoint")


class Saving:
    """A checkpoint that is being written while the program goes on."""

    def __init__(self, path: Path, run: Callable[[], None]) -> None:
        self.path = path
        self._future: Future[None] | None = _writer.submit(run)

    def done(self) -> bool:
        """Whether it came to its end."""
        return self._future is None or self._future.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete. Raises what went wrong, on all ranks."""
        future, self._future = self._future, None
        if future is not None:
            future.result()
        return self.path


_last: Saving | None = None


def finish() -> None:
    """Wait for the checkpoint that is being written, if there is one."""
    global _last
    last, _last = _last, None
    if last is not None:
        last.wait()


def _finish_before_leaving() -> None:
    if not _failures.is_ending():
        finish()


_processes.before_leaving(_finish_before_leaving)


def save_checkpoint(
    model: Any, path: Any, *, step: int | None = None, asynchronous: bool = False
) -> Any:
    """Save everything that is needed to go on: weights, optimizer, metrics, seeds, position.

    Example:

    >>> import keras, keras_spmd
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    >>> keras_spmd.save_checkpoint(model, "checkpoints", step=40)
    PosixPath('checkpoints/step-00000040')

    All ranks call it, and each writes what it holds. A model on another mesh, or on none, can load
    it. What is in the folder under the same step is replaced once the new one is complete.

    Args:
        model: A built model.
        path: The folder for the checkpoints of a run, which all ranks can reach.
        step: The number of this checkpoint; how many batches the optimizer has seen, by default.
        asynchronous: Whether to write in a thread. The call takes as long as a copy to the host's
            memory then, and waits for an earlier checkpoint that is still being written.

    Returns:
        The path of the checkpoint; with `asynchronous=True` an object whose `wait()` returns it.
    """
    if not model.built:
        raise ValueError(
            f"The model '{model.name}' has no variables yet. Build it, or call it on a batch."
        )
    if "://" in str(path):
        raise ValueError(f"Checkpoints are written to folders, not to addresses, got '{path}'.")
    step = _steps_of(model) if step is None else step
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"`step` must be a number of at least 0, got {step!r}.")
    return save(model, Path(path), step, asynchronous=asynchronous)


def save(
    model: Any,
    path: Path,
    step: int,
    *,
    asynchronous: bool,
    callback: dict | None = None,
    buffers: dict[str, torch.Tensor] | None = None,
) -> Any:
    """`save_checkpoint`; `callback` is kept with the state of the training.

    Who saves again gives the same `buffers`.
    """
    global _last
    finish()
    buffers = {} if buffers is None else buffers
    writing = _Writing(model, path, step, buffers if asynchronous else None)
    writing.rest.get("training", {}).update({} if callback is None else {"callback": callback})
    if not asynchronous:
        size = sum(part.tensor.nbytes for part in writing.parts.values())
        with progress_of_bytes(f"Saving '{writing.folder}'", total=size) as advance:
            writing.run(advance)
        return writing.folder
    _last = Saving(writing.folder, writing.run)
    return _last


def _steps_of(model: Any) -> int:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return 0
    # Unlike `iterations`, with gradients that are accumulated, too: as a callback counts.
    return int(getattr(optimizer, "inner_optimizer", optimizer)._iterations)


class _Writing:
    """One checkpoint, as one rank sees it."""

    def __init__(
        self, model: Any, path: Path, step: int, buffers: dict[str, torch.Tensor] | None
    ) -> None:
        self.path, self.step = path, step
        self.folder = _index.folder_of(path, step)
        # What is said to the others can wait: until then the training does.
        self.matter = f"checkpoint/{next(_counter)}"
        rank, size = _processes.process_id(), _processes.num_processes()
        variables = variables_of(model)
        about = {n: _about(v._value, n) for n, v in variables.items()}
        self.parts = own_parts(variables, buffers)
        callbacks = _callbacks.kept(_resuming.callbacks_of(model))
        about |= {n: _about(x, n) for n, x in callbacks.arrays.items()}
        training = {**_resuming.state_of(model), "callbacks": callbacks.states}
        # All ranks have them as a whole, so they share the work. Nobody writes into them.
        for i, (name, x) in enumerate(callbacks.arrays.items()):
            if i % size == rank:
                self.parts[name] = Part(x, (0,) * x.ndim)
        self.rest: dict[str, Any] = {}
        if rank == 0:
            self.rest = {
                "step": step,
                "keras": keras.__version__,
                "variables": about,
                "training": training,
                "model": _config_of(model),
            }

    def _agreed_token(self) -> str:
        """What is in the names of this checkpoint's files. Ranks save the same thing."""
        what = [str(self.path), self.step]
        if self.words.rank == 0:
            self.words.say("plan", json.dumps([secrets.token_hex(6), *what]))
        heard = self.words.hear(0, "plan", f"save the checkpoint '{self.folder}'")
        token, *others = json.loads(heard)
        if others != what:
            raise ValueError(
                f"Rank {self.words.rank} saves step {self.step} in '{self.path}', but rank 0 saves "
                f"step {others[1]} in '{others[0]}'. All ranks must save the same checkpoint."
            )
        return token

    def run(self, advance: Callable[[int], object] = lambda count: None) -> None:
        self.words = Words(self.matter)
        rank, size = self.words.rank, self.words.size
        file = self.folder / f"{self._agreed_token()}-{rank:05d}-of-{size:05d}{SUFFIX}"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            record = write(file, self.parts, advance)
        except Exception as error:
            # Whatever it is: the others must not wait for it.
            record = {"error": _raised.as_word(error)}
        self.parts = {}
        self.words.say("file", json.dumps(record))
        if rank == 0:
            self.words.say("end", self._commit())
        problem = self.words.hear(0, "end", f"complete the checkpoint '{self.folder}'")
        if problem:
            with contextlib.suppress(OSError):
                file.unlink()
        self.words.part("plan", "file", "end")
        if problem:
            raise CheckpointError(f"The checkpoint '{self.folder}' was not saved: {problem}")

    def _commit(self) -> str:
        """Write the index when all files are there; what went wrong, or nothing."""
        doing = f"write its part of the checkpoint '{self.folder}'"
        heard = [self.words.hear(r, "file", doing) for r in range(self.words.size)]
        records = [json.loads(word) for word in heard]
        for rank, record in enumerate(records):
            if "error" in record:
                return f"rank {rank}: {record['error']}"
        try:
            _index.write_index(self.folder, records, self.rest)
        except Exception as error:
            return f"rank 0: {_raised.as_word(error)}"
        _index.remove_incomplete(self.path, keep=self.folder)
        return ""


def _about(x: torch.Tensor, name: str) -> dict[str, Any]:
    return {"shape": list(x.shape), "dtype": code_of(x.dtype, name)}


def _config_of(model: Any) -> Any:
    """How to make the model anew; None if it can't say, or if that takes a pickle."""
    if any(isinstance(layer, TorchModuleWrapper) for layer in model._flatten_layers()):
        return None
    try:
        config = keras.saving.serialize_keras_object(model)
        json.dumps(config)
    except Exception:
        # A model's own code, and only rank 0 runs it.
        return None
    return config
