"""Ops that write into a tensor: a plain one, or a view of a sharded one."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keras_spmd.rules._specs import overwrite, to_replicated


def finishing_or(original: Callable) -> Callable:
    """Wraps the end of torch's dispatch of an in-place op, where the shards are written already."""

    def finish(
        dispatcher: Any,
        op: torch._ops.OpOverload,
        args: tuple,
        kwargs: dict,
        compute_mesh: Any,
        output_sharding: Any,
        local_results: Any,
        participating: bool,
        is_inplace_op: bool,
        is_out_variant_op: bool,
    ) -> Any:
        if is_inplace_op and args and isinstance(args[0], torch.Tensor):
            if not isinstance(args[0], DTensor):
                # A plain tensor is its own local tensor; torch asserts that there is none here.
                return args[0]
            write_through(args[0])
        return original(
            dispatcher,
            op,
            args,
            kwargs,
            compute_mesh,
            output_sharding,
            local_results,
            participating,
            is_inplace_op,
            is_out_variant_op,
        )

    return finish


def write_through(view: DTensor) -> None:
    """Bring what was written into a view to the tensor it is a view of.

    A view along a sharded dim had to be gathered, so it has memory of its own.
    """
    base = view._base
    if base is None or not isinstance(base, DTensor):
        return
    if _shares_memory(view._local_tensor, base._local_tensor):
        return
    whole = to_replicated(base).clone()
    view._view_func_unsafe(whole).copy_(to_replicated(view))
    overwrite(base, whole)


def _shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
