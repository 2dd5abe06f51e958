"""What a compiler makes of each op: nothing, a part of a larger kernel, or a kernel of its own."""

import enum
import operator
from typing import Any

import torch
from torch.fx import Node

from keras_spmd.graph._buckets import WAIT
from keras_spmd.graph._functional import COPY

aten, prims = torch.ops.aten, torch.ops.prims


class Kind(enum.Enum):
    """How a node computes.

    A view costs nothing. Elementwise ops and reductions are computed together with others; a
    reduction's result is in memory. Any other op has its inputs and its results in memory.
    """

    INPUT = "input"
    VIEW = "view"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    WHOLE = "whole"
    WRITE = "write"
    OUTPUT = "output"


# Elementwise for a compiler, though torch doesn't call them so: copies, indirect loads, constants.
_ELEMENTWISE = frozenset(
    """clone convert_element_type _to_copy embedding gather index index_select constant_pad_nd full
    full_like zeros zeros_like ones ones_like empty empty_like new_zeros new_empty new_full new_ones
    scalar_tensor arange iota slice_scatter select_scatter flip roll repeat tril triu copy
    broadcast_in_dim _unsafe_index _unsafe_masked_index fill eye where
    _low_memory_max_pool_offsets_to_indices""".split()  # noqa: SIM905
)
_REDUCTIONS = frozenset(
    """sum mean amax amin max min argmax argmin var var_mean std prod any all logsumexp norm
    linalg_vector_norm xor_sum""".split()  # noqa: SIM905
)
_VIEWS = frozenset(["reshape", "_unsafe_view", "view_of"])
_HEAVY = frozenset(["exp", "sigmoid"])


def name_of(node: Node) -> str:
    """The op's name without its overload."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet))


def kind_of(node: Node) -> Kind:
    if node.op in ("placeholder", "get_attr"):
        return Kind.INPUT
    if node.op == "output":
        return Kind.OUTPUT
    if node.target is COPY:
        return Kind.WRITE
    if node.target is WAIT or node.target is operator.getitem or _is_view(node.target):
        return Kind.VIEW
    name = name_of(node)
    if name in _REDUCTIONS:
        return Kind.REDUCTION
    if name in _ELEMENTWISE or name.startswith("_foreach_") or _is_pointwise(node.target):
        return Kind.ELEMENTWISE
    if _is_one_hot(node):
        return Kind.ELEMENTWISE
    return Kind.WHOLE


def is_heavy(node: Node) -> bool:
    """Whether it is computed once on a CPU, rather than again for each of its users."""
    return name_of(node) in _HEAVY


def _is_pointwise(op: Any) -> bool:
    return torch.Tag.pointwise in getattr(op, "tags", ())


def _is_one_hot(node: Node) -> bool:
    """A number at one place of each row of a constant: Inductor compares places instead."""
    if node.target is not aten.scatter.value:
        return False
    arguments: tuple[Any, ...] = node.args
    constant, dim, places, _ = arguments
    one_in_each_row = list(constant.meta["val"].shape)
    one_in_each_row[dim] = 1
    return name_of(constant) == "full" and list(places.meta["val"].shape) == one_in_each_row


def _is_view(op: Any) -> bool:
    schema = getattr(op, "_schema", None)
    if schema is None:
        return False
    if schema.name.split("::")[-1] in _VIEWS:
        return True
    returns = [r.alias_info for r in schema.returns]
    return any(info is not None and not info.is_write for info in returns)


def nbytes_of(value: Any) -> int:
    """Bytes of a node's results."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes_of, value)) if isinstance(value, (list, tuple)) else 0
