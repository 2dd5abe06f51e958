"""An op without a rule runs replicated: its inputs are gathered, every rank computes the whole.

That is always right, and never silent: a warning says once which op, in which layer, and how many
bytes were gathered.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.utils._pytree import tree_leaves, tree_map

from keras_spmd import _settings
from keras_spmd._notices import warn_once, where
from keras_spmd.rules._specs import (
    is_replicated,
    local_as,
    mesh_of,
    nbytes,
    overwrite,
    replicated,
    to_replicated,
    without_partial,
    wrap,
)
from keras_spmd.rules.writing import write_through


def replicating_or(original: Callable) -> Callable:
    """Wraps the place where torch decides how an op is sharded, and gives up if it can't.

    What the original returns is a decision for torch to follow. What is returned here instead is
    taken as the result of the op.
    """

    def decide(
        dispatcher: Any,
        op: torch._ops.OpOverload,
        args: tuple,
        kwargs: dict,
        op_info: Any,
        try_cache: bool,
    ) -> Any:
        try:
            decision = original(dispatcher, op, args, kwargs, op_info, try_cache)
        except (NotImplementedError, RuntimeError) as no_rule:
            return run_replicated(op, args, kwargs, no_rule)
        if isinstance(decision, OutputSharding) and _is_impossible(decision, op_info.schema):
            return _run_without_pending_sums(op, args, kwargs)
        return decision

    return decide


def _is_impossible(decision: OutputSharding, asked: OpSchema) -> bool:
    """Whether torch decided to turn a shard into a pending sum, which it then can't do."""
    if not decision.needs_redistribute or decision.redistribute_schema is None:
        return False
    have = tree_leaves(asked.args_schema, is_leaf=_is_spec)
    want = tree_leaves(decision.redistribute_schema.args_schema, is_leaf=_is_spec)
    return any(
        isinstance(q, Partial) and not p.is_replicate() and p != q
        for a, b in zip(have, want, strict=False)
        if _is_spec(a) and _is_spec(b)
        for p, q in zip(a.placements, b.placements, strict=True)
    )


def _is_spec(x: object) -> bool:
    return isinstance(x, DTensorSpec)


def _run_without_pending_sums(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """The op again, after its pending sums have been taken."""
    pending = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor) and _is_pending(x)]
    written = _written_arguments(op, args, kwargs)
    if not pending or any(x is y for x in pending for y in written):
        return run_replicated(op, args, kwargs)
    args, kwargs = tree_map(
        lambda x: _summed(x) if isinstance(x, DTensor) and _is_pending(x) else x, (args, kwargs)
    )
    return op(*args, **kwargs)


def _is_pending(x: DTensor) -> bool:
    return any(isinstance(p, Partial) for p in x.placements)


def _summed(x: DTensor) -> DTensor:
    placements = without_partial(x.placements)
    return wrap(local_as(x, x.device_mesh, placements), x.device_mesh, placements, x.shape)


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
    whole = {id(x): to_replicated(x) for x in inputs}
    whole_args, whole_kwargs = tree_map(
        lambda x: whole[id(x)] if isinstance(x, DTensor) else x, (args, kwargs)
    )
    results = op(*whole_args, **whole_kwargs)
    # An op that writes into an argument returns that argument.
    returned = {}
    for x in _written_arguments(op, args, kwargs):
        if isinstance(x, DTensor):
            if not is_replicated(x):
                overwrite(x, whole[id(x)])
            write_through(x)
        returned[id(whole.get(id(x), x))] = x
    if gathered:
        warn_once(("replicated", str(op), where()), _message(op, inputs, gathered))
    return tree_map(lambda r: returned[id(r)] if id(r) in returned else _wrap(r, mesh), results)


def _wrap(result: Any, mesh: Any) -> Any:
    return wrap(result, mesh, replicated(mesh)) if isinstance(result, torch.Tensor) else result


def _written_arguments(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[torch.Tensor]:
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
