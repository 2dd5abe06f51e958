"""Equal updates of variables are compiled once.

An optimizer does the same to every variable, and a model has variables of few shapes. As part of a
compiled step the update of each one is code of its own, and making that takes as long as a third of
the step. So what happens to each element of a variable by itself is cut off the end of the step,
and one compiled function serves all variables of a kind.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from keras_spmd.graph._functional import COPY, item, memory_of
from keras_spmd.graph._origins import copy_origin

# Fewer updates than this in common are not worth a function of their own.
_WORTH_IT = 8
# So many of a kind are done by one call: fewer kernels to launch, but more code to compile.
_AT_ONCE = 4
_ON_LISTS = "aten::_foreach_"
# What an op on lists does to one item, by the names of overloads.
_ON_ITEMS = {
    "default": ("default",),
    "List": ("Tensor", "default"),
    "Tensor": ("Tensor",),
    "Scalar": ("Tensor", "Tensor_Scalar"),
}


class Update:
    """What is done to one variable and its state, and what it is computed from."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes, members = nodes, set(nodes)
        inputs = (x for node in nodes for x in node.all_input_nodes if x not in members)
        self.inputs = list(dict.fromkeys(inputs))
        self.numbers = [x for x in self.inputs if _is_number(x)]
        place = {node: f"x{i}" for i, node in enumerate([*self.inputs, *nodes])}
        steps = [
            (node.target, map_arg((node.args, tuple(node.kwargs.items())), place.__getitem__))
            for node in nodes
        ]
        # Equal for updates that one function can do.
        self.key = repr((steps, [_kind(x.meta["val"]) for x in self.inputs]))


def _is_number(node: Node) -> bool:
    return node.meta["val"].numel() == 1


def _kind(x: torch.Tensor) -> tuple:
    return (tuple(x.shape), x.stride(), x.dtype, x.device)


class Call:
    """Updates of one kind that are done together, from the same numbers."""

    def __init__(self, updates: list[Update]) -> None:
        self.updates = updates
        self.key = (updates[0].key, len(updates))
        self.inputs = list(dict.fromkeys(x for update in updates for x in update.inputs))

    def graph(self) -> Graph:
        """The updates by themselves, which overwrite some of their inputs."""
        graph = Graph()
        copied: dict[Node, Node] = {}
        for i, x in enumerate(self.inputs):
            copied[x] = graph.placeholder(f"x{i}")
            copied[x].meta["val"] = x.meta["val"]
        for nodes in zip(*(update.nodes for update in self.updates), strict=True):
            on_lists = nodes[0].meta.get(_ON_LISTS)
            if on_lists is None or len(nodes) == 1:
                for node in nodes:
                    copied[node] = graph.node_copy(node, copied.__getitem__)
            else:
                copied |= _joined(graph, on_lists, nodes, copied)
        graph.output(())
        return graph


def _joined(
    graph: Graph, on_lists: Any, nodes: Sequence[Node], copied: dict[Node, Node]
) -> dict[Node, Node]:
    """One op on lists instead of one for each item."""
    args: list[Any] = []
    for values in zip(*(node.args for node in nodes), strict=True):
        first = values[0]
        if isinstance(first, Node) and not _is_number(first):
            args.append([copied[x] for x in values])
        else:
            args.append(copied[first] if isinstance(first, Node) else first)
    all_of_them = graph.call_function(on_lists, tuple(args), nodes[0].kwargs)
    all_of_them.meta["val"] = [node.meta["val"] for node in nodes]
    return {node: item(graph, all_of_them, i) for i, node in enumerate(nodes)}


class Divided:
    """A step in two parts: a graph, and the updates that follow it.

    Args:
        module: The step without the updates. It returns their inputs after its own results.
        calls: What was cut off: for each, its kind, and where its inputs are among the inputs and
            results of the graph.
        graphs: What the updates of each kind do.
        result_count: How many results the step has.
    """

    def __init__(
        self,
        module: GraphModule,
        calls: list[tuple[Any, list[int]]],
        graphs: dict[Any, Graph],
        result_count: int,
    ) -> None:
        self.module, self.calls = module, calls
        self.graphs, self.result_count = graphs, result_count

    def joined(self, main: Callable, compiled: Callable[[GraphModule], Callable]) -> Callable:
        """The whole step, of the compiled graph and updates yet to be compiled."""
        functions = {kind: compiled(GraphModule({}, graph)) for kind, graph in self.graphs.items()}
        calls = [(functions[kind], places) for kind, places in self.calls]

        def run(args: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            results = main(args)
            values = [*args, *results]
            for function, places in calls:
                function([values[i] for i in places])
            return results[: self.result_count]

        return run


def divided(module: GraphModule) -> Divided | None:
    """The step without its updates, and these; None where they have too little in common."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    module = GraphModule(module, graph)
    _take_lists_apart(graph)
    updates = [Update(nodes) for nodes in _by_variable(_elementwise_end(graph))]
    if len(updates) - len({update.key for update in updates}) < _WORTH_IT:
        return None
    if _overlap(graph, updates):
        return None
    return _cut(module, _calls(updates))


def _calls(updates: list[Update]) -> list[Call]:
    """Several updates at once; those that are left of a kind, one by one."""
    alike: dict[Any, list[Update]] = {}
    for update in updates:
        alike.setdefault((update.key, *update.numbers), []).append(update)
    calls = []
    for group in alike.values():
        whole = len(group) - len(group) % _AT_ONCE
        calls += [Call(group[i : i + _AT_ONCE]) for i in range(0, whole, _AT_ONCE)]
        calls += [Call([update]) for update in group[whole:]]
    return calls


def _take_lists_apart(graph: Graph) -> None:
    """Replace ops on lists of tensors by one op for each of them, where there is such an op."""
    for node in list(graph.nodes):
        single = _on_an_item(node.target)
        if single is None:
            continue
        for taken in list(node.users):
            i = taken.args[1]
            args = [x[i] if isinstance(x, (list, tuple)) else x for x in node.args]
            with graph.inserting_before(taken):
                new = graph.call_function(single, tuple(args), node.kwargs)
            new.meta |= {"val": taken.meta["val"], _ON_LISTS: node.target}
            copy_origin(taken, new)
            taken.replace_all_uses_with(new)
            graph.erase_node(taken)
        graph.erase_node(node)


def _on_an_item(op: Any) -> Any:
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.name.startswith(_ON_LISTS):
        return None
    if sum(not argument.kwarg_only for argument in op._schema.arguments) > 2:
        return None
    packet = getattr(torch.ops.aten, op._schema.name.removeprefix(_ON_LISTS), None)
    for name in _ON_ITEMS.get(op._overloadname, ()):
        found = getattr(packet, name, None)
        if found is not None and _is_elementwise(found):
            return found
    return None


def _is_elementwise(op: Any) -> bool:
    tags = getattr(op, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _elementwise_end(graph: Graph) -> list[Node]:
    """The nodes that only serve to write variables of their own shape, element by element."""
    found: dict[Node, None] = {}
    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            continue
        if node.target is COPY or (
            _is_elementwise(node.target)
            and node.users
            and all(user in found and user.meta["val"].shape == value.shape for user in node.users)
        ):
            found[node] = None
    return list(reversed(found))


def _by_variable(nodes: list[Node]) -> list[list[Node]]:
    """Groups that have no tensor in common; numbers may be."""
    parent: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while parent.setdefault(node, node) is not node:
            node = parent[node]
        return node

    groups: dict[Node, list[Node]] = {}
    for node in nodes:
        for x in node.all_input_nodes:
            if not _is_number(x):
                parent[root(x)] = root(node)
    for node in nodes:
        groups.setdefault(root(node), []).append(node)
    return list(groups.values())


def _overlap(graph: Graph, updates: list[Update]) -> bool:
    """Whether something that is used after an update lies in the memory that it writes."""
    (output,) = graph.find_nodes(op="output")
    copies = [node for update in updates for node in update.nodes if node.target is COPY]
    written = {memory_of(node.all_input_nodes[0].meta["val"]) for node in copies}
    used = [*output.all_input_nodes, *(x for update in updates for x in update.inputs)]
    return any(memory_of(x.meta["val"]) in written for x in used if x.op != "placeholder")


def _cut(module: GraphModule, calls: list[Call]) -> Divided:
    graph = module.graph
    graphs = {call.key: call.graph() for call in {c.key: c for c in calls}.values()}
    for update in (update for call in calls for update in call.updates):
        for node in reversed(update.nodes):
            graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    inputs = graph.find_nodes(op="placeholder")
    overwritten = {node.args[0] for node in graph.find_nodes(op="call_function", target=COPY)}
    results: list[Any] = list(output.args[0])
    result_count = len(results)
    place = {node: i for i, node in enumerate(inputs) if node not in overwritten}
    for x in (x for call in calls for x in call.inputs):
        if x in place:
            continue
        place[x] = len(inputs) + len(results)
        if x in overwritten:
            with graph.inserting_after(inputs[-1]):
                clone = graph.call_function(torch.ops.aten.clone.default, (x,))
            clone.meta["val"] = x.meta["val"].clone()
            results.append(clone)
        else:
            results.append(x)
    output.args = (tuple(results),)
    module.recompile()
    places = [(call.key, [place[x] for x in call.inputs]) for call in calls]
    return Divided(module, places, graphs, result_count)
