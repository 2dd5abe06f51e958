"""The floating-point operations of a graph's ops: torch's formulas, and a few of ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from keras_spmd.plan._ops import Kind, kind_of

aten = torch.ops.aten


def _attention(q: Any, k: Any, v: Any) -> int:
    """Scores and their product with the values, each two operations for a multiply-add."""
    batch, heads, length, size = q.shape
    return 2 * batch * heads * length * k.shape[2] * (size + v.shape[3])


def _attention_backward(grad: Any, q: Any, k: Any, v: Any) -> int:
    """Scores again, the gradients of scores and values, and those of queries and keys."""
    batch, heads, length, size = q.shape
    return 2 * batch * heads * length * k.shape[2] * (3 * size + 2 * v.shape[3])


def _own_formulas() -> dict[str, Callable]:
    return {
        "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *a, **o: _attention(q, k, v),
        "_scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, v, *a, **o: (
            _attention_backward(g, q, k, v)
        ),
        "product": lambda a, b, **o: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    }


_OWN = _own_formulas()


def flops_of(node: Node) -> int:
    """Operations of one node, a multiply-add being two; 0 for what only moves or maps elements."""
    if kind_of(node) is not Kind.WHOLE:
        return 0
    target: Any = node.target
    packet = getattr(target, "overloadpacket", target)
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    own = _OWN.get(getattr(packet, "__name__", ""))
    if own is not None:
        return int(own(*args, **kwargs))
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=node.meta["val"]))
