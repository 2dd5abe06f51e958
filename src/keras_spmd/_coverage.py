"""Which keys of a layout map matched something, and which large variables matched nothing.

Keras looks a layout up with a regular-expression match against every key, for each variable and
again at every call of every layer. Here a path is matched once, and what matched is remembered.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_spmd import _layouts, _settings
from keras_spmd._notices import warn_once


class _Record:
    """What a layout map has been asked for so far."""

    def __init__(self) -> None:
        self.keys: tuple[str, ...] = ()
        self.key_of_path: dict[str, str | None] = {}
        self.matched: set[str] = set()
        # path -> shape, bytes, and whether somebody chose its layout
        self.variables: dict[str, tuple[tuple[int, ...], int, bool]] = {}


def _record_of(layout_map: Any) -> _Record:
    # Kept on the map itself: a LayoutMap compares like a mapping, so it can't be hashed.
    if not hasattr(layout_map, "_keras_spmd_record"):
        layout_map._keras_spmd_record = _Record()
    return layout_map._keras_spmd_record


def look_up(layout_map: Any, path: str) -> Any:
    """`LayoutMap.__getitem__`, with the matches remembered."""
    layouts = layout_map._layout_map
    record = _record_of(layout_map)
    keys = tuple(layouts)
    if record.keys != keys:
        record.keys = keys
        record.key_of_path.clear()
    if path not in record.key_of_path:
        record.key_of_path[path] = _matching_key(keys, path)
    key = record.key_of_path[path]
    if key is None:
        return None
    record.matched.add(key)
    return layouts[key]


def _matching_key(keys: tuple[str, ...], path: str) -> str | None:
    if path in keys:
        return path
    matching = [key for key in keys if re.fullmatch(key, path)]
    if len(matching) > 1:
        raise ValueError(
            f"Path '{path}' matches multiple layout specification keys: {matching}. Please make "
            "sure each tensor/variable path only matches at most one layout specification key in "
            "the LayoutMap: make the patterns narrower, or write the path out as its own key."
        )
    return matching[0] if matching else None


def slot_layout(distribution: Any, path: str) -> Any:
    """The layout that a key names for an optimizer's state; None if no key means such state.

    A key that a weight's path matches too, such as '.*', is meant for weights.
    """
    layout_map = getattr(distribution, "_layout_map", None)
    if layout_map is None:
        return None
    record = _record_of(layout_map)
    keys = tuple(
        key
        for key in layout_map._layout_map
        if key == path or not any(re.fullmatch(key, weight) for weight in record.variables)
    )
    key = _matching_key(keys, path)
    if key is None:
        return None
    record.matched.add(key)
    return layout_map._layout_map[key]


def note_variable(distribution: Any, variable: Any, *, layout_given: bool) -> None:
    """Remember a variable's size, and whether a key or a `layout=` chose its layout."""
    layout_map = getattr(distribution, "_layout_map", None)
    if layout_map is None:
        return
    record = _record_of(layout_map)
    size = int(np.prod(variable.shape, dtype=np.int64)) * _itemsize(variable)
    named = layout_given or record.key_of_path.get(variable.path) is not None
    record.variables[variable.path] = (tuple(variable.shape), size, named)


def _itemsize(variable: Any) -> int:
    bits = re.search(r"\d+", variable._dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


# What Keras's optimizers call the state that they keep for a weight.
_SLOTS = """momentum velocity velocity_hat accumulator accumulated_grad accumulated_delta_var linear
    norm average average_gradient gradient_accumulator var""".split()  # noqa: SIM905


def _is_for_slots(key: str, optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether a key is for state that the optimizer may make, which it does after this."""
    paths = (f"{optimizer.name}/{v.path.replace('/', '_')}" for v in variables)
    return any(re.fullmatch(key, f"{path}_{slot}") for path in paths for slot in _SLOTS)


def warn_of_gaps(distribution: Any, optimizer: Any, variables: Sequence[Any]) -> None:
    """Called when training starts: keys without a variable, large variables without a key."""
    layout_map = getattr(distribution, "_layout_map", None)
    if layout_map is None:
        return
    record = _record_of(layout_map)
    for key in layout_map:
        if key not in record.matched and not _is_for_slots(key, optimizer, variables):
            paths = ", ".join(f"'{p}'" for p in list(record.variables)[:3])
            warn_once(
                ("unmatched key", id(layout_map), key),
                f"The key '{key}' of the layout map matched no variable and no layer output, so "
                "its layout is not used. Keys are regular expressions that must match a whole "
                f"path; paths of this model are {paths or '(none yet)'} ...",
            )
    if _layouts.is_mesh_of_one(distribution.device_mesh):
        return
    total = sum(size for _, size, _ in record.variables.values())
    for path, (shape, size, named) in record.variables.items():
        if not named and size > _settings.large_share() * total:
            warn_once(
                ("large variable", id(layout_map), path),
                f"The variable '{path}' of shape {shape} is {size / total:.0%} of the model and "
                "matches no key of the layout map, so every device holds all of it. Add a key, "
                f"e.g. layout_map['{path}'] = (...), or () to say that this is meant. "
                "KERAS_SPMD_LARGE_SHARE sets the share from which this is said.",
            )
