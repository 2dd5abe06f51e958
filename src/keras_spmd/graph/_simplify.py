"""A traced graph without what only autograd needed, so that all that follows has less to do."""

import torch
from torch.fx import Graph, Node

from keras_spmd.graph._constants import mark_fresh

aten = torch.ops.aten
_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
_CONSTANT_COPY = aten.lift_fresh_copy.default


def drop_aliases(graph: Graph) -> None:
    """Use values directly instead of other names for them."""
    for node in list(graph.nodes):
        if node.target in _ALIASES:
            source = node.args[0]
        elif node.target is aten.copy.default and _are_alike(*node.args[:2]):
            source = node.args[1]  # what would be written is the value itself
        else:
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def drop_constant_copies(graph: Graph) -> None:
    """Use constants directly, which nothing in a functional graph overwrites."""
    for node in graph.find_nodes(op="call_function", target=_CONSTANT_COPY):
        mark_fresh(node.args[0])
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def clone_returned_inputs(graph: Graph) -> None:
    """A result that is a variable's value is a copy of it: later steps overwrite the variable."""
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        output.args = (
            tuple(
                graph.call_function(aten.clone.default, (value,))
                if isinstance(value, Node) and value.op == "placeholder"
                else value
                for value in output.args[0]
            ),
        )


def _are_alike(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.dtype == y.dtype
