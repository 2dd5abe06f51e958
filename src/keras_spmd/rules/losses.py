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

from keras_spmd._layouts import local_shape_and_offset
from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import (
    Placements,
    local_as,
    mesh_of,
    replicated,
    without_empty_shards,
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


class _Likelihood:
    """How the likelihood loss is sharded: scores (batch, classes, ...), targets (batch, ...).

    Where the classes are sharded, a target that another rank has counts as one to be ignored, and
    results are pending sums: the logits of a large vocabulary are never gathered.
    """

    def __init__(self, scores: Any, target: Any, ignore_index: int) -> None:
        self.mesh = mesh_of((scores, target))
        self.class_dim = 1 if scores.ndim > 1 else 0
        self.shape, self.ignore_index = scores.shape, ignore_index
        along = [self._along(axis, scores, target) for axis in range(self.mesh.ndim)]
        self.scores = tuple(without_empty_shards(along, self.shape, self.mesh, self.class_dim))
        self.target = tuple(self._target(p) for p in self.scores)
        self.total = tuple(Partial() if isinstance(p, Shard) else p for p in self.scores)
        self.each = tuple(
            Partial() if p == Shard(self.class_dim) else q
            for p, q in zip(self.scores, self.target, strict=True)
        )

    def _along(self, axis: int, scores: Any, target: Any) -> Placement:
        for x, is_target in ((scores, False), (target, True)):
            if isinstance(x, DTensor) and isinstance(x.placements[axis], Shard):
                dim = x.placements[axis].dim
                dim = dim + 1 if is_target and dim > 0 else dim
                if is_target and scores.ndim == 1:
                    continue
                return Shard(dim)
        return Replicate()

    def _target(self, p: Placement) -> Placement:
        if not isinstance(p, Shard) or p.dim == self.class_dim:
            return Replicate()
        return Shard(p.dim - 1 if p.dim > 1 else 0)

    def locals(self, scores: Any, target: Any, weight: Any) -> tuple[Any, Any, Any]:
        """This rank's scores, targets and weights of classes."""
        classes = [Shard(0) if p == Shard(self.class_dim) else Replicate() for p in self.scores]
        local_target = local_as(target, self.mesh, self.target)
        if Shard(self.class_dim) in self.scores:
            shape, offset = local_shape_and_offset(self.shape, self.mesh, self.scores)
            mine = local_target - offset[self.class_dim]
            is_mine = (mine >= 0) & (mine < shape[self.class_dim])
            is_mine = is_mine & (local_target != self.ignore_index)
            local_target = torch.where(is_mine, mine, self.ignore_index)
        return (
            local_as(scores, self.mesh, self.scores),
            local_target,
            local_as(weight, self.mesh, classes),
        )


@handler("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def likelihood(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    scores, target, weight, reduction, ignore_index = args
    how = _Likelihood(scores, target, ignore_index)
    local, local_weight = op(
        *how.locals(scores, target, weight), NONE if reduction == NONE else SUM, ignore_index
    )
    weights = wrap(local_weight, how.mesh, how.total)
    if reduction == NONE:
        return wrap(local, how.mesh, how.each, target.shape), weights
    total = wrap(local, how.mesh, how.total)
    return (aten.div.Tensor(total, weights) if reduction == MEAN else total), weights


@handler("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def likelihood_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    grad, scores, target, weight, reduction, ignore_index, total_weight = args
    how = _Likelihood(scores, target, ignore_index)
    if reduction == MEAN:
        grad = aten.div.Tensor(grad, total_weight)
    local = op(
        local_as(grad, how.mesh, how.target if reduction == NONE else replicated(how.mesh)),
        *how.locals(scores, target, weight),
        NONE if reduction == NONE else SUM,
        ignore_index,
        total_weight.to_local() if isinstance(total_weight, DTensor) else total_weight,  # unused
    )
    return wrap(local, how.mesh, how.scores, scores.shape)
