"""Python-side state of a model: numbers and flags that a graph would freeze.

An attribute that a step itself changes can't be captured. One that is changed between steps, by a
callback say, belongs to the key of the graph: with another value, the step is captured again. This
goes for numbers, flags and strings, for lists and dicts of them, and for arrays and tensors, of
which another one counts as another value.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

_PLAIN = (int, float, bool, str, type(None))
_CONTAINERS = (list, tuple, dict)
_ARRAYS = (np.ndarray, np.generic, torch.Tensor)
# What Keras and torch note for themselves, and no step reads.
_IGNORED = frozenset(
    """_initial_epoch _lock _called stop_training stop_evaluating stop_predicting _losses _loss_ids
    _losses_override _build_shapes_dict _call_has_context_arg _compiled_trainable_state _buffers
    _parameters _modules train_function test_function predict_function
    _eval_epoch_iterator""".split()  # noqa: SIM905
)

_changes = 0
_numbers: dict[tuple, int] = {}


def _is_ignored(name: str) -> bool:
    return name in _IGNORED or name.startswith("_keras_spmd") or name.endswith(("_hooks", "_cache"))


def set_attribute_or(original: Callable) -> Callable:
    """`__setattr__` of layers, optimizers and metrics: counts changes of what a graph freezes."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        global _changes
        if isinstance(value, (*_PLAIN, *_CONTAINERS, *_ARRAYS)) and not _is_ignored(name):
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


class _Same:
    """Stands for one array or tensor: equal to itself only."""

    def __init__(self, value: Any) -> None:
        self.value = value  # kept, so that no other one can have its address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Opaque(Exception):
    """A value that is neither a number nor made of numbers."""


def _frozen(value: Any) -> Any:
    """A value that can be compared and hashed, and stays as it is."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    if isinstance(value, dict):
        return (dict, *((_frozen(key), _frozen(item)) for key, item in value.items()))
    if isinstance(value, np.generic):
        return (type(value), value.item())
    if isinstance(value, _ARRAYS):
        return _Same(value)
    raise _Opaque


def snapshot(model: Any) -> dict[tuple[int, str], tuple[Any, Any, Any]]:
    """Every attribute that a graph would freeze: its holder, its value, what it is frozen to."""
    found = {}
    for holder in _holders(model):
        for name, value in vars(holder).items():
            if _is_ignored(name) or not isinstance(value, (*_PLAIN, *_CONTAINERS, *_ARRAYS)):
                continue
            try:
                found[id(holder), name] = (holder, value, _frozen(value))
            except _Opaque:
                continue
    return found


def difference(before: dict, after: dict) -> list[str]:
    """What a step does to attributes, as text: '... it <text>'. A new one is no change yet."""
    changed = []
    for key, (holder, value, frozen) in after.items():
        label = getattr(holder, "path", None) or getattr(holder, "name", type(holder).__name__)
        if _is_of_the_trace(value):
            changed.append(
                f"stores a tensor in `{key[1]}` of '{label}', which is gone when a graph has run; "
                "return it, or assign it to a keras.Variable"
            )
        elif key in before and before[key][2] != frozen:
            changed.append(
                f"changes `{key[1]}` of '{label}' (from {before[key][1]!r} to {value!r}), which a "
                "graph would freeze; make it a keras.Variable"
            )
    return changed


def _is_of_the_trace(value: Any) -> bool:
    if isinstance(value, DTensor):
        value = value._local_tensor
    return isinstance(value, FakeTensor)


def restore(model: Any, before: dict) -> None:
    """Undo what a capture that failed has changed: an eager step will change it again."""
    for key, (holder, value, frozen) in snapshot(model).items():
        name = key[1]
        if key in before:
            if before[key][2] != frozen and not isinstance(value, (list, dict)):
                vars(holder)[name] = before[key][1]
        elif _is_of_the_trace(value):
            del vars(holder)[name]


def _is_still(value: Any, frozen: Any) -> bool:
    try:
        return _frozen(value) == frozen
    except _Opaque:
        return False


def state_of(model: Any) -> int:
    """A number that is the same exactly while all attributes that count are."""
    known = model.__dict__.get("_keras_spmd_state")
    if known is not None and known[0] == _changes and all(_is_still(*pair) for pair in known[1]):
        return known[2]
    trained = tuple(v.trainable for v in model.variables)
    found = snapshot(model)
    values = tuple((key, frozen) for key, (_, _, frozen) in found.items())
    number = _numbers.setdefault((values, trained), len(_numbers))
    # What can be changed without setting an attribute.
    watched = [(v, frozen) for _, v, frozen in found.values() if isinstance(v, (list, dict))]
    model.__dict__["_keras_spmd_state"] = (_changes, watched, number)
    return number
