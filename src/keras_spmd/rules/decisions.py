"""Decisions of torch about how an op is sharded, and what is done about those that don't hold.

torch gives up on an op that it has no rule for, and sometimes decides what it then can't do.
Pending sums are behind most of these, so they are taken first and the op is tried again; what is
left runs replicated.
"""

import contextlib
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from keras_spmd._capturing import is_capturing
from keras_spmd.rules._specs import (
    local_as,
    replicated,
    wrap,
)
from keras_spmd.rules.fallback import run_replicated
from keras_spmd.rules.instead import (
    IS_OLD,
    WRONG,
    divisor,
    instead_of,
    shards_one_element,
    shards_several,
    whole_along,
    with_whole_elements,
    without_last_shard,
)
from keras_spmd.rules.pending import (
    gains_by_sums,
    has_pending,
    is_linear,
    is_worth_it,
    rounds,
    run_without_pending_sums,
    settled_for,
)
from keras_spmd.rules.products import with_gathered_factor
from keras_spmd.rules.views import view_by_exchange


def deciding_or(original: Callable) -> Callable:
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
        if op is torch.ops.aten.unbind.int and _is_sharded_on(args[0], *args[1:], **kwargs):
            # torch would rather fail than gather the one dim that falls apart.
            return op(whole_along(args[0], *args[1:], **kwargs), *args[1:], **kwargs)
        if _means_all_dims(op, args):
            return op(args[0], list(range(args[0].ndim)), *args[2:], **kwargs)
        if IS_OLD and (call := instead_of(op, args)) is not None:
            return call[0](*call[1])
        try:
            with _untraced(op_info):
                decision = original(dispatcher, op, args, kwargs, op_info, try_cache)
        except (NotImplementedError, RuntimeError) as no_rule:
            if has_pending((args, kwargs)):
                return run_without_pending_sums(op, args, kwargs)
            if any(map(shards_one_element, tree_leaves((args, kwargs)))):
                args, kwargs = tree_map(with_whole_elements, (args, kwargs))
                return op(*args, **kwargs)
            moved = view_by_exchange(op, args)
            if moved is not None:
                return moved
            if IS_OLD and op.overloadpacket.__name__ in _VIEWS and shards_several(args[0]):
                return op(without_last_shard(args[0]), *args[1:], **kwargs)
            return run_replicated(op, args, kwargs, no_rule)
        if _writes_by_mask(op, args) or op.overloadpacket.__name__ in _WRONG:
            return run_replicated(op, args, kwargs)
        if IS_OLD and op.overloadpacket.__name__ in WRONG:
            return run_replicated(op, args, kwargs)
        if op.overloadpacket.__name__ in _VIEWS and _is_too_fine(args[0], decision):
            coarser = _with_one_axis_for_each_dim(args[0])
            if coarser.placements != args[0].placements:
                return op(coarser, *args[1:], **kwargs)
        if isinstance(decision, OutputSharding) and (
            _is_impossible(decision, op_info.schema)
            or _invents_shards(decision, op_info.schema)
            or _would_move_its_target(decision, op, args)
            or (rounds(op, args, kwargs) and has_pending(args))
            or (gains_by_sums(op, args, kwargs) and has_pending(args))
            or (IS_OLD and has_pending(args if not is_linear(op) else divisor(op, args)))
        ):
            return run_without_pending_sums(op, args, kwargs)
        have, want = _layouts_of(decision, op_info.schema)
        if is_worth_it(args) and settled_for(have, want, args):
            return op(*args, **kwargs)
        gathered = with_gathered_factor(op, args, have, want)
        if gathered is not None:
            return op(*gathered, **kwargs)
        return decision

    return decide


def _untraced(op_info: Any) -> contextlib.AbstractContextManager:
    """Keep what torch computes for a decision out of a trace, where every op takes long.

    It asks small tensors of indices how uneven shards would move. Sizes that are symbols of the
    trace mean nothing outside of it.
    """
    if is_capturing() and not any(map(_is_symbolic, tree_leaves(op_info.schema.args_schema))):
        return _disable_current_modes()
    return contextlib.nullcontext()


def _is_symbolic(x: Any) -> bool:
    sizes = x.shape if _is_spec(x) else (x,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def hash_of_partial(placement: Partial) -> int:
    """The same in every process, unlike a string's.

    torch goes through sets of placements to find the cheapest way to run an op. Ranks that go
    through them in another order choose another of several ways that cost the same, and wait for
    collectives that never come.
    """
    return zlib.crc32(placement.reduce_op.encode())


# Runs each shard with the sizes of the whole when there are weights.
_WRONG = ("native_group_norm_backward",)
# Reductions for which an empty list of dims means all of them; torch's rules take it for none.
_REDUCTIONS = frozenset(
    """sum mean nansum amax amin logsumexp std var std_mean var_mean norm
    linalg_vector_norm""".split()  # noqa: SIM905
)


def _means_all_dims(op: torch._ops.OpOverload, args: tuple) -> bool:
    return (
        op.overloadpacket.__name__ in _REDUCTIONS
        and len(args) > 1
        and args[1] in ([], ())
        and args[0].ndim > 0
        and op._schema.arguments[1].name == "dim"
    )


_VIEWS = ("view", "_unsafe_view", "reshape", "unflatten")


def _is_too_fine(x: Any, decision: Any) -> bool:
    """Whether several axes share a dim in a way that torch can't follow, or would.

    It looks at one axis at a time when it splits or merges dims, which fails if the dim doesn't
    divide by all of them, and if both axes end up with shards that are not in one piece.
    """
    before, after = getattr(x, "_spec", None), getattr(decision, "output_spec", None)
    if any(isinstance(spec, DTensorSpec) and _shares_unevenly(spec) for spec in (before, after)):
        return True
    if not isinstance(before, DTensorSpec) or not isinstance(after, DTensorSpec):
        return False
    is_shared = any(
        isinstance(p, Shard) and before.placements.count(p) > 1 for p in before.placements
    )
    return is_shared and any(isinstance(p, _StridedShard) for p in after.placements)


def _shares_unevenly(spec: DTensorSpec) -> bool:
    shards: dict[int, int] = {}
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            shards[placement.dim] = shards.get(placement.dim, 1) * spec.mesh.size(axis)
    dims = [p.dim for p in spec.placements if isinstance(p, Shard)]
    return any(dims.count(dim) > 1 and spec.shape[dim] % count for dim, count in shards.items())


def _with_one_axis_for_each_dim(x: DTensor) -> DTensor:
    placements = [
        Replicate() if isinstance(p, Shard) and p in x.placements[:axis] else p
        for axis, p in enumerate(x.placements)
    ]
    return wrap(local_as(x, x.device_mesh, placements), x.device_mesh, placements, x.shape)


def _is_sharded_on(x: Any, dim: int = 0) -> bool:
    return isinstance(x, DTensor) and Shard(dim % x.ndim) in x.placements


def _writes_by_mask(op: torch._ops.OpOverload, args: tuple) -> bool:
    """`x[mask] = value`, which torch runs on a shard with the whole mask."""
    return op.overloadpacket.__name__ in ("index_put", "index_put_", "_index_put_impl_") and any(
        isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1]
    )


def _would_move_its_target(
    decision: OutputSharding, op: torch._ops.OpOverload, args: tuple
) -> bool:
    """Whether an in-place op would have to change the placements of what it writes into."""
    spec = decision.output_spec
    if not op._schema.name.endswith("_") or op._schema.name.endswith("squeeze_"):
        return False
    if not isinstance(spec, DTensorSpec) or not isinstance(args[0], torch.Tensor):
        return False
    target = args[0].placements if isinstance(args[0], DTensor) else replicated(spec.mesh)
    return tuple(spec.placements) != tuple(target)


def _is_impossible(decision: OutputSharding, asked: OpSchema) -> bool:
    """Whether torch decided what it then can't do, such as to turn a shard into a pending sum.

    A whole tensor becomes a pending sum by a division, and integers would become floats.
    """
    return any(
        len(a.placements) != len(b.placements)
        or any(
            isinstance(q, Partial) and p != q and not (p.is_replicate() and _can_be_divided(a))
            for p, q in zip(a.placements, b.placements, strict=True)
        )
        for a, b in _moves(decision, asked)
    )


def _can_be_divided(spec: DTensorSpec) -> bool:
    assert spec.tensor_meta is not None
    return spec.tensor_meta.dtype.is_floating_point or spec.tensor_meta.dtype.is_complex


def _invents_shards(decision: OutputSharding, asked: OpSchema) -> bool:
    """Whether a pending sum would become shards that nothing else has on that axis.

    To torch that is cheaper than the sum, but then all that follows is sharded in a way nobody
    asked for, and weights are gathered for it.
    """
    moves = [
        list(zip(a.placements, b.placements, strict=False)) for a, b in _moves(decision, asked)
    ]
    axes = range(min((len(move) for move in moves), default=0))
    return any(
        any(isinstance(move[axis][0], Partial) and move[axis][1].is_shard() for move in moves)
        and not any(move[axis][0].is_shard() for move in moves)
        for axis in axes
    )


def _layouts_of(decision: Any, asked: OpSchema) -> tuple[list, list]:
    """How the tensors of an op lie, and how torch wants them to lie; nothing if it is the same."""
    if not isinstance(decision, OutputSharding):
        return [], []
    if not decision.needs_redistribute or decision.redistribute_schema is None:
        return [], []
    have, want = (
        [s for s in tree_leaves(schema.args_schema, is_leaf=_is_spec) if _is_spec(s)]
        for schema in (asked, decision.redistribute_schema)
    )
    return (have, want) if len(have) == len(want) else ([], [])


def _moves(decision: OutputSharding, asked: OpSchema) -> list[tuple[DTensorSpec, DTensorSpec]]:
    """For each tensor of an op: how it lies, and how torch wants it to lie."""
    if not decision.needs_redistribute or decision.redistribute_schema is None:
        return []
    have = tree_leaves(asked.args_schema, is_leaf=_is_spec)
    want = tree_leaves(decision.redistribute_schema.args_schema, is_leaf=_is_spec)
    return [(a, b) for a, b in zip(have, want, strict=False) if _is_spec(a) and _is_spec(b)]


def _is_spec(x: object) -> bool:
    return isinstance(x, DTensorSpec)
