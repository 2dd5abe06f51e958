"""Attention on CPUs: sharded on batch, on heads, or on the queries of the sequence.

torch has rules for its CUDA kernels and none for this one. The mask is a keyword argument, and
DTensor doesn't redistribute those, so this is a handler.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import local_as, without_empty_shards, wrap

BATCH, HEADS, SEQUENCE = 0, 1, 2


def _sharded_dims(mesh: DeviceMesh, tensors: tuple, *, is_causal: bool) -> list[int | None]:
    """For each mesh axis the dim of the query that it shards."""
    chosen: list[int | None] = []
    for axis in range(mesh.ndim):
        dims = [
            t.placements[axis].dim
            for t in tensors
            if isinstance(t, DTensor) and isinstance(t.placements[axis], Shard)
        ]
        # A causal mask would need each shard's place in the sequence.
        allowed = (BATCH, HEADS) if is_causal else (BATCH, HEADS, SEQUENCE)
        usable = [d for d in dims if d in allowed]
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


@handler("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    query, key, value, *rest = args
    mask = kwargs.get("attn_mask")
    mesh = next(t.device_mesh for t in (query, key, value, mask) if isinstance(t, DTensor))
    dims = _sharded_dims(mesh, (query, key, value), is_causal=_is_causal(rest, kwargs))
    output, logsumexp = op(
        local_as(query, mesh, _query_like(dims)),
        local_as(key, mesh, _key_like(dims)),
        local_as(value, mesh, _key_like(dims)),
        *rest,
        **{**kwargs, "attn_mask": local_as(mask, mesh, _mask_like(dims, mask, query.ndim))},
    )
    return (
        wrap(output, mesh, _query_like(dims), (*query.shape[:-1], value.shape[-1])),
        wrap(logsumexp, mesh, _query_like(dims), query.shape[:-1]),
    )


def _is_causal(rest: list, kwargs: dict) -> bool:
    return bool(rest[1] if len(rest) > 1 else kwargs.get("is_causal", False))


@handler("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def attention_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    grad, query, key, value, output, logsumexp, dropout, is_causal = args
    mask = kwargs.get("attn_mask")
    mesh = output.device_mesh
    dims = _sharded_dims(mesh, (query, key, value), is_causal=is_causal)
    queries, keys = _query_like(dims), _key_like(dims)
    grads = op(
        local_as(grad, mesh, queries),
        local_as(query, mesh, queries),
        local_as(key, mesh, keys),
        local_as(value, mesh, keys),
        local_as(output, mesh, queries),
        local_as(logsumexp, mesh, queries),
        dropout,
        is_causal,
        **{**kwargs, "attn_mask": local_as(mask, mesh, _mask_like(dims, mask, query.ndim))},
    )
    # Each rank saw its own queries only: what they ask of all keys is summed up.
    key_grads = [Partial() if dim == SEQUENCE else p for dim, p in zip(dims, keys, strict=True)]
    return (
        wrap(grads[0], mesh, queries, query.shape),
        wrap(grads[1], mesh, key_grads, key.shape),
        wrap(grads[2], mesh, key_grads, value.shape),
    )
