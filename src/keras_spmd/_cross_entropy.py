"""Cross-entropy of scores with their classes last, without moving them to the front.

torch wants the classes second, so Keras transposes the scores of a language model, its largest
tensor. One row for each token needs no transposition.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from keras_spmd import _layouts
from keras_spmd._capturing import is_capturing


def sparse_categorical_crossentropy_or(original: Callable) -> Callable:
    """The same loss of `(rows, classes)` where scores have more dims, in a graph or on a mesh."""

    def sparse_categorical_crossentropy(
        target: Any, output: Any, from_logits: bool = False, axis: int = -1
    ) -> Any:
        is_ours = is_capturing() or _layouts.active_mesh() is not None
        if not is_ours or not _can_be_rows(target, output, axis):
            return original(target, output, from_logits, axis)
        rows = output.reshape(-1, output.shape[-1])
        loss = original(target.reshape(-1), rows, from_logits, -1)
        return loss.reshape(target.shape)

    sparse_categorical_crossentropy.__doc__ = original.__doc__
    return sparse_categorical_crossentropy


def _can_be_rows(target: Any, output: Any, axis: int) -> bool:
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    if output.ndim < 3 or axis not in (-1, output.ndim - 1):
        return False
    if output.is_meta or tuple(target.shape) != tuple(output.shape[:-1]):
        return False
    return all(_merges(x, output.ndim - 1) for x in (target, output) if isinstance(x, DTensor))


def _merges(x: DTensor, classes: int) -> bool:
    """Whether all dims but the classes become one without communication."""
    for axis, p in enumerate(x.placements):
        is_uneven = x.shape[0] % x.device_mesh.size(axis) != 0
        if isinstance(p, Shard) and p.dim != classes and (p.dim != 0 or is_uneven):
            return False
    return True
