"""Numbers that a step computes stay on the device.

`alpha=learning_rate` makes torch read a tensor's value on the host, which waits for the device.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from keras_spmd.graph._functional import item

aten = torch.ops.aten
_READ = aten._local_scalar_dense.default


def keep_on_device(module: GraphModule) -> None:
    """Multiply by the tensor where its value was read to be a factor, in place."""
    graph = module.graph
    for node in list(graph.nodes):
        factor = node.kwargs.get("alpha") if node.op == "call_function" else None
        if not isinstance(factor, Node) or factor.target is not _READ:
            continue
        multiply = {
            aten._foreach_add.List: aten._foreach_mul.Tensor,
            aten.add.Tensor: aten.mul.Tensor,
        }.get(node.target)
        if multiply is None:
            continue
        values, others = node.args
        with graph.inserting_before(node):
            scaled: Any = graph.call_function(multiply, (others, factor.args[0]))
            if isinstance(others, (list, tuple)):
                scaled.meta["val"] = [other.meta["val"] for other in others]
                scaled = [item(graph, scaled, i) for i in range(len(others))]
            else:
                scaled.meta["val"] = others.meta["val"]
        node.args = (values, scaled)
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "alpha"}
    graph.eliminate_dead_code()
    module.recompile()
