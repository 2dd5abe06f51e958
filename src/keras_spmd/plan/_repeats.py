"""Blocks that are alike are planned once.

A model of 80 equal blocks takes minutes to capture, and each block says the same. So the step is
captured with two of them, the first and the last, and again with one more: the difference is what
every further block adds. A block that is left out passes its input on.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keras.src import tree

_PLAIN = (int, float, bool, str, bytes, type(None))
# So many blocks are worth it; fewer are captured one by one, which is exact.
WORTH_IT = 8


class NotAlike(Exception):
    """A block that can't be left out: what it returns is not like what it gets."""


@dataclass
class Group:
    """Layers that are alike, in the order of the model."""

    layers: list[Any]

    @property
    def count(self) -> int:
        return len(self.layers)

    def kept(self, *, with_middle: bool) -> list[Any]:
        middle = [self.layers[1]] if with_middle else []
        return [self.layers[0], *middle, self.layers[-1]]

    def role_of(self, path: str) -> str | None:
        """Which block a layer's path lies in: the first, the last, or one between."""
        for i, layer in enumerate(self.layers):
            if path == layer.path or path.startswith(layer.path + "/"):
                rest = path[len(layer.path) :]
                where = {0: "first", self.count - 1: "last"}.get(i, "middle")
                return f"{where} of {self.layers[0].path}{rest}"
        return None


def groups_of(model: Any, least: int = WORTH_IT) -> list[Group]:
    """The outermost layers that are made of layers and that occur often."""
    found: dict[Any, list[Any]] = {}
    inside: set[int] = set()
    for layer in model._flatten_layers(include_self=False):
        if len(list(layer._flatten_layers(include_self=False))) and layer.weights:
            found.setdefault(_likeness(layer), []).append(layer)
    groups = []
    for layers in sorted(found.values(), key=lambda layers: -_weight(layers)):
        outer = [layer for layer in layers if id(layer) not in inside]
        if len(outer) >= least:
            groups.append(Group(outer))
            for layer in outer:
                inside.update(id(x) for x in layer._flatten_layers(include_self=False))
    return groups


def _weight(layers: list[Any]) -> int:
    return sum(math.prod(v.shape) for layer in layers for v in layer.variables)


def _likeness(layer: Any) -> tuple:
    """Equal for layers that compute the same with other weights."""
    parts = [(type(part).__qualname__, *_attributes(part)) for part in layer._flatten_layers()]
    variables = [
        (tuple(v.shape), v.dtype, v.trainable, tuple(getattr(v._layout, "axes", ())))
        for v in layer.variables
    ]
    return (*parts, *variables)


def _attributes(layer: Any) -> list[tuple[str, str]]:
    return [
        (name, repr(value))
        for name, value in sorted(vars(layer).items())
        if isinstance(value, (*_PLAIN, tuple)) and "name" not in name and "path" not in name
    ]


@contextlib.contextmanager
def only(groups: list[Group], kept: list[Any]) -> Iterator[None]:
    """In this block only these layers of the groups do something, and only they are trained."""
    layers = [layer for group in groups for layer in group.layers]
    left_out = [layer for layer in layers if not any(layer is other for other in kept)]
    trained = [v for layer in left_out for v in layer.variables if v.trainable]
    for layer in layers:
        is_out = any(layer is other for other in left_out)
        # Past Keras's attribute tracking, which would take a function for a part of the layer.
        vars(layer)["call"] = _first if is_out else _checked(layer.call)
    for v in trained:
        v.trainable = False
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["call"]
        for v in trained:
            v.trainable = True


def _first(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _checked(call: Any) -> Any:
    def checked(*args: Any, **kwargs: Any) -> Any:
        given, returned = _first(*args, **kwargs), call(*args, **kwargs)
        pairs = [tree.flatten(given), tree.flatten(returned)]
        if [_kind(x) for x in pairs[0]] != [_kind(x) for x in pairs[1]]:
            raise NotAlike
        return returned

    return checked


def _kind(x: Any) -> Any:
    return tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)
