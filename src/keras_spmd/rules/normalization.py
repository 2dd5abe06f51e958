"""Batch normalization with the statistics of the global batch, and layer normalization.

torch's rule for the former gathers the activations whenever the batch is sharded. Mean and variance
of the whole follow from those of the parts, so one small all-gather is enough: counts, means and
sums of squares of each channel.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from keras_spmd.rules._registry import handler, sharding
from keras_spmd.rules._specs import (
    local_as,
    mesh_of,
    only_wanted,
    overwrite,
    reduce_over,
    replicated,
    stack_over,
    to_replicated,
    without_empty_shards,
    without_partial,
    wrap,
)

CHANNELS = 1


def _layout(x: DTensor, mesh: DeviceMesh) -> tuple[list[Placement], list[Placement], list[int]]:
    """Placements of the input and of a vector with an entry for each channel, and the mesh axes
    that the statistics must be combined over."""
    sharded = [p if isinstance(p, Shard) else Replicate() for p in without_partial(x.placements)]
    x_like = without_empty_shards(sharded, x.shape, mesh, CHANNELS)
    channel_like: list[Placement] = [
        Shard(0) if p == Shard(CHANNELS) else Replicate() for p in x_like
    ]
    combined = [axis for axis, p in enumerate(x_like) if isinstance(p, Shard) and p.dim != CHANNELS]
    return x_like, channel_like, combined


def _per_channel(values: torch.Tensor, ndim: int) -> torch.Tensor:
    return values.view(1, -1, *[1] * (ndim - 2))


def _statistics(
    x: torch.Tensor, mesh: DeviceMesh, combined: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean and (biased) variance of each channel, over all ranks that share it."""
    dims = [d for d in range(x.ndim) if d != CHANNELS]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = wide.new_full((x.shape[CHANNELS],), x.numel() // max(1, x.shape[CHANNELS]))
    if x.numel():
        mean = wide.mean(dims)
        spread = (wide - _per_channel(mean, x.ndim)).square().sum(dims)
    else:
        mean, spread = torch.zeros_like(count), torch.zeros_like(count)
    for axis in combined:
        parts = stack_over(torch.stack([count, mean, spread]), mesh, axis)
        counts, means, spreads = parts.unbind(1)
        count = counts.sum(0)
        mean = (counts * means).sum(0) / count
        spread = (spreads + counts * (means - mean).square()).sum(0)
    return count, mean, spread / count


def _update_running(running: Any, new: torch.Tensor, momentum: float) -> None:
    """`running = (1 - momentum) * running + momentum * new`, in place; `new` is the global one."""
    if running is None:
        return
    old = to_replicated(running) if isinstance(running, DTensor) else running
    value = torch.lerp(old, new.to(old.dtype), momentum)
    if isinstance(running, DTensor):
        overwrite(running, value)
    else:
        running.copy_(value)


def _train(
    x: DTensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> tuple[DTensor, DTensor, DTensor]:
    mesh = mesh_of(x, weight, bias, running_mean, running_var)
    if not isinstance(x, DTensor):
        x = wrap(x, mesh, replicated(mesh))
    x_like, channel_like, combined = _layout(x, mesh)
    local_x = local_as(x, mesh, x_like)
    count, mean, var = _statistics(local_x, mesh, combined)
    channels = (x.shape[CHANNELS],)
    for running, new in (
        (running_mean, mean),
        (running_var, var * (count / (count - 1).clamp(min=1))),
    ):
        if running is not None:
            whole = local_as(wrap(new, mesh, channel_like, channels), mesh, replicated(mesh))
            _update_running(running, whole, momentum)
    output = torch.ops.aten.native_batch_norm(
        local_x,
        local_as(weight, mesh, channel_like),
        local_as(bias, mesh, channel_like),
        mean,
        var,
        False,
        momentum,
        eps,
    )[0]
    return (
        wrap(output, mesh, x_like, x.shape),
        wrap(mean, mesh, channel_like, channels),
        wrap((var + eps).rsqrt(), mesh, channel_like, channels),
    )


def _apply(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[DTensor, DTensor, DTensor]:
    """Inference: every element by itself, so any sharding will do."""
    mesh = mesh_of(x, weight, bias, running_mean, running_var)
    if not isinstance(x, DTensor):
        x = wrap(x, mesh, replicated(mesh))
    x_like, channel_like, _ = _layout(x, mesh)
    output, *_ = torch.ops.aten.native_batch_norm(
        local_as(x, mesh, x_like),
        local_as(weight, mesh, channel_like),
        local_as(bias, mesh, channel_like),
        local_as(running_mean, mesh, channel_like),
        local_as(running_var, mesh, channel_like),
        False,
        momentum,
        eps,
    )
    empty = output.new_empty(0)
    nothing = wrap(empty, mesh, replicated(mesh))
    return wrap(output, mesh, x_like, x.shape), nothing, nothing


def _backward(
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
) -> tuple[DTensor, DTensor, DTensor]:
    mesh = mesh_of(grad, x, weight)
    if not isinstance(x, DTensor):
        x = wrap(x, mesh, replicated(mesh))
    x_like, channel_like, combined = _layout(x, mesh)
    local_x, local_grad = local_as(x, mesh, x_like), local_as(grad, mesh, x_like)
    wide = torch.promote_types(local_x.dtype, torch.float32)
    if train:
        mean, invstd = (local_as(s, mesh, channel_like).to(wide) for s in (save_mean, save_invstd))
    else:
        mean = local_as(running_mean, mesh, channel_like).to(wide)
        invstd = (local_as(running_var, mesh, channel_like).to(wide) + eps).rsqrt()
    dims = [d for d in range(x.ndim) if d != CHANNELS]
    dy = local_grad.to(wide)
    x_hat = (local_x.to(wide) - _per_channel(mean, x.ndim)) * _per_channel(invstd, x.ndim)
    sums = torch.stack([dy.sum(dims), (dy * x_hat).sum(dims)])
    for axis in combined:
        sums = reduce_over(sums, mesh, axis, "sum")
    sum_dy, sum_dy_x_hat = sums.unbind(0)
    if train:
        count = x.numel() / x.shape[CHANNELS]
        dy = (
            dy
            - _per_channel(sum_dy / count, x.ndim)
            - x_hat * _per_channel(sum_dy_x_hat / count, x.ndim)
        )
    scale = invstd
    if weight is not None:
        scale = scale * local_as(weight, mesh, channel_like).to(wide)
    channels, dtype = (x.shape[CHANNELS],), weight.dtype if weight is not None else wide
    return (
        wrap((dy * _per_channel(scale, x.ndim)).to(local_x.dtype), mesh, x_like, x.shape),
        wrap(sum_dy_x_hat.to(dtype), mesh, channel_like, channels),
        wrap(sum_dy.to(dtype), mesh, channel_like, channels),
    )


@handler("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default")
def batch_norm(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, weight, bias, running_mean, running_var, training, momentum, eps = args
    run = _train if training else _apply
    return run(x, weight, bias, running_mean, running_var, momentum, eps)


@handler("aten._native_batch_norm_legit.no_stats")
def batch_norm_without_running(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, weight, bias, _, momentum, eps = args
    return _train(x, weight, bias, None, None, momentum, eps)


@handler("aten._native_batch_norm_legit_no_training.default")
def batch_norm_inference(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    return _apply(*args)


@handler("aten._batch_norm_with_update.default")
def batch_norm_with_update(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    outputs = _train(*args)
    return *outputs, _no_reserve(outputs[0])


@handler("aten.cudnn_batch_norm.default")
def cudnn_batch_norm(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, weight, bias, running_mean, running_var, training, momentum, eps = args
    run = _train if training else _apply
    outputs = run(x, weight, bias, running_mean, running_var, momentum, eps)
    return *outputs, _no_reserve(outputs[0])


def _no_reserve(output: DTensor) -> DTensor:
    """cuDNN's workspace, which the backward rule here doesn't need."""
    empty = output._local_tensor.new_empty(0, dtype=torch.uint8)
    return wrap(empty, output.device_mesh, replicated(output.device_mesh))


@handler("aten.native_batch_norm_backward.default")
def batch_norm_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    *inputs, output_mask = args
    return tuple(only_wanted(_backward(*inputs), output_mask))


@handler("aten.batch_norm_backward.default")
def batch_norm_with_update_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    *inputs, output_mask, _reserve = args
    return tuple(only_wanted(_backward(*inputs), output_mask))


@handler("aten.cudnn_batch_norm_backward.default")
def cudnn_batch_norm_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, grad, weight, running_mean, running_var, save_mean, save_invstd, eps, _reserve = args
    return _backward(grad, x, weight, running_mean, running_var, save_mean, save_invstd, True, eps)


@sharding("aten._fused_rms_norm.default")
def rms_norm(x: Any, normalized_shape: Any, weight: Any, eps: float | None) -> list:
    """The kernel of GPUs. To torch's rule the shards of a sharded weight are all of it."""
    scale = None if weight is None else Replicate()
    others = map(Shard, range(x.ndim - len(normalized_shape)))
    return [([p, p], [p, None, scale, None]) for p in (Replicate(), *others)]


@sharding("aten._fused_rms_norm_backward.default")
def rms_norm_backward(
    grad: Any, x: Any, normalized_shape: Any, rstd: Any, weight: Any, output_mask: Any
) -> list:
    scale = None if weight is None else Replicate()
    choices: list = [(Replicate(), Replicate())]
    choices += [(Shard(dim), Partial()) for dim in range(x.ndim - len(normalized_shape))]
    return [
        (only_wanted((p, of_weight), output_mask), [p, p, None, p, scale, None])
        for p, of_weight in choices
    ]


@sharding("aten.native_layer_norm.default")
def layer_norm(x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> list:
    """Any dim but the normalized ones. Before torch 2.13 a sharded weight is not gathered."""
    affine = [None if p is None else Replicate() for p in (weight, bias)]
    choices = [([Replicate()] * 3, [Replicate(), None, *affine, None])]
    for dim in range(x.ndim - len(normalized_shape)):
        choices.append(([Shard(dim)] * 3, [Shard(dim), None, *affine, None]))
    return choices


@sharding("aten.native_layer_norm_backward.default")
def layer_norm_backward(
    grad: Any,
    x: Any,
    normalized_shape: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Any,
) -> list:
    affine = [None if p is None else Replicate() for p in (weight, bias)]
    whole = [Replicate()] * 2
    choices = [([Replicate()] * 3, [*whole, None, *whole, *affine, None])]
    for dim in range(x.ndim - len(normalized_shape)):
        parts = [Shard(dim)] * 2
        grads = [Shard(dim), Partial(), Partial()]
        choices.append((grads, [*parts, None, *parts, *affine, None]))
    return [(only_wanted(grads, output_mask), inputs) for grads, inputs in choices]
