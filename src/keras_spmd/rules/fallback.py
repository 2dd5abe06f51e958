"""An op without a rule runs replicated: its inputs are gathered, every rank computes the whole.

That is always right, and never silent: a warning says once which op, in which layer, and how many
bytes were gathered.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from keras_spmd import _settings
from keras_spmd._capturing import here
from keras_spmd._notices import warn_once, where
from keras_spmd.rules._specs import (
    is_replicated,
    mesh_of,
    nbytes,
    overwrite,
    replicated,
    to_replicated,
    wrap,
)
from keras_spmd.rules.writing import write_through


def run_replicated(
    op: torch._ops.OpOverload, args: tuple, kwargs: dict, reason: Exception | None = None
) -> Any:
    """The op on whole tensors; what it writes into goes back into the shards."""
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
    gathered = sum(nbytes(x) for x in inputs if not is_replicated(x))
    if gathered and _settings.strict():
        message = _message(op, inputs, gathered)
        raise RuntimeError(f"{message} KERAS_SPMD_STRICT=1 makes this an error.") from reason
    mesh = mesh_of(inputs)
    whole = {id(x): _with_its_strides(to_replicated(x), x) for x in inputs}
    whole_args, whole_kwargs = tree_map(
        lambda x: whole[id(x)] if isinstance(x, DTensor) else x, (args, kwargs)
    )
    results = op(*whole_args, **whole_kwargs)
    # An op that writes into an argument returns that argument.
    returned = {}
    for x in written_arguments(op, args, kwargs):
        if isinstance(x, DTensor):
            if not is_replicated(x):
                overwrite(x, whole[id(x)])
            write_through(x)
        returned[id(whole.get(id(x), x))] = x
    if gathered and here.scope is not None:
        here.scope.fallbacks[str(op), here.scope.origins.here.layer, gathered] += 1
    if gathered:
        warn_once(("replicated", str(op), where()), _message(op, inputs, gathered))
    return tree_map(lambda r: returned[id(r)] if id(r) in returned else _wrap(r, mesh), results)


def _with_its_strides(whole: torch.Tensor, x: DTensor) -> torch.Tensor:
    """Gathering may permute memory, and a view depends on how it lies."""
    if is_replicated(x) or whole.stride() == x.stride():
        return whole
    # Not by a copy into memory with these strides: a graph would keep the value and forget them.
    order = sorted(range(x.ndim), key=lambda dim: (-x.stride(dim), dim))
    back = [order.index(dim) for dim in range(x.ndim)]
    return whole.permute(order).contiguous().permute(back)


def _wrap(result: Any, mesh: Any) -> Any:
    return wrap(result, mesh, replicated(mesh)) if isinstance(result, torch.Tensor) else result


def written_arguments(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    written: list[torch.Tensor] = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
    return written


def _message(op: torch._ops.OpOverload, inputs: list[DTensor], gathered: int) -> str:
    layouts = ", ".join(
        f"{tuple(x.shape)} as ({', '.join(str(p) for p in x.placements)})" for x in inputs
    )
    return (
        f"The op {op} {where()} has no way to run on its inputs where they are ({layouts}), so "
        f"they are gathered, {gathered:,} bytes, and every device computes the whole. The result "
        "is right. If it is slow, change the layout of these tensors with "
        "keras.distribution.distribute_tensor before the op, or with a '<layer path>/output' key "
        "of the layout map."
    )
