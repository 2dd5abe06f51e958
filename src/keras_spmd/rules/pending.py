"""Sums that are still pending: when they are taken, and that they are taken once."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from keras_spmd._capturing import is_capturing
from keras_spmd.rules._specs import (
    MANY_BYTES,
    is_pending,
    local_as,
    nbytes,
    settle,
    without_partial,
    wrap,
)
from keras_spmd.rules.fallback import run_replicated, written_arguments

_LINEAR = frozenset(
    """add sub neg mul div sum mean mm bmm addmm add_ sub_ copy_ clone detach alias _to_copy view
    reshape _unsafe_view permute transpose t expand squeeze unsqueeze slice select slice_backward
    select_backward ones_like zeros_like empty_like full_like _local_scalar_dense""".split()  # noqa: SIM905
)


def has_pending(args: Any) -> bool:
    return any(isinstance(x, DTensor) and is_pending(x) for x in tree_leaves(args))


def run_without_pending_sums(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """The op again, after its pending sums have been taken."""
    if not has_pending((args, kwargs)):
        return run_replicated(op, args, kwargs)
    for x in written_arguments(op, args, kwargs):
        if isinstance(x, DTensor) and is_pending(x):
            # The tensor itself must go on, so it stops being pending: its value is the same.
            settled = summed(x)
            x._local_tensor, x._spec = settled._local_tensor, settled._spec
    args, kwargs = tree_map(
        lambda x: summed(x) if isinstance(x, DTensor) and is_pending(x) else x, (args, kwargs)
    )
    return op(*args, **kwargs)


def summed(x: DTensor) -> DTensor:
    """The same tensor, without a sum that is pending."""
    placements = without_partial(x.placements)
    return wrap(local_as(x, x.device_mesh, placements), x.device_mesh, placements, x.shape)


def rounds(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether numbers become coarser ones: not the same for the parts of a sum."""
    dtype = kwargs.get("dtype")
    if op is not torch.ops.aten._to_copy.default or dtype is None:
        return False
    keeps = dtype.is_floating_point or dtype.is_complex
    return not keeps or dtype.itemsize < args[0].dtype.itemsize


def is_worth_it(args: tuple) -> bool:
    return is_capturing() or any(
        isinstance(x, DTensor) and is_pending(x) and nbytes(x) >= MANY_BYTES
        for x in tree_leaves(args)
    )


def gains_by_sums(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether it is better to take sums before the op, though it could do without.

    A norm computes in float32 what comes in bfloat16: as wide numbers twice the bytes would be
    summed, and for what else is done with the narrow ones their sum would be taken again.
    """
    dtype = kwargs.get("dtype")
    if op is torch.ops.aten._to_copy.default and dtype is not None:
        return dtype.itemsize > args[0].dtype.itemsize and is_worth_it(args)
    return _grows(op, args)


def _grows(op: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether a small tensor is spread over a large one, as in the gradient of a mean."""
    if op is not torch.ops.aten.expand.default:
        return False
    x, sizes = args[:2]
    before = (1,) * (len(sizes) - x.ndim) + tuple(x.shape)
    times = math.prod(new for old, new in zip(before, sizes, strict=True) if old == 1 and new > 1)
    is_large = isinstance(x, DTensor) and times * nbytes(x) >= MANY_BYTES
    return times > 1 and (is_capturing() or is_large)


def is_linear(op: torch._ops.OpOverload) -> bool:
    return op.overloadpacket.__name__ in _LINEAR


def settled_for(have: list, want: list, args: tuple) -> bool:
    """Whether a pending sum that torch is about to take has been taken, once for all who ask."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    if len(tensors) != len(have):
        return False
    taken = False
    for x, a, b in zip(tensors, have, want, strict=True):
        is_wanted = b.placements == without_partial(a.placements)
        if isinstance(x, DTensor) and is_pending(x) and is_wanted:
            settle(x)
            taken = taken or not is_pending(x)
    return taken
