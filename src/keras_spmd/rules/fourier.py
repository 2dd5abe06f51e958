"""Fourier transforms: sharded on any dim that they don't go along.

torch 2.13 has such rules, but the kernel of CPUs refuses a tensor without elements, which the last
rank of an uneven batch may have.
"""

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from keras_spmd.rules._registry import sharding
from keras_spmd.rules._specs import is_shardable


@sharding("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default")
def transform(x: Any, dims: list[int], *rest: Any) -> list:
    rank = len(x.shape)
    others = set(range(rank)) - {dim % rank for dim in dims}
    usable = [Shard(d) for d in sorted(others) if is_shardable(x.shape[d], x.mesh)]
    return [([p], [p, None, *[None] * len(rest)]) for p in (Replicate(), *usable)]
