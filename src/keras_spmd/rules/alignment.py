"""The CTC loss: every sequence is aligned by itself, so a sharded batch stays where it is."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from keras_spmd._layouts import local_shape_and_offset
from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import local_as, mesh_of, without_empty_shards, wrap

# Scores are (time, batch, classes), everything else has the batch first.
SCORES_BATCH = 1


def _batch_axes(mesh: DeviceMesh, scores: Any, targets: Any) -> list[bool]:
    """For each mesh axis whether it shards the batch."""
    batch = scores.shape[SCORES_BATCH]
    # Targets of all sequences in one row can't be told apart.
    usable = targets.ndim == 2 and scores.ndim == 3
    axes = [
        usable and (_is_shard(scores, axis, SCORES_BATCH) or _is_shard(targets, axis, 0))
        for axis in range(mesh.ndim)
    ]
    return [p == Shard(0) for p in without_empty_shards(_like(axes, 0), (batch,), mesh, 0)]


def _is_shard(x: Any, axis: int, dim: int) -> bool:
    return isinstance(x, DTensor) and x.placements[axis] == Shard(dim)


def _like(axes: list[bool], dim: int) -> list[Placement]:
    return [Shard(dim) if sharded else Replicate() for sharded in axes]


def _local_lengths(lengths: Any, mesh: DeviceMesh, rows: list[Placement]) -> Any:
    if isinstance(lengths, torch.Tensor):
        return local_as(lengths, mesh, rows)
    (count,), (start,) = local_shape_and_offset((len(lengths),), mesh, rows)
    return list(lengths)[start : start + count]


@handler(
    "aten._use_cudnn_ctc_loss.default",
    "aten._use_cudnn_ctc_loss.Tensor",
    "aten._use_miopen_ctc_loss.default",
    "aten._use_miopen_ctc_loss.Tensor",
)
def use_another_kernel(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """It would look at all targets; torch's own kernel needs no looking."""
    return False


@handler("aten._ctc_loss.default", "aten._ctc_loss.Tensor")
def ctc_loss(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    scores, targets, score_lengths, target_lengths, *rest = args
    mesh = mesh_of(args)
    axes = _batch_axes(mesh, scores, targets)
    rows = _like(axes, 0)
    loss, alpha = op(
        local_as(scores, mesh, _like(axes, SCORES_BATCH)),
        local_as(targets, mesh, rows),
        _local_lengths(score_lengths, mesh, rows),
        _local_lengths(target_lengths, mesh, rows),
        *rest,
        **kwargs,
    )
    if not any(axes):
        return wrap(loss, mesh, rows), wrap(alpha, mesh, rows)
    batch = scores.shape[SCORES_BATCH]
    # The last dim of alpha goes by the longest target of a rank; only the backward pass sees it.
    return (
        wrap(loss, mesh, rows, (batch,)),
        wrap(alpha, mesh, rows, (batch, *alpha.shape[1:])),
    )


@handler("aten._ctc_loss_backward.default", "aten._ctc_loss_backward.Tensor")
def ctc_loss_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    grad, scores, targets, score_lengths, target_lengths, loss, alpha, *rest = args
    mesh = mesh_of(args)
    axes = _batch_axes(mesh, scores, targets)
    rows, score_like = _like(axes, 0), _like(axes, SCORES_BATCH)
    local = op(
        local_as(grad, mesh, rows),
        local_as(scores, mesh, score_like),
        local_as(targets, mesh, rows),
        _local_lengths(score_lengths, mesh, rows),
        _local_lengths(target_lengths, mesh, rows),
        local_as(loss, mesh, rows),
        local_as(alpha, mesh, rows),
        *rest,
        **kwargs,
    )
    return wrap(local, mesh, score_like, scores.shape)
