"""A graph in which values are never overwritten, but for the state's, at its end.

Passes may then move nodes as their inputs allow. A step as traced overwrites a few values: an
optimizer updates variables in place, for instance.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from keras_spmd.graph._origins import StampingInterpreter, copy_origin
from keras_spmd.graph._simplify import drop_aliases, drop_constant_copies

COPY = torch.ops.aten.copy_.default


def make_functional(module: GraphModule, inputs: Sequence[torch.Tensor]) -> GraphModule:
    """The same graph; it ends with a `copy_` into each input that it overwrites."""
    drop_aliases(module.graph)
    if not _replace_writes(module.graph):
        module = _traced_again(module, inputs)
    drop_aliases(module.graph)
    drop_constant_copies(module.graph)
    module.graph.eliminate_dead_code()
    return module


def _traced_again(module: GraphModule, inputs: Sequence[torch.Tensor]) -> GraphModule:
    """By torch's own functionalization, which follows views of what is overwritten."""
    module.recompile()
    with torch.no_grad():
        function = torch.func.functionalize(StampingInterpreter(module).run, remove="mutations")
        result = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    result.graph.set_codegen(torch.fx.graph.CodeGen())
    return result


class _Write:
    """An op that overwrites its first argument, a tensor or a list of them."""

    def __init__(self, node: Node) -> None:
        self.node = node
        first: Any = node.args[0] if node.args else ()
        self.targets: list[Node] = list(first) if isinstance(first, (list, tuple)) else [first]
        self.op = _out_of_place(node.target)


def _out_of_place(op: Any) -> Any:
    schema = op._schema
    written = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    name = schema.name.removeprefix("aten::")
    if not name.endswith("_") or written != [schema.arguments[0].name]:
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    found = getattr(packet, op._overloadname, None)
    return None if found is None or found._schema.is_mutable else found


def _replace_writes(graph: Graph) -> bool:
    """Let each write make a new value; False, with nothing done, if somebody has a view of it."""
    nodes = list(graph.nodes)
    writes = {n: _Write(n) for n in nodes if _is_write(n)}
    if any(write.op is None for write in writes.values()) or _is_seen(nodes, writes):
        return False
    now: dict[Node, Node] = {}
    for node in nodes:
        if node in writes:
            _replace(graph, writes[node], now)
        else:
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: now.get(n, n))
    for node in reversed(writes):
        graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        for target, value in now.items():
            if target.op == "placeholder" and value is not target:
                graph.call_function(COPY, (target, value)).meta["val"] = target.meta["val"]
    return True


def _is_write(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_seen(nodes: list[Node], writes: dict[Node, _Write]) -> bool:
    """Whether another tensor in the same memory is used after a write."""
    position = {node: i for i, node in enumerate(nodes)}
    last_use: dict[int, list[tuple[int, Node]]] = {}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node not in writes:
            last = max((position[user] for user in node.users), default=-1)
            last_use.setdefault(memory_of(value), []).append((last, node))
    return any(
        last > position[write.node]
        for write in writes.values()
        for target in write.targets
        for last, other in last_use[memory_of(target.meta["val"])]
        if other is not target
    )


def memory_of(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _replace(graph: Graph, write: _Write, now: dict[Node, Node]) -> None:
    node = write.node
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: now.get(n, n))
    with graph.inserting_before(node):
        new = graph.call_function(write.op, args, kwargs)
        new.meta["val"] = write.op(*map_arg(args, _value), **map_arg(kwargs, _value))
        copy_origin(node, new)
        if isinstance(node.args[0], (list, tuple)):
            for i, target in enumerate(write.targets):
                now[target] = item(graph, new, i)
        else:
            now[write.targets[0]] = now[node] = new


def _value(node: Node) -> Any:
    return node.meta["val"]


def item(graph: Graph, node: Node, i: int) -> Node:
    """One of the results of a node, at the place where the graph is being written."""
    result = graph.call_function(operator.getitem, (node, i))
    result.meta["val"] = node.meta["val"][i]
    copy_origin(node, result)
    return result
