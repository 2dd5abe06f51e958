"""Convolutions of 1, 2 and 3 dims, transposed too: sharded on batch, in- or out-channels.

torch has a rule for the batch dim only, and runs a kernel that is sharded on its output channels as
if the result were whole: silently wrong.
"""

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from keras_spmd.rules._registry import sharding
from keras_spmd.rules._specs import is_shardable, only_wanted

Choice = tuple[list[Any], list[Any]]


def _channel_dims(transposed: bool) -> tuple[int, int]:
    """The in- and the out-channel dim of the weight."""
    return (0, 1) if transposed else (1, 0)


def _shardable_channels(weight: Any, transposed: bool, groups: int) -> tuple[bool, bool]:
    """Whether the in- and the out-channels may be sharded.

    A group's channels belong together, and `groups` is a number of the whole.
    """
    if groups != 1:
        return False, False
    in_dim, out_dim = (weight.shape[dim] for dim in _channel_dims(transposed))
    return is_shardable(in_dim, weight.mesh), is_shardable(out_dim, weight.mesh)


@sharding("aten.convolution.default")
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> list[Choice]:
    in_dim, out_dim = _channel_dims(transposed)
    by_in, by_out = _shardable_channels(weight, transposed, groups)
    rest = [None] * 6

    def choice(out: Any, x_is: Any, weight_is: Any, bias_is: Any) -> Choice:
        return [out], [x_is, weight_is, None if bias is None else bias_is, *rest]

    choices = [
        choice(Replicate(), Replicate(), Replicate(), Replicate()),
        choice(Shard(0), Shard(0), Replicate(), Replicate()),
    ]
    if by_out:
        choices.append(choice(Shard(1), Replicate(), Shard(out_dim), Shard(0)))
    if by_in and bias is None:
        # Each rank would add the bias, so a sum over in-channels is for convolutions without one.
        choices.append(choice(Partial(), Shard(1), Shard(in_dim), None))
    return choices


@sharding("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def pixel_shuffle(x: Any, factor: int) -> list[Choice]:
    """Sharded on batch dims only: the others change their size, and an uneven shard with them."""
    choices: list[Choice] = [([Replicate()], [Replicate(), None])]
    choices += [([Shard(dim)], [Shard(dim), None]) for dim in range(x.ndim - 3)]
    return choices


@sharding("aten.convolution_backward.default")
def convolution_backward(
    grad: Any,
    x: Any,
    weight: Any,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> list[Choice]:
    in_dim, out_dim = _channel_dims(transposed)
    by_in, by_out = _shardable_channels(weight, transposed, groups)
    rest = [None] * 8

    def choice(grads: list[Any], inputs: list[Any]) -> Choice:
        return only_wanted(grads, output_mask), [*inputs, *rest]

    choices = [
        choice([Replicate(), Replicate(), Replicate()], [Replicate(), Replicate(), Replicate()]),
        choice([Shard(0), Partial(), Partial()], [Shard(0), Shard(0), Replicate()]),
    ]
    if by_out:
        choices.append(
            choice([Partial(), Shard(out_dim), Shard(0)], [Shard(1), Replicate(), Shard(out_dim)])
        )
    if by_in:
        choices.append(
            choice([Shard(1), Shard(in_dim), Replicate()], [Replicate(), Shard(1), Shard(in_dim)])
        )
    return choices
