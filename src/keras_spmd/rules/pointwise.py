"""Ops on each element by itself that torch has no rules for; many are gradients of activations."""

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


@sharding("aten.complex.default")
def complex_number(real: Any, imaginary: Any) -> list:
    """Of two tensors of one shape; a broadcast one is whole."""
    rank = max(len(real.shape), len(imaginary.shape))
    choices: list = [([Replicate()], [Replicate(), Replicate()])]
    if tuple(real.shape) == tuple(imaginary.shape):
        choices += [([Shard(dim)], [Shard(dim), Shard(dim)]) for dim in range(rank)]
    return choices


@sharding("aten.log_sigmoid_forward.default")
def log_sigmoid(x: Any) -> list:
    """It also returns a buffer, which has no elements on GPUs, whatever shape torch believes in."""
    is_used = x.mesh.device_type == "cpu"
    return [
        ([p, p if is_used else Replicate()], [p])
        for p in (Replicate(), *map(Shard, range(len(x.shape))))
    ]


@sharding("aten.log_sigmoid_backward.default")
def log_sigmoid_backward(grad: Any, x: Any, buffer: Any) -> list:
    is_used = x.mesh.device_type == "cpu"
    return [
        ([placement], [placement, placement, placement if is_used else Replicate()])
        for placement in (Replicate(), *map(Shard, range(len(x.shape))))
    ]
