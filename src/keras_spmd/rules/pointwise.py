"""Gradients of activations, which torch has no rules for: an element needs nothing but itself."""

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from keras_spmd.rules._registry import sharding


@sharding(
    "aten.hardshrink_backward.default",
    "aten.hardsigmoid_backward.default",
    "aten.hardswish_backward.default",
    "aten.hardtanh_backward.default",
    "aten.softshrink_backward.default",
)
def activation_backward(grad: Any, x: Any, *numbers: Any) -> list:
    rest = [None] * len(numbers)
    return [
        ([placement], [placement, placement, *rest])
        for placement in (Replicate(), *map(Shard, range(len(x.shape))))
    ]


@sharding("aten.log_sigmoid_backward.default")
def log_sigmoid_backward(grad: Any, x: Any, buffer: Any) -> list:
    """The buffer is used on CPUs, and has no elements on GPUs."""
    is_used = tuple(buffer.shape) == tuple(x.shape)
    return [
        ([placement], [placement, placement, placement if is_used else Replicate()])
        for placement in (Replicate(), *map(Shard, range(len(x.shape))))
    ]
