"""Checkpoints during `fit`, and going on from the newest one."""

import math
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import torch

from keras_spmd import _layouts, _processes, _stopping
from keras_spmd._feeds import Expected, expect
from keras_spmd._notices import warn_once
from keras_spmd.checkpoints import _index, _saving
from keras_spmd.checkpoints._errors import CheckpointError
from keras_spmd.checkpoints._index import Checkpoint
from keras_spmd.checkpoints._loading import (
    newest_first,
    opened_by_all,
    restore,
    restore_metrics,
)

_TERMINATED = 128 + signal.SIGTERM


class ShardedCheckpoint(keras.callbacks.Callback):
    """Save checkpoints during `fit`, and begin where the newest one was made.

    Example:

    >>> import keras, keras_spmd
    >>> callback = keras_spmd.ShardedCheckpoint("checkpoints", every_steps=500, keep=2)

    Pass it to `fit`. When the program is started again, on this mesh or on another one, it goes on
    in the middle of the epoch, with the same batches, and has the same history and weights in the
    end as if it had never stopped. It runs after the other callbacks, wherever it is in their
    list, and keeps what they know.

    Args:
        path: The folder for the checkpoints of this run, which all ranks can reach.
        every_steps: Save after so many batches. Without this and `every_seconds`, after each epoch.
        every_seconds: Save when so many seconds have passed since the last time.
        keep: How many of the newest checkpoints of this run to keep; None for all of them.
        best: The name of a metric, such as "val_loss". The checkpoint of the epoch in which it was
            best is kept, too; its path is in the attribute `best_path`.
        mode: "min" or "max" is best; "auto" decides by the name.
        restore: Whether to begin with the newest checkpoint of the folder. If not, those that are
            there stay, and new ones get higher numbers.
        asynchronous: Whether to write while training goes on.
        on_sigterm: Whether to save when the process is told to end, and to end then, with the exit
            status 143. In a validation, that is when it is over.
    """

    _keras_spmd_saves = True

    def __init__(
        self,
        path: Any,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int | None = 3,
        best: str | None = None,
        mode: str = "auto",
        restore: bool = True,
        asynchronous: bool = True,
        on_sigterm: bool = True,
    ) -> None:
        super().__init__()
        _check("every_steps", every_steps)
        _check("every_seconds", every_seconds)
        _check("keep", keep)
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"`mode` must be 'auto', 'min' or 'max', got {mode!r}.")
        self.path = Path(path)
        self.every_steps, self.every_seconds, self.keep = every_steps, every_seconds, keep
        self.best, self.restore = best, restore
        self.asynchronous, self.on_sigterm = asynchronous, on_sigterm
        self.is_more_better = mode == "max" or (mode == "auto" and _is_more_better(best))
        self.best_value: float | None = None
        self.best_step: int | None = None
        self.step = 0
        # The steps of this run that are in the folder: others are somebody else's to remove.
        self._own: list[int] = []
        # Where variables are copied to, again and again while a training lasts.
        self._buffers: dict[str, torch.Tensor] = {}
        self._is_due = False
        self._is_terminated = False
        self._previous_handler: Any = None

    @property
    def best_path(self) -> Path | None:
        """The checkpoint of the best epoch so far."""
        return None if self.best_step is None else _index.folder_of(self.path, self.best_step)

    def on_train_begin(self, logs: Any = None) -> None:
        folders = newest_first(self.path)
        self.step, self._own = 0, []
        if self.restore:
            self._restore_newest(folders)
        elif folders:
            self.step = max(map(_index.step_of, folders))
        self._last_time = time.monotonic()
        self._ballot = _stopping.Ballot("_is_due")
        self._is_terminated = False
        if self.on_sigterm and threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: Any) -> None:
        self._is_terminated = True

    def _restore_newest(self, folders: list[Path]) -> None:
        for i, folder in enumerate(folders):
            try:
                checkpoint = opened_by_all(folder)
                restore(self.model, checkpoint)
            except (CheckpointError, OSError) as error:
                if folder == folders[-1]:
                    raise CheckpointError(
                        f"No checkpoint in '{self.path}' can be used. Remove them to begin anew, "
                        f"or pass `restore=False`. The oldest one: {error}"
                    ) from error
                warn_once(
                    ("checkpoint", str(folder)),
                    f"The checkpoint '{folder}' can't be used, an older one is tried: {error}",
                )
            else:
                self._go_on_from(checkpoint)
                self._own = sorted(map(_index.step_of, folders[i:]))
                return

    def _go_on_from(self, checkpoint: Checkpoint) -> None:
        training = checkpoint.index["training"]
        ours = training.get("callback", {})
        self.step = checkpoint.step
        self.best_value, self.best_step = ours.get("value"), ours.get("step")
        set_metrics = lambda: restore_metrics(self.model, checkpoint)  # noqa: E731
        expect(self.model, Expected(training, set_metrics, checkpoint.read))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        # Ranks have clocks and signals of their own, and save at the same step.
        late = self.every_seconds is not None and (
            time.monotonic() - self._last_time >= self.every_seconds
        )
        self._is_due = self._is_terminated or late
        if (self.every_seconds or self.on_sigterm) and _layouts.active_mesh() is not None:
            self._ballot.after_batch(self)
        if self.every_steps is not None and self.step % self.every_steps == 0:
            self._is_due = True
        if self._is_due:
            self._save(asynchronous=self.asynchronous and not self._is_terminated)
            if self._is_told():
                self._leave()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        is_best = self._note_best(logs or {})
        # The vote is counted at once: the next batch may be far away, or never come.
        told = self._is_told()
        if told or is_best or (self.every_steps is None and self.every_seconds is None):
            self._save(asynchronous=self.asynchronous and not told)
        if told:
            self._leave()

    def on_train_end(self, logs: Any = None) -> None:
        _saving.finish()
        self._prune()
        self._give_back()

    def _give_back(self) -> None:
        """What was taken for the time of a `fit`: memory, and the signal."""
        self._buffers = {}
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None

    def _note_best(self, logs: dict) -> bool:
        if self.best is None:
            return False
        if self.best not in logs:
            # Not every epoch is validated.
            if self.best.startswith("val_") and not any(name.startswith("val_") for name in logs):
                return False
            raise ValueError(
                f"`best={self.best!r}` is not a metric of this training, which has {sorted(logs)}."
            )
        value = float(logs[self.best])
        if math.isnan(value):
            return False
        if self.best_value is not None:
            is_better = value > self.best_value if self.is_more_better else value < self.best_value
            if not is_better:
                return False
        self.best_value, self.best_step = value, self.step
        return True

    def _save(self, *, asynchronous: bool) -> None:
        _saving.finish()
        self._prune()
        ours = {"value": self.best_value, "step": self.best_step}
        _saving.save(
            self.model,
            self.path,
            self.step,
            asynchronous=asynchronous,
            callback=ours,
            buffers=self._buffers,
        )
        self._own = [step for step in self._own if step != self.step] + [self.step]
        self._last_time = time.monotonic()

    def _prune(self) -> None:
        if self.keep is None:
            return
        for step in self._own[: -self.keep]:
            if step != self.best_step:
                self._own.remove(step)
                if _processes.process_id() == 0:
                    _index.remove(_index.folder_of(self.path, step))

    def _is_told(self) -> bool:
        """Whether any rank was told to end. Takes all ranks."""
        if _layouts.active_mesh() is None or not self.on_sigterm:
            return self._is_terminated
        return _stopping.is_wanted_by_any(self._is_terminated)

    def _leave(self) -> None:
        _saving.finish()
        self._say(f"saved step {self.step} in '{self.path}' and ends, as it was told to.")
        raise SystemExit(_TERMINATED)

    def _say(self, what: str) -> None:
        if _processes.process_id() == 0:
            sys.stderr.write(f"keras_spmd: {what}\n")
            sys.stderr.flush()


def _check(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"`{name}` must be more than 0, got {value!r}.")


def _is_more_better(metric: str | None) -> bool:
    words = ("acc", "auc", "precision", "recall", "f1", "iou", "score", "r2", "cosine")
    return metric is not None and any(word in metric.lower() for word in words)
