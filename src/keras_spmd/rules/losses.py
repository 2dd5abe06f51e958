"""torch's loss functions.

With `reduction="mean"` torch lets every rank divide by the number of its own elements in the
backward pass, and for the likelihood loss also in the forward pass: gradients come out too large by
the number of shards, and ignored targets count where they should not. Here each rank sums, and the
division is by the number of all.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import (
    Placements,
    local_as,
    mesh_of,
    replicated,
    without_partial,
    wrap,
)

NONE, MEAN, SUM = 0, 1, 2
aten = torch.ops.aten


def _reduction_index(op: torch._ops.OpOverload) -> int:
    return [argument.name for argument in op._schema.arguments].index("reduction")


def _with_reduction(op: torch._ops.OpOverload, args: tuple, value: int) -> tuple[int, list]:
    """The reduction that was asked for, and all arguments with another in its place."""
    defaults = [a.default_value for a in op._schema.arguments]
    filled = [*args, *defaults[len(args) :]]
    index = _reduction_index(op)
    asked, filled[index] = filled[index], value
    return asked, filled


def _common(mesh: DeviceMesh, *tensors: Any) -> Placements:
    """Placements of the first sharded tensor: these losses work element by element."""
    for x in tensors:
        if isinstance(x, DTensor) and any(isinstance(p, Shard) for p in x.placements):
            return without_partial(x.placements)
    return replicated(mesh)


def _locals(args: list, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> list:
    return [
        local_as(x.expand(shape), mesh, placements) if isinstance(x, torch.Tensor) else x
        for x in args
    ]


@handler(
    "aten.mse_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.huber_loss.default",
    "aten.soft_margin_loss.default",
    "aten.binary_cross_entropy.default",
    "aten.binary_cross_entropy_with_logits.default",
)
def loss(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    asked, filled = _with_reduction(op, args, NONE)
    mesh = mesh_of(args)
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    placements = _common(mesh, *args[:2])
    each = wrap(op(*_locals(filled, mesh, placements, shape)), mesh, placements, shape)
    if asked == NONE:
        return each
    total = aten.sum.default(each)
    return total if asked == SUM else aten.div.Scalar(total, each.numel())


@handler(
    "aten.mse_loss_backward.default",
    "aten.smooth_l1_loss_backward.default",
    "aten.huber_loss_backward.default",
    "aten.soft_margin_loss_backward.default",
    "aten.binary_cross_entropy_backward.default",
)
def loss_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    grad, *rest = args
    asked, filled = _with_reduction(op, (grad, *rest), NONE)
    mesh = mesh_of(args)
    shape = torch.broadcast_shapes(rest[0].shape, rest[1].shape)
    placements = _common(mesh, *rest[:2])
    if asked == MEAN:
        filled[0] = aten.div.Scalar(grad, shape.numel())
    return wrap(op(*_locals(filled, mesh, placements, shape)), mesh, placements, shape)


def _batch_like(mesh: DeviceMesh, scores: Any, target: Any) -> tuple[Placements, Placements]:
    """Placements of the scores (batch, classes, ...) and of the targets (batch, ...): sharded as
    they are, but with all classes on every rank."""
    score_like: list[Placement] = []
    for axis in range(mesh.ndim):
        dim = None
        for x, is_target in ((scores, False), (target, True)):
            if isinstance(x, DTensor) and isinstance(x.placements[axis], Shard):
                found = x.placements[axis].dim
                dim = found + 1 if is_target and found > 0 else found
                if scores.ndim == 1 or (dim == 1 and not is_target):
                    dim = None
            if dim is not None:
                break
        score_like.append(Replicate() if dim is None else Shard(dim))
    target_like = [
        Shard(p.dim - 1 if p.dim > 1 else 0) if isinstance(p, Shard) else p for p in score_like
    ]
    return tuple(score_like), tuple(target_like)


@handler("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def likelihood(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    scores, target, weight, reduction, ignore_index = args
    mesh = mesh_of(args)
    score_like, target_like = _batch_like(mesh, scores, target)
    local, local_weight = op(
        local_as(scores, mesh, score_like),
        local_as(target, mesh, target_like),
        local_as(weight, mesh, replicated(mesh)),
        NONE if reduction == NONE else SUM,
        ignore_index,
    )
    summed = [Partial() if isinstance(p, Shard) else p for p in score_like]
    weights = wrap(local_weight, mesh, summed)
    if reduction == NONE:
        return wrap(local, mesh, target_like, target.shape), weights
    total = wrap(local, mesh, summed)
    return (aten.div.Tensor(total, weights) if reduction == MEAN else total), weights


@handler("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def likelihood_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    grad, scores, target, weight, reduction, ignore_index, total_weight = args
    mesh = mesh_of(args)
    score_like, target_like = _batch_like(mesh, scores, target)
    if reduction == MEAN:
        grad = aten.div.Tensor(grad, total_weight)
    local = op(
        local_as(grad, mesh, target_like if reduction == NONE else replicated(mesh)),
        local_as(scores, mesh, score_like),
        local_as(target, mesh, target_like),
        local_as(weight, mesh, replicated(mesh)),
        NONE if reduction == NONE else SUM,
        ignore_index,
        local_as(total_weight, mesh, replicated(mesh)),
    )
    return wrap(local, mesh, score_like, scores.shape)
