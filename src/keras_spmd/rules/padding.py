"""Reflected and repeated borders: sharded on any dim that gets none. torch has no rules."""

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from keras_spmd.rules._registry import sharding

_KINDS = [f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]


def _others(x: Any, padding: Any) -> list:
    return [Replicate(), *map(Shard, range(len(x.shape) - len(padding) // 2))]


@sharding(*(f"aten.{kind}.default" for kind in _KINDS))
def pad(x: Any, padding: Any) -> list:
    return [([placement], [placement, None]) for placement in _others(x, padding)]


@sharding(*(f"aten.{kind}_backward.default" for kind in _KINDS))
def pad_backward(grad: Any, x: Any, padding: Any) -> list:
    return [([placement], [placement, placement, None]) for placement in _others(x, padding)]
