"""Statistics of a batch: those of all devices, with one small sum over them.

A sharded batch is one batch here, so `synchronized=True` of batch normalization, which Keras
refuses on torch, is what happens in any case.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from keras_spmd import _layouts
from keras_spmd.rules.pending import summed


def batch_normalization_init_or(original: Callable) -> Callable:
    """`BatchNormalization.__init__`: accepts the argument while a distribution is active."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        synchronized = bool(bound.arguments.get("synchronized"))
        if synchronized and _layouts.active_distribution() is not None:
            bound.arguments["synchronized"] = False
        original(*bound.args, **bound.kwargs)
        # Its config says what was asked for.
        self.synchronized = synchronized

    # Keras reads the names of a layer's arguments from here, not through the wrapper.
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


def moments_or(original: Callable) -> Callable:
    """`moments`: of the whole batch, asked for or not."""

    @functools.wraps(original)
    def moments(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Any:
        if isinstance(x, DTensor) and _are_divided(x, axes):
            mean, variance = _summed_once(x, axes)
            return (mean, variance) if keepdims else (mean.squeeze(axes), variance.squeeze(axes))
        is_global = isinstance(x, DTensor) or _layouts.active_distribution() is not None
        return original(x, axes, keepdims, synchronized=synchronized and not is_global)

    return moments


def _are_divided(x: DTensor, axes: Any) -> bool:
    """Whether devices have parts of what is averaged; float16, too narrow for it, is Keras's."""
    dims = {axis % x.ndim for axis in axes}
    return x.dtype in (torch.float32, torch.bfloat16, torch.float64) and any(
        isinstance(p, Shard) and p.dim in dims for p in x.placements
    )


def _summed_once(x: DTensor, axes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance by Keras's formula; the sums for both go over the mesh together, and so do
    their gradients."""
    count = math.prod(x.shape[axis] for axis in axes)
    sums = torch.stack([x.sum(axes, keepdim=True), x.square().sum(axes, keepdim=True)]) / count
    mean, squares = _Settled.apply(sums)
    return mean, squares - mean.square()


class _Settled(torch.autograd.Function):
    """A pending sum is taken, and so is that of its gradient, before it is divided again."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return summed(grad) if isinstance(grad, DTensor) else grad
