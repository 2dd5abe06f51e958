"""Random numbers drawn by torch ops on a DTensor.

torch lets every rank draw for its own shard from its own generator, so numbers depend on the mesh
and, with uneven shards, the generators drift apart. Here every rank draws for the whole tensor from
a generator that is in the same state everywhere, and keeps its part: the numbers of one device.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keras_spmd._layouts import local_slice
from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import Placements, local_as, replicated, without_partial, wrap


def _part(whole: torch.Tensor, x: DTensor, placements: Placements) -> torch.Tensor:
    return local_slice(whole, x.device_mesh, placements)


@handler(
    "aten.bernoulli_.float",
    "aten.uniform_.default",
    "aten.normal_.default",
    "aten.exponential_.default",
    "aten.geometric_.default",
    "aten.log_normal_.default",
    "aten.cauchy_.default",
    "aten.random_.default",
    "aten.random_.from",
    "aten.random_.to",
)
def fill(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Ops that overwrite their first argument with numbers that don't depend on it."""
    x, *rest = args
    whole = op(_blank(x), *rest, **kwargs)
    placements = without_partial(x.placements)
    if placements != x.placements:
        blank = wrap(_part(whole, x, placements).clone(), x.device_mesh, placements, x.shape)
        x._local_tensor, x._spec = blank._local_tensor, blank._spec
    else:
        x._local_tensor.copy_(_part(whole, x, placements))
    return x


@handler(
    "aten.rand_like.default",
    "aten.randn_like.default",
    "aten.randint_like.default",
    "aten.randint_like.low_dtype",
)
def draw_like(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, *rest = args
    whole = op(_blank(x), *rest, **kwargs)
    placements = without_partial(x.placements)
    return wrap(_part(whole, x, placements).contiguous(), x.device_mesh, placements, x.shape)


@handler("aten.native_dropout.default")
def dropout(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, rate, train = args
    mesh, placements = x.device_mesh, without_partial(x.placements)
    _, mask = op(torch.ones_like(_blank(x)), rate, train)
    local_mask = _part(mask, x, placements)
    scale = 0.0 if rate == 1 else 1 / (1 - rate) if train else 1.0
    output = local_as(x, mesh, placements) * local_mask * scale
    return (
        wrap(output, mesh, placements, x.shape),
        wrap(local_mask.contiguous(), mesh, placements, x.shape),
    )


@handler("aten.bernoulli.default", "aten.multinomial.default")
def draw_from(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Ops whose numbers depend on the first argument, a tensor of probabilities."""
    x, *rest = args
    mesh = x.device_mesh
    whole = op(local_as(x, mesh, replicated(mesh)), *rest, **kwargs)
    placements = without_partial(x.placements)
    if whole.shape != x.shape:
        return wrap(whole, mesh, replicated(mesh))
    return wrap(_part(whole, x, placements).contiguous(), mesh, placements, x.shape)


def _blank(x: DTensor) -> torch.Tensor:
    """A plain tensor with the shape of the whole."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x._local_tensor.device)
