"""The communication of a captured step: fewer, larger and later.

Works on a functional graph: values are never overwritten, but by the `copy_` at its end. So nodes
may be moved as their inputs allow, and two collectives of one tensor are one.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.fx import Graph, GraphModule, Node

from keras_spmd.graph._buckets import ALL_GATHER, WAIT
from keras_spmd.graph._order import needed
from keras_spmd.graph._origins import origin_of

aten = torch.ops.aten
_MOVES = frozenset(
    [
        aten.constant_pad_nd.default,
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.slice.Tensor,
        aten.clone.default,
        aten.cat.default,
    ]
)


def is_collective(node: Node) -> bool:
    return str(node.target).startswith("_c10d_functional.") and node.target is not WAIT


def collectives_of(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if is_collective(node)]


def group_ranks(node: Node) -> tuple[int, ...]:
    """The ranks that take part in a collective."""
    return tuple(dist.get_process_group_ranks(c10d._resolve_process_group(node.args[-1])))


def merge_duplicates(graph: Graph) -> None:
    """One collective for all that do the same with the same tensor.

    A weight is gathered for the forward pass and again for the backward pass, in between it is
    freed.
    """
    seen: dict[tuple, Node] = {}
    for node in list(graph.nodes):
        if is_collective(node):
            phase = origin_of(node).phase if node.target is ALL_GATHER else None
            first = seen.setdefault((node.target, phase, _expression(node.args)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
    # Each kept its own wait.
    for node in seen.values():
        waits = [user for user in node.users if user.target is WAIT]
        for other in waits[1:]:
            other.replace_all_uses_with(waits[0])
            graph.erase_node(other)


def _expression(x: Any) -> Any:
    """What is the same for the same values, also if a rank with a shorter shard padded them twice.

    Ranks must merge the same collectives, so it sees through what moves data only.
    """
    if isinstance(x, Node):
        if x.target in _MOVES:
            return (x.target, _expression(x.args), _expression(tuple(x.kwargs.items())))
        return x
    if isinstance(x, (list, tuple)):
        return tuple(_expression(item) for item in x)
    return x


def prefetch_weights(graph: Graph) -> None:
    """Begin to gather weights while those gathered before are still in use: one gather ahead."""
    gathers = [node for node in graph.nodes if node.target is ALL_GATHER]
    for before, after in itertools.pairwise(gathers):
        waits = [user for user in before.users if user.target is WAIT]
        if waits and origin_of(before).phase == origin_of(after).phase and _is_free(after):
            waits[0].prepend(after)


def _is_free(gather: Node) -> bool:
    """Whether it depends on inputs of the graph only, so that it may begin at any time."""
    waiting, seen = [gather], set()
    while waiting:
        node = waiting.pop()
        if is_collective(node) and node is not gather:
            return False
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return True


def sort(graph: Graph, *, late_waits: bool = True) -> None:
    """Bring nodes into an order that their inputs allow: the old one, but for late waits.

    What waits for a collective comes when somebody needs it, so that other work is done meanwhile.
    """
    nodes = list(graph.nodes)
    last = {n: None for n in nodes if n.op == "output" or n.target is aten.copy_.default}
    lazy = _after_waits(nodes) if late_waits else set()
    eager = [n for n in nodes if n.op == "placeholder" or (n not in lazy and n not in last)]
    ordered: dict[Node, None] = {}
    for root in [*eager, *(n for n in nodes if n not in last), *last]:
        for node in needed(root, ordered):
            ordered[node] = None
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
