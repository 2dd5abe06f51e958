"""The communication of a captured step: fewer, larger and later.

Works on a functional graph: values are never overwritten, but by the `copy_` at its end. So nodes
may be moved as their inputs allow, and two collectives of one tensor are one.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.fx import Graph, GraphModule, Node

from keras_spmd._gradients import BUCKET_BYTES

_c10d = torch.ops._c10d_functional
ALL_REDUCE = _c10d.all_reduce.default
WAIT = _c10d.wait_tensor.default


def is_collective(node: Node) -> bool:
    return str(node.target).startswith("_c10d_functional.") and node.target is not WAIT


def collectives_of(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if is_collective(node)]


def group_ranks(node: Node) -> tuple[int, ...]:
    """The ranks that take part in a collective."""
    return tuple(dist.get_process_group_ranks(c10d._resolve_process_group(node.args[-1])))


def merge_duplicates(graph: Graph) -> None:
    """One all-reduce for all that reduce the same tensor."""
    seen: dict[tuple, Node] = {}
    for node in list(graph.nodes):
        if node.target is ALL_REDUCE:
            first = seen.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
    # Each kept its own wait.
    for node in seen.values():
        waits = [user for user in node.users if user.target is WAIT]
        for other in waits[1:]:
            other.replace_all_uses_with(waits[0])
            graph.erase_node(other)


class _Bucket:
    def __init__(self, number: int) -> None:
        self.number = number
        self.members: list[Node] = []
        self.nbytes = 0


def merge_into_buckets(graph: Graph, limit: int = BUCKET_BYTES) -> None:
    """Sums over the same ranks that don't wait for each other travel together.

    Buckets are numbered, and a member may depend on buckets of lower numbers only, so that they
    can be carried out in that order.
    """
    buckets: dict[tuple, list[_Bucket]] = {}
    highest: dict[Node, int] = {}  # the highest number of a bucket that a node depends on
    count = 0
    for node in graph.nodes:
        highest[node] = max((highest[x] for x in node.all_input_nodes), default=-1)
        if not _can_be_bucketed(node):
            continue
        nbytes = _nbytes(node.args[0])
        key = (_dtype(node), *node.args[1:])
        for bucket in buckets.setdefault(key, []):
            if bucket.number > highest[node] and bucket.nbytes + nbytes <= limit:
                break
        else:
            bucket = _Bucket(count)
            buckets[key].append(bucket)
            count += 1
        bucket.members.append(node)
        bucket.nbytes += nbytes
        highest[node] = bucket.number
    for group in buckets.values():
        for bucket in group:
            if len(bucket.members) > 1:
                _merge(graph, bucket.members)


def _can_be_bucketed(node: Node) -> bool:
    return (
        node.target is ALL_REDUCE
        and node.args[1] in ("sum", "avg")
        and all(user.target is WAIT for user in node.users)
    )


def _merge(graph: Graph, members: list[Node]) -> None:
    """One all-reduce of all members' values, one after the other in one tensor."""
    with graph.inserting_before(members[0]):
        flat = [_call(graph, torch.ops.aten.reshape.default, m.args[0], [-1]) for m in members]
        joined = _call(graph, torch.ops.aten.cat.default, flat)
        reduced = _call(graph, ALL_REDUCE, joined, *members[0].args[1:])
        done = _call(graph, WAIT, reduced)
        start, pieces = 0, []
        for member in members:
            value = member.meta["val"]
            end = start + value.numel()
            piece = _call(graph, torch.ops.aten.slice.Tensor, done, 0, start, end)
            pieces.append(_call(graph, torch.ops.aten.view.default, piece, list(value.shape)))
            start = end
    for member, piece in zip(members, pieces, strict=True):
        for wait in list(member.users):
            wait.replace_all_uses_with(piece)
            graph.erase_node(wait)
        graph.erase_node(member)


def _call(graph: Graph, target: Callable, *args: Any) -> Node:
    """A call in the graph, with the meta data of its result."""
    node = graph.call_function(target, args)
    if target in (ALL_REDUCE, WAIT):
        node.meta["val"] = args[0].meta["val"]
    else:
        node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
    return node


def sort(graph: Graph, *, late_waits: bool = True) -> None:
    """Bring nodes into an order that their inputs allow: the old one, but for late waits.

    What waits for a collective comes when somebody needs it, so that other work is done meanwhile.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    last = [n for n in nodes if n.op == "output" or n.target is torch.ops.aten.copy_.default]
    ordered: list[Node] = []
    placed: set[Node] = set()

    def place(root: Node) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in placed:
                stack.pop()
                continue
            missing = [x for x in node.all_input_nodes if x not in placed]
            if missing:
                stack.extend(sorted(missing, key=lambda n: -position[n]))
            else:
                placed.add(node)
                ordered.append(node)
                stack.pop()

    lazy = _after_waits(nodes) if late_waits else set()
    for node in nodes:
        if node.op == "placeholder" or (node not in lazy and node not in last):
            place(node)
    for node in nodes:
        if node not in last:
            place(node)
    for node in last:
        place(node)
    for before, after in itertools.pairwise(ordered):
        before.append(after)


def _after_waits(nodes: list[Node]) -> set[Node]:
    """Waits and all that depends on one, unless a collective of its own depends on it in turn."""
    depends: set[Node] = set()
    for node in nodes:
        if node.target is WAIT or any(x in depends for x in node.all_input_nodes):
            depends.add(node)
    feeds: set[Node] = set()
    for node in reversed(nodes):
        if is_collective(node) or any(user in feeds for user in node.users):
            feeds.add(node)
    return depends - feeds


def _nbytes(node: Any) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()


def _dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype
