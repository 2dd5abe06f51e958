"""What a step computes from numbers alone is computed once.

Keras makes tensors of numbers, such as the shape that a mean is divided by. A compiler would take
them for inputs, compute with them in every step, and everywhere: where they scale the gradient of a
large tensor, that becomes too long an expression to be computed in one go.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
_MADE = (aten.full.default, aten.scalar_tensor.default)
_FRESH = "keras_spmd_fresh"
_SMALL = 16


def mark_fresh(node: Node) -> None:
    """This tensor was made while the step was traced."""
    if node.op == "get_attr":
        node.meta[_FRESH] = True


def fold_constants(module: GraphModule) -> None:
    """Replace numbers that depend on nothing but numbers by their values."""
    graph = module.graph
    known: dict[Node, torch.Tensor] = {}
    for node in list(graph.nodes):
        value = _value(module, node, known)
        if value is None:
            continue
        known[node] = value
        if node.target not in _MADE and value.ndim == 0:
            with graph.inserting_before(node):
                options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
                new = graph.call_function(aten.full.default, ([], value.item()), options)
            new.meta = dict(node.meta)
            known[new] = value
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


def _own_constant(module: GraphModule, node: Node) -> torch.Tensor | None:
    """A constant that nobody else can reach; the memory of a numpy array is somebody's."""
    constant = getattr(module, str(node.target))
    is_own = node.meta.get(_FRESH) and constant.untyped_storage().resizable()
    return constant if is_own else None


def _value(module: GraphModule, node: Node, known: dict[Node, torch.Tensor]) -> Any:
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or result.numel() > _SMALL:
        return None
    if node.op == "get_attr":
        return _own_constant(module, node)
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    inputs = node.all_input_nodes
    if not all(x in known for x in inputs) or not (inputs or node.target in _MADE):
        return None
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
    return node.target(*args, **kwargs)
