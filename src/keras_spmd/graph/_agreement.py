"""All ranks run the same graph, or none: what one rank can't capture runs eagerly on every rank."""

import enum
import hashlib
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule, Node

from keras_spmd import _layouts
from keras_spmd.graph._collectives import group_ranks, is_collective

# What a rank with a shorter shard has more of, to pad it.
_MOVES_DATA = frozenset(
    """alias cat clone constant_pad_nd detach empty expand full getitem new_empty new_zeros pad
    permute reshape select slice slice_scatter split split_with_sizes squeeze t transpose unsqueeze
    view zeros zeros_like lift_fresh_copy _unsafe_view""".split()  # noqa: SIM905
)


class Verdict(enum.IntEnum):
    """What became of a capture; of several ranks' verdicts, the highest counts."""

    CAPTURED = 0
    LATER = 1
    NEVER = 2


def signature_of(module: GraphModule) -> list[tuple]:
    """What must be the same on all ranks: the ops that compute, and how ranks communicate."""
    return [_signature(node) for node in module.graph.nodes if _counts(node)]


def agree(verdict: Verdict, ops: list[tuple]) -> Verdict:
    """The verdict of all ranks. Raises if they have graphs that don't fit together.

    Args:
        verdict: This rank's.
        ops: The signatures of its graph.
    """
    if _layouts.active_mesh() is None:
        return verdict
    mine = (int(verdict), hashlib.sha256(repr(ops).encode()).hexdigest())
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    worst = Verdict(max(theirs for theirs, _ in everybody))
    if worst is Verdict.CAPTURED and len({print_ for _, print_ in everybody}) > 1:
        dist.all_gather_object(everybody, ops)
        _assert_same(everybody)
    return worst


def _counts(node: Node) -> bool:
    if node.op != "call_function":
        return False
    name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")
    return is_collective(node) or name not in _MOVES_DATA


def _signature(node: Node) -> tuple:
    """An op; of a collective also the ranks, the dtype and the size, for those who take part."""
    if not is_collective(node):
        return (str(node.target),)
    source: Any = node.args[0]
    value = source.meta["val"]
    return (str(node.target), str(value.dtype), group_ranks(node), value.numel())


def _assert_same(everybody: list[list[tuple]]) -> None:
    for rank, theirs in enumerate(everybody):
        for at in range(max(len(theirs), len(everybody[0]))):
            pair = [
                ops[at] if at < len(ops) else ("nothing more",) for ops in (everybody[0], theirs)
            ]
            if not _fit(*pair):
                raise RuntimeError(
                    f"Rank {rank} captured another step than rank 0: its op number {at} is "
                    f"{_text(pair[1])}, and that of rank 0 is {_text(pair[0])}. Ranks must run "
                    "the same program: look for code that depends on the rank, or on random "
                    "numbers."
                )


def _fit(a: tuple, b: tuple) -> bool:
    """Ops of two ranks are the same; with uneven shards, other groups have other sizes."""
    if len(a) == 1 or len(b) == 1:
        return a == b
    (op_a, dtype_a, ranks_a, size_a), (op_b, dtype_b, ranks_b, size_b) = a, b
    if (op_a, dtype_a, len(ranks_a)) != (op_b, dtype_b, len(ranks_b)):
        return False
    return ranks_a != ranks_b or size_a == size_b or "all_to_all" in op_a


def _text(signature: tuple) -> str:
    if len(signature) == 1:
        return signature[0]
    op, dtype, ranks, size = signature
    return f"{op} of {size} x {dtype} over the ranks {list(ranks)}"
