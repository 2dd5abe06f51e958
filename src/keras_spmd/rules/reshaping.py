"""Ops that change the shape of a tensor in place, `as_strided`, and views as another dtype.

torch has no rule for the former, and its own handler refuses the latter, also where every row of
the result is a window over one row, as in spectrograms. To its rule for the last a shard is like
any other, whatever the sizes of the numbers.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import return_and_correct_aliasing

from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import local_as, without_partial, wrap
from keras_spmd.rules.fallback import run_replicated


@handler(
    "aten.t_.default",
    "aten.transpose_.default",
    "aten.swapaxes_.default",
    "aten.swapdims_.default",
    "aten.unsqueeze_.default",
    "aten.squeeze_.default",
    "aten.squeeze_.dim",
    "aten.squeeze_.dims",
)
def reshape_in_place(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """The op out of place, whose result the tensor then becomes."""
    x = args[0]
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    result = getattr(torch.ops.aten, name)(*args, **kwargs)
    x._local_tensor, x._spec = result._local_tensor, result._spec
    return return_and_correct_aliasing(op, args, kwargs, x)


@handler("aten.as_strided.default")
def as_strided(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if tuple(size) == tuple(x.shape) and tuple(stride) == tuple(x.stride()) and not offset:
        return torch.ops.aten.alias.default(x)
    if not offset and _stays_within_rows(x, size, stride):
        local = x._local_tensor
        mine = op(local, [local.shape[0], *size[1:]], stride, *args[3:], **kwargs)
        return wrap(mine, x.device_mesh, x.placements, size, stride)
    return run_replicated(op, args, kwargs)


def _stays_within_rows(x: DTensor, size: list[int], stride: list[int]) -> bool:
    """Whether only the first dim is sharded, and each row of the result is made of one row."""
    if any(not p.is_replicate() and p != Shard(0) for p in x.placements) or not x.ndim or not size:
        return False
    if x.stride() != x._local_tensor.stride() or not x._local_tensor.is_contiguous():
        return False
    reach = sum((n - 1) * step for n, step in zip(size[1:], stride[1:], strict=True))
    return size[0] == x.shape[0] and stride[0] == x.stride(0) and reach < stride[0]


@handler("aten.view.dtype")
def view_as_dtype(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Numbers of another size are made of several of the last dim, or several of them of one."""
    x, dtype = args
    shape, placements = list(x.shape), list(without_partial(x.placements))
    if x.ndim and x.dtype.itemsize != dtype.itemsize:
        last = Shard(x.ndim - 1)
        placements = [Replicate() if p == last else p for p in placements]
        shape[-1] = shape[-1] * x.dtype.itemsize // dtype.itemsize
    return wrap(op(local_as(x, x.device_mesh, placements), dtype), x.device_mesh, placements, shape)
