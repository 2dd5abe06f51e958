"""Python-side state of a model: numbers and flags that a graph would freeze.

An attribute that a step itself changes can't be captured. One that is changed between steps, by a
callback say, belongs to the key of the graph: with another value, the step is captured again.
"""

from collections.abc import Callable
from typing import Any

_PLAIN = (int, float, bool, str, type(None))
# What Keras and torch note for themselves, and no step reads.
_IGNORED = frozenset(
    ["_initial_epoch", "_lock", "_called", "stop_training", "stop_evaluating", "stop_predicting"]
)

_changes = 0
_numbers: dict[tuple, int] = {}


def _is_ignored(name: str) -> bool:
    return name in _IGNORED or name.startswith("_keras_spmd")


def set_attribute_or(original: Callable) -> Callable:
    """`__setattr__` of layers, optimizers and metrics: counts changes of plain attributes."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        global _changes
        if isinstance(value, _PLAIN) and not _is_ignored(name):
            _changes += 1
        original(self, name, value)

    return __setattr__


def trainable_setter_or(original: property) -> property:
    """`Variable.trainable`: which variables are trained is part of the key."""

    def set_trainable(self: Any, value: bool) -> None:
        global _changes
        _changes += 1
        assert original.fset is not None
        original.fset(self, value)

    return property(original.fget, set_trainable, doc=original.__doc__)


def _holders(model: Any) -> list[Any]:
    holders = [*model._flatten_layers(), *model.metrics]
    optimizer = getattr(model, "optimizer", None)
    for extra in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if extra is not None:
            holders.append(extra)
    return holders


def snapshot(model: Any) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Every plain attribute of the model's parts, with its value."""
    found = {}
    for holder in _holders(model):
        for name, value in vars(holder).items():
            if isinstance(value, _PLAIN) and not _is_ignored(name):
                found[id(holder), name] = (holder, value)
    return found


def difference(before: dict, after: dict) -> list[str]:
    """The attributes that have another value now, as text. One that is new is no change yet."""
    changed = []
    for key, (holder, value) in after.items():
        old = before.get(key, (holder, value))[1]
        if not _same(old, value):
            label = getattr(holder, "path", None) or getattr(holder, "name", type(holder).__name__)
            changed.append(f"`{key[1]}` of '{label}' (from {old!r} to {value!r})")
    return changed


def restore(before: dict) -> None:
    """Undo what a capture that failed has changed: an eager step will change it again."""
    for (_, name), (holder, value) in before.items():
        if not _same(vars(holder).get(name), value):
            vars(holder)[name] = value


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and a == b)


def state_of(model: Any) -> int:
    """A number that is the same exactly while all plain attributes are."""
    known = model.__dict__.get("_keras_spmd_state")
    if known is not None and known[0] == _changes:
        return known[1]
    trained = tuple(v.trainable for v in model.variables)
    values = tuple((key, value) for key, (_, value) in snapshot(model).items())
    number = _numbers.setdefault((values, trained), len(_numbers))
    model.__dict__["_keras_spmd_state"] = (_changes, number)
    return number
