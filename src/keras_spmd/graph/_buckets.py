"""Collectives that don't wait for each other travel together.

Three kinds do: sums of gradients and metrics, gathers of sharded weights, and scattered sums of
their gradients. Each kind says how several tensors become one, and how its result becomes theirs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from keras_spmd._gradients import BUCKET_BYTES
from keras_spmd.graph._origins import copy_origin, layer_of, origin_of

_c10d = torch.ops._c10d_functional
ALL_REDUCE = _c10d.all_reduce.default
ALL_GATHER = _c10d.all_gather_into_tensor.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
WAIT = _c10d.wait_tensor.default
aten = torch.ops.aten


_CAUSES = "keras_spmd_causes"


def causes_of(node: Node) -> list[str]:
    """The layers that a collective is there for; several, if it was made of several."""
    return node.meta.get(_CAUSES) or [layer_of(node)]


class _Bucket:
    """Members of one kind, over the same ranks, and of one dtype."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.members: list[Node] = []
        self.nbytes = 0


def merge_into_buckets(graph: Graph, limit: int = BUCKET_BYTES) -> None:
    """Make one collective of several, up to a number of bytes.

    Buckets are numbered, and a member may depend on buckets of lower numbers only, so that they
    can be carried out in that order.
    """
    weights_limit = max(limit, _usual_block(graph))
    buckets: dict[tuple, list[_Bucket]] = {}
    highest: dict[Node, int] = {}  # the highest number of a bucket that a node depends on
    count = 0
    for node in graph.nodes:
        highest[node] = max((highest[x] for x in node.all_input_nodes), default=-1)
        if not _can_be_bucketed(node):
            continue
        nbytes = max(nbytes_of(node), nbytes_of(node.args[0]))
        most = limit if node.target is ALL_REDUCE else weights_limit
        # A weight that was gathered for the forward pass is freed, and gathered again.
        phase = origin_of(node).phase if node.target is ALL_GATHER else None
        key = (node.target, _value(node).dtype, phase, *node.args[1:])
        known = buckets.setdefault(key, [])
        # Weights are gathered when they are needed, so only the last bucket takes more.
        for bucket in known[-1:] if node.target is ALL_GATHER else known:
            if bucket.number > highest[node] and bucket.nbytes + nbytes <= most:
                break
        else:
            bucket = _Bucket(count)
            known.append(bucket)
            count += 1
        bucket.members.append(node)
        bucket.nbytes += nbytes
        highest[node] = bucket.number
    for group in buckets.values():
        for bucket in group:
            if len(bucket.members) > 1:
                _merge(graph, bucket.members)


def _usual_block(graph: Graph) -> int:
    """Bytes of about a block of the model: four times the usual size of a gathered weight.

    By bytes, not by number: half of all that is gathered comes in weights of at least this size.
    """
    sizes = sorted(nbytes_of(node) for node in graph.nodes if node.target is ALL_GATHER)
    half, seen = sum(sizes) / 2, 0
    for size in reversed(sizes):
        seen += size
        if seen >= half:
            return 4 * size
    return 0


def _can_be_bucketed(node: Node) -> bool:
    is_sum = node.target in (ALL_REDUCE, REDUCE_SCATTER) and node.args[1] in ("sum", "avg")
    return (is_sum or node.target is ALL_GATHER) and all(u.target is WAIT for u in node.users)


def _merge(graph: Graph, members: list[Node]) -> None:
    """One collective for all members, whose users get their parts of its result."""
    first = members[0]
    target: Any = first.target
    with graph.inserting_before(first):
        call = Caller(graph, first)
        merged = call(target, _joined(call, members), *first.args[1:])
        merged.meta[_CAUSES] = [cause for member in members for cause in causes_of(member)]
        done = call(WAIT, merged)
        pieces = _parted(call, done, members)
    for member, piece in zip(members, pieces, strict=True):
        for wait in list(member.users):
            wait.replace_all_uses_with(piece)
            graph.erase_node(wait)
        graph.erase_node(member)


def _joined(call: "Caller", members: list[Node]) -> Node:
    """What goes in: one after the other; of a scattered sum, for each rank what it will get."""
    target = members[0].target
    if target is REDUCE_SCATTER:
        ranks: Any = members[0].args[2]
        parts = [call(aten.reshape.default, m.args[0], [ranks, -1]) for m in members]
        return call(aten.reshape.default, call(aten.cat.default, parts, 1), [-1])
    return call(aten.cat.default, [call(aten.reshape.default, m.args[0], [-1]) for m in members])


def _parted(call: "Caller", done: Node, members: list[Node]) -> list[Node]:
    """What comes out: of a gather, the same part of what each rank sent."""
    is_gather = members[0].target is ALL_GATHER
    ranks: Any = members[0].args[1] if is_gather else 1
    if is_gather:
        done = call(aten.view.default, done, [ranks, -1])
    pieces, start = [], 0
    for member in members:
        shape = list(_value(member).shape)
        end = start + _value(member).numel() // ranks
        piece = call(aten.slice.Tensor, done, 1 if is_gather else 0, start, end)
        if is_gather:
            piece = call(aten.clone.default, piece, memory_format=torch.contiguous_format)
        pieces.append(call(aten.view.default, piece, shape))
        start = end
    return pieces


class Caller:
    """Writes calls into a graph, with the meta data of their results."""

    def __init__(self, graph: Graph, origin: Node) -> None:
        self.graph, self.origin = graph, origin

    def __call__(self, target: Callable, *args: Any, **options: Any) -> Node:
        node = self.graph.call_function(target, args, options)
        if target in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, WAIT):
            # To run it with fake tensors would still need its group.
            node.meta["val"] = _result_of(target, args)
        else:
            node.meta["val"] = target(*torch.fx.node.map_arg(args, _value), **options)
        copy_origin(self.origin, node)
        return node


def _result_of(target: Callable, args: Sequence[Any]) -> torch.Tensor:
    value = _value(args[0])
    if target is ALL_GATHER:
        return value.new_empty([args[1] * value.shape[0], *value.shape[1:]])
    if target is REDUCE_SCATTER:
        return value.new_empty([value.shape[0] // args[2], *value.shape[1:]])
    return value


def _value(node: Any) -> Any:
    return node.meta["val"]


def nbytes_of(node: Any) -> int:
    return _value(node).numel() * _value(node).element_size()
