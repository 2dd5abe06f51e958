"""Attention: sharded on batch, on heads, or on the queries of the sequence.

torch has no rule for the kernel of CPUs, whose mask is a keyword argument, which DTensor doesn't
redistribute. Of its kernels for GPUs the two that take a mask want it aligned in memory: what torch
has aligned for the whole isn't for a shard.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import (
    local_as,
    mesh_of,
    replicated,
    without_empty_shards,
    wrap,
)

BATCH, HEADS, SEQUENCE = 0, 1, 2
# Rows of a mask begin at multiples of so many elements.
ALIGNMENT = 16


def _sharded_dims(mesh: DeviceMesh, tensors: tuple, *, is_causal: bool) -> list[int | None]:
    """For each mesh axis the dim of the query that it shards."""
    chosen: list[int | None] = []
    # Of fewer heads of keys a rank might have others than its queries ask.
    has_all_heads = len({t.shape[HEADS] for t in tensors}) == 1
    for axis in range(mesh.ndim):
        dims = [
            t.placements[axis].dim
            for t in tensors
            if isinstance(t, DTensor) and isinstance(t.placements[axis], Shard)
        ]
        # A causal mask would need each shard's place in the sequence.
        allowed = (BATCH, HEADS) if is_causal else (BATCH, HEADS, SEQUENCE)
        usable = [d for d in dims if d in allowed and (d != HEADS or has_all_heads)]
        chosen.append(usable[0] if usable else None)
    placements = _query_like(chosen)
    for dim in (BATCH, HEADS, SEQUENCE):
        placements = without_empty_shards(placements, tensors[0].shape, mesh, dim)
    return [p.dim if isinstance(p, Shard) else None for p in placements]


def _query_like(dims: list[int | None]) -> list[Placement]:
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def _key_like(dims: list[int | None]) -> list[Placement]:
    """Keys and values are needed whole in the sequence."""
    return [Replicate() if dim in (None, SEQUENCE) else Shard(dim) for dim in dims]


def _mask_like(dims: list[int | None], mask: Any, ndim: int) -> list[Placement]:
    if mask is None:
        return []
    missing = ndim - mask.ndim
    return [
        Shard(dim - missing)
        if dim is not None and dim >= missing and mask.shape[dim - missing] > 1
        else Replicate()
        for dim in dims
    ]


class _Parts:
    """The parts of queries, keys, values and a mask that this rank computes with."""

    def __init__(self, query: Any, key: Any, value: Any, mask: Any, *, is_causal: bool) -> None:
        self.mesh = mesh_of(query, key, value, mask)
        dims = _sharded_dims(self.mesh, (query, key, value), is_causal=is_causal)
        self.queries, self.keys = _query_like(dims), _key_like(dims)
        self.of_mask = _mask_like(dims, mask, query.ndim)
        # Each rank sees its own queries only: what they ask of all keys is to be summed up.
        self.key_grads = [
            Partial() if dim == SEQUENCE else p for dim, p in zip(dims, self.keys, strict=True)
        ]
        self.inputs = [
            local_as(query, self.mesh, self.queries),
            local_as(key, self.mesh, self.keys),
            local_as(value, self.mesh, self.keys),
        ]
        self.mask = local_as(mask, self.mesh, self.of_mask)

    def query_like(self, x: Any) -> Any:
        return local_as(x, self.mesh, self.queries)

    def results(self, outputs: tuple, query: Any, value: Any) -> tuple:
        """The output, and what only the backward pass will look at."""
        output, logsumexp, *rest = outputs
        shape = (*query.shape[:-1], value.shape[-1])
        # Some kernels pad it, so a shard's is no part of a whole one.
        kept = wrap(logsumexp, self.mesh, self.queries)
        others = (
            wrap(x, self.mesh, replicated(self.mesh)) if isinstance(x, torch.Tensor) else x
            for x in rest
        )
        return wrap(output, self.mesh, self.queries, shape), kept, *others

    def gradients(self, grads: tuple, query: Any, key: Any, value: Any) -> list:
        return [
            None if g is None else wrap(g, self.mesh, placements, x.shape)
            for g, placements, x in zip(
                grads,
                (self.queries, self.key_grads, self.key_grads),
                (query, key, value),
                strict=True,
            )
        ]


def _plain(x: Any) -> Any:
    return x._local_tensor if isinstance(x, DTensor) else x


@handler("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    query, key, value, *rest = args
    is_causal = rest[1] if len(rest) > 1 else kwargs.get("is_causal", False)
    here = _Parts(query, key, value, kwargs.get("attn_mask"), is_causal=is_causal)
    outputs = op(*here.inputs, *rest, **{**kwargs, "attn_mask": here.mask})
    return here.results(outputs, query, value)


@handler("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def attention_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    grad, query, key, value, output, logsumexp, dropout, is_causal = args
    here = _Parts(query, key, value, kwargs.get("attn_mask"), is_causal=is_causal)
    grads = op(
        here.query_like(grad),
        *here.inputs,
        here.query_like(output),
        _plain(logsumexp),
        dropout,
        is_causal,
        **{**kwargs, "attn_mask": here.mask},
    )
    return tuple(here.gradients(grads, query, key, value))


def _aligned(mask: torch.Tensor | None) -> torch.Tensor | None:
    if mask is None:
        return None
    steps, columns = mask.stride(), mask.shape[-1]
    if steps[-1] == 1 and all(step % ALIGNMENT == 0 for step in steps[:-1]):
        return mask
    repeated = [dim for dim in range(mask.ndim - 1) if steps[dim] == 0]
    part = mask
    for dim in repeated:
        part = part.narrow(dim, 0, 1)
    padded = F.pad(part.contiguous(), (0, -columns % ALIGNMENT))[..., :columns]
    return padded.expand(mask.shape)


@handler(
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
)
def attention_on_gpu(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    query, key, value, mask, *rest = args
    is_causal = rest[2] if len(rest) > 2 else kwargs.get("is_causal", False)
    here = _Parts(query, key, value, mask, is_causal=is_causal)
    return here.results(op(*here.inputs, _aligned(here.mask), *rest, **kwargs), query, value)


@handler("aten._scaled_dot_product_efficient_attention_backward.default")
def efficient_attention_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    grad, query, key, value, mask, output, logsumexp, seed, offset, dropout, wanted, *rest = args
    is_causal = rest[0] if rest else kwargs.get("is_causal", False)
    here = _Parts(query, key, value, mask, is_causal=is_causal)
    *grads, of_mask = op(
        here.query_like(grad),
        *here.inputs,
        _aligned(here.mask),
        here.query_like(output),
        _plain(logsumexp),
        _plain(seed),
        _plain(offset),
        dropout,
        wanted,
        *rest,
        **kwargs,
    )
    if mask is not None and wanted[3]:
        of_mask = wrap(of_mask, here.mesh, here.of_mask, mask.shape)
    return *here.gradients(tuple(grads), query, key, value), of_mask


@handler("aten._scaled_dot_product_cudnn_attention_backward.default")
def cudnn_attention_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    grad, query, key, value, output, logsumexp, seed, offset, mask, *rest = args
    here = _Parts(query, key, value, mask, is_causal=rest[-1])
    grads = op(
        here.query_like(grad),
        *here.inputs,
        here.query_like(output),
        _plain(logsumexp),
        _plain(seed),
        _plain(offset),
        _aligned(here.mask),
        *map(_plain, rest),
        **kwargs,
    )
    return tuple(here.gradients(grads, query, key, value))
