"""Where each node of a graph comes from: which layer, and which part of the step.

The passes need to know what is forward and what is backward, and a user what a layer costs. A node
is stamped when something else begins after it: a layer, the backward pass, or the backward part of
another layer.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from keras.src import tree
from torch.fx import Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from keras_spmd.graph._seeds import seed_after

_KEY = "keras_spmd_origin"


class Origin(NamedTuple):
    """What a node belongs to. The phase is "forward", "backward" or "update"."""

    layer: str = ""
    phase: str = "forward"


def origin_of(node: Node) -> Origin:
    return node.meta.get(_KEY, Origin())


def layer_of(node: Node) -> str:
    """The layer that a node belongs to. A gradient's is the one that it was computed in."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop(0)
        origin = origin_of(current)
        if origin.layer and origin.phase != "update":
            return origin.layer
        for x in current.all_input_nodes:
            if x not in seen and x.op != "placeholder":
                seen.add(x)
                waiting.append(x)
    return origin_of(node).layer or "the step itself"


def copy_origin(source: Node, node: Node) -> None:
    node.meta[_KEY] = origin_of(source)


def _stamp(origin: Origin) -> None:
    """Stamp all nodes that the running trace has made since the last stamp."""
    mode = get_proxy_mode()
    if mode is not None:
        for node in reversed(mode.tracer.graph.nodes):
            if _KEY in node.meta:
                break
            node.meta[_KEY] = origin


class Origins:
    """Follows a step while it is traced."""

    def __init__(self) -> None:
        self.here = Origin()
        self._known: set[Any] = set()

    def _go_to(self, origin: Origin) -> None:
        _stamp(self.here)
        self.here = origin

    @contextlib.contextmanager
    def inside(self, layer: Any) -> Iterator[None]:
        """What is traced meanwhile belongs to this layer."""
        outer = self.here
        self._go_to(Origin(getattr(layer, "path", None) or layer.name, outer.phase))
        try:
            yield
        finally:
            self._go_to(outer)

    def made(self, layer: Any, outputs: Any) -> None:
        """Note that the gradients of these outputs belong to this layer, unless already noted."""
        self._watch(getattr(layer, "path", None) or layer.name, outputs)

    def _watch(self, label: str, outputs: Any) -> None:
        waiting = [getattr(x, "grad_fn", None) for x in tree.flatten(outputs)]
        while waiting:
            function = waiting.pop()
            if function is None or function in self._known:
                continue
            self._known.add(function)
            function.register_prehook(lambda grads: self._go_to(Origin(label, "backward")))
            waiting += [following for following, _ in function.next_functions]

    @contextlib.contextmanager
    def watching_backward(self) -> Iterator[None]:
        """Let autograd say when it begins and ends."""
        before = torch.autograd.backward, torch.autograd.grad
        torch.autograd.backward = self._noting(before[0], "grad_tensors")
        torch.autograd.grad = self._noting(before[1], "grad_outputs")
        try:
            yield
        finally:
            torch.autograd.backward, torch.autograd.grad = before
            _stamp(self.here)

    def _noting(self, run: Callable, seed: str) -> Callable:
        signature = inspect.signature(run)

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._watch("loss", tensors)
            self._go_to(Origin("loss", "backward"))
            call = signature.bind(tensors, *args, **kwargs)
            if call.arguments.get(seed) is None:
                call.arguments[seed] = seed_after(tensors)
            try:
                return run(*call.args, **call.kwargs)
            finally:
                self._go_to(Origin("optimizer", "update"))

        return backward


class StampingInterpreter(Interpreter):
    """Runs a graph that is traced again, and stamps new nodes as the old ones were."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        _stamp(origin_of(n))
        return result
