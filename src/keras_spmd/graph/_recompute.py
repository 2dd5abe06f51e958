"""Activations that are cheap to compute again are not kept for the backward pass.

A traced step uses in its backward pass whatever the forward pass has made, so all of that would
live until then. torch.compile's own partitioner decides what is worth keeping: a minimal cut.
What it returns is put together again into one graph.
"""

from typing import Any

from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node

from keras_spmd.graph._functional import COPY
from keras_spmd.graph._order import needed
from keras_spmd.graph._origins import origin_of

_GIVEN = ("placeholder", "get_attr")


def recompute_cheap_activations(module: GraphModule) -> GraphModule:
    """The same step, whose backward pass keeps less; a functional graph with its `copy_`s last."""
    if not any(origin_of(node).phase == "backward" for node in module.graph.nodes):
        return module
    step = _Step(module)
    with config.patch(cse=False):
        forward, backward = min_cut_rematerialization_partition(
            step.joint, None, num_fwd_outputs=step.forward_count
        )
    return step.joined(forward, backward)


def _parts_of(nodes: list[Node]) -> dict[Node, str]:
    """Each node's part of the step: forward, backward, or the update that comes after both.

    A node stays in the backward pass also if it depends on weights only, gathered again say, and in
    the update if it depends on the state only: its result would live from the beginning on. What
    the update makes of results of the forward pass alone, metrics for instance, is done there.
    """
    parts: dict[Node, str] = {}
    for node in nodes:
        phase = origin_of(node).phase
        inputs = {parts[x] for x in node.all_input_nodes if x.op not in _GIVEN}
        if node.op in _GIVEN:
            parts[node] = "forward"
        elif node.op == "output" or node.target is COPY or "update" in inputs:
            parts[node] = "update"
        elif phase == "backward":
            parts[node] = "backward"
        elif "backward" in inputs or (phase == "update" and not inputs):
            parts[node] = "update"
        else:
            parts[node] = "forward"
    return parts


class _Step:
    """A step without its update: a function from inputs to all that is used after it, and back."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        parts = _parts_of(list(module.graph.nodes))
        self.update = [node for node in parts if parts[node] == "update"]
        used = {x: None for node in self.update for x in node.all_input_nodes}
        self.values = [x for x in used if parts[x] != "update" and x.op != "placeholder"]
        self.values.sort(key=lambda node: parts[node] == "backward")
        self.forward_count = sum(parts[node] == "forward" for node in self.values)
        graph = Graph()
        copied: dict[Node, Node] = {}
        for node, part in parts.items():
            if part != "update":
                copied[node] = graph.node_copy(node, copied.__getitem__)
            if part == "backward":
                copied[node].meta["partitioner_tag"] = "must_be_in_backward"
        graph.output([copied[node] for node in self.values])
        self.joint = GraphModule(module, graph)

    def joined(self, forward: GraphModule, backward: GraphModule) -> GraphModule:
        """One graph: forward, then backward with what it recomputes just before it is needed."""
        graph = Graph()
        copied: dict[Node, Node] = {}
        outputs: Any = graph.graph_copy(forward.graph, copied)
        results, kept = outputs[: self.forward_count], outputs[self.forward_count :]
        computed = {node.name for node in forward.graph.nodes if node.op == "call_function"}
        places = [node for node in backward.graph.nodes if node.op == "placeholder"]
        done = dict(zip(places, kept, strict=True))
        (end,) = backward.graph.find_nodes(op="output")
        calls = [node for node in backward.graph.nodes if node.op == "call_function"]
        for root in [*(node for node in calls if node.name not in computed), *end.args[0]]:
            for node in needed(root, done):
                done[node] = graph.node_copy(node, done.__getitem__)
        results = [*results, *(done[value] for value in end.args[0])]
        inputs = self.module.graph.find_nodes(op="placeholder")
        known = dict(zip(inputs, graph.find_nodes(op="placeholder"), strict=True))
        known |= dict(zip(self.values, results, strict=True))
        for node in self.update:
            known[node] = graph.node_copy(node, known.__getitem__)
        return GraphModule(self.module, graph)
