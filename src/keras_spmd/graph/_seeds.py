"""The backward pass of a graph begins after the loss is known.

No gradient depends on the loss itself, so a compiler may compute the loss later, and keep the
scores that it is computed from until then: a language model's largest tensor. When the loss comes
first, the gradient of the scores can be written over them.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from keras_spmd import _layouts
from keras_spmd._planning import is_on_gpu


def seed_after(tensors: Any) -> torch.Tensor | None:
    """Ones that are not known before this loss is. None unless it is one number on a GPU: compiled
    for CPUs, loss and gradient are computed together."""
    loss = tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors
    if not isinstance(loss, torch.Tensor) or loss.ndim or not _pays(loss):
        return None
    with torch.no_grad():
        if not isinstance(loss, DTensor):
            return _ones_after(loss)
        mesh = loss.device_mesh
        ones = _ones_after(loss.to_local())
        return _layouts.wrap_local(ones, mesh, [Replicate()] * mesh.ndim, loss.shape)


def _pays(loss: torch.Tensor) -> bool:
    return is_on_gpu(loss)


def _ones_after(value: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(value)
    return torch.where(value == 0, ones, ones)
