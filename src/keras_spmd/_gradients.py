"""Gradients reach the optimizer in their variable's layout, reduced once and in buckets.

A gradient that is left as a pending sum would be summed again by every op of the update.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from keras_spmd import _layouts, _promotion
from keras_spmd._capturing import is_capturing

BUCKET_BYTES = 25 * 2**20


def lay_out_gradients(grads: Sequence[Any], values: Sequence[torch.Tensor]) -> list[Any]:
    """The gradients in the layouts of their variables. None stays None."""
    result: list[Any] = list(grads)
    sums: dict[tuple, list[int]] = {}
    for i, (grad, value) in enumerate(zip(grads, values, strict=True)):
        if not isinstance(grad, DTensor):
            if isinstance(grad, torch.Tensor) and isinstance(value, DTensor):
                result[i] = _promotion.ensure_dtensor(grad, value.device_mesh, value.placements)
        elif not isinstance(value, DTensor):
            # A variable that was made before the distribution is whole on every rank.
            result[i] = grad.full_tensor()
        elif grad.device_mesh != value.device_mesh:
            result[i] = _promotion.ensure_dtensor(grad, value.device_mesh, value.placements)
        elif grad.placements != value.placements:
            # The graph's own pass makes buckets of what is reduced one by one.
            axes = () if is_capturing() else _axes_to_sum(grad, value)
            if axes:
                # By value: torch's cached decisions hold meshes that are equal to this one.
                sums.setdefault((grad.device_mesh, axes, grad.dtype), []).append(i)
            else:
                result[i] = grad.redistribute(value.device_mesh, value.placements)
    for (_, axes, _), members in sums.items():
        for bucket in _buckets(members, grads):
            _sum_bucket(bucket, axes, grads, values, result)
    return result


def _axes_to_sum(grad: DTensor, value: DTensor) -> tuple[int, ...]:
    """The mesh axes over which the gradient must be summed, if that is all it needs."""
    axes = []
    for axis, (have, want) in enumerate(zip(grad.placements, value.placements, strict=True)):
        if have == want:
            continue
        if have != Partial() or want != Replicate():
            return ()
        axes.append(axis)
    return tuple(axes)


def _buckets(members: list[int], grads: Sequence[Any]) -> list[list[int]]:
    """Runs of gradients of about the bucket's size, in their order."""
    buckets: list[list[int]] = [[]]
    size = 0
    for i in members:
        nbytes = grads[i].to_local().nbytes
        if buckets[-1] and size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += nbytes
    return buckets


def _sum_bucket(
    bucket: list[int],
    axes: tuple[int, ...],
    grads: Sequence[Any],
    values: Sequence[Any],
    result: list[Any],
) -> None:
    mesh = grads[bucket[0]].device_mesh
    parts = [grads[i].to_local() for i in bucket]
    flat = torch.cat([part.reshape(-1) for part in parts])
    for axis in axes:
        dist.all_reduce(flat, group=mesh.get_group(axis))
    for i, part, piece in zip(bucket, parts, flat.split([p.numel() for p in parts]), strict=True):
        result[i] = _layouts.wrap_local(
            piece.view(part.shape), mesh, values[i].placements, grads[i].shape
        )
