"""From the axes of variables to an ordinary `LayoutMap`, with the user's own entries on top."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from keras.distribution import DeviceMesh, LayoutMap

from keras_spmd.layouts._pairs import Axes

Overrides = Mapping[str, Sequence[str | None]]
Layouts = dict[str, tuple[str | None, ...]]


def size_of_axis(mesh: DeviceMesh, axis: str, argument: str = "axis") -> int:
    """How many devices lie along an axis of the mesh."""
    if axis not in mesh.axis_names:
        raise ValueError(
            f"{argument}={axis!r} is no axis of the mesh, which has {tuple(mesh.axis_names)} of "
            f"the sizes {tuple(mesh.shape)}. Pass {argument}= with one of these names."
        )
    return mesh.shape[mesh.axis_names.index(axis)]


def layout_map_of(
    mesh: DeviceMesh,
    variables: Sequence[Any],
    axes: Axes,
    *,
    outputs: Layouts | None = None,
    slots: Layouts | None = None,
    overrides: Overrides | None = None,
) -> LayoutMap:
    """A key for each variable's path, and for other things, less what the overrides say.

    Args:
        outputs: Layouts of outputs, by paths.
        slots: Layouts of the optimizer's state, by regular expressions.
        overrides: Layouts by regular expressions, which win.
    """
    overrides = dict(overrides or {})
    entries: Layouts = {}
    clashes = set()
    for variable, chosen in zip(variables, axes, strict=True):
        path, layout = variable.path, tuple(chosen)
        if entries.setdefault(path, layout) != layout:
            clashes.add(path)
    entries |= outputs or {}
    free = {path: layout for path, layout in entries.items() if not _is_overridden(path, overrides)}
    keys = {re.escape(path): layout for path, layout in free.items() if path not in clashes}
    excluded = "".join(f"(?!(?:{pattern})$)" for pattern in overrides)
    keys |= {excluded + pattern: layout for pattern, layout in (slots or {}).items()}
    layout_map = LayoutMap(mesh)
    for key, names in {**keys, **overrides}.items():
        _check(key, names, mesh)
        layout_map[key] = tuple(names)
    return layout_map


def _is_overridden(path: str, overrides: Overrides) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in overrides)


def _check(key: str, layout: Any, mesh: DeviceMesh) -> None:
    if isinstance(layout, str) or not isinstance(layout, Sequence):
        raise TypeError(
            f"The layout for {key!r} should be a tuple with an axis or None for each dim, such as "
            f"(None, {mesh.axis_names[-1]!r}), but it is {layout!r}."
        )
    for axis in layout:
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(
                f"The layout {tuple(layout)} for {key!r} names the axis {axis!r}, but the mesh has "
                f"{tuple(mesh.axis_names)}."
            )


def slot_layouts(trained: Sequence[Any], variables: Sequence[Any], axes: Axes) -> Layouts:
    """Layouts for the optimizer state of the trained ones among the variables, where sharded."""
    known = {id(v) for v in trained}
    chosen: dict[str, set[tuple[str | None, ...]]] = {}
    for variable, names in zip(variables, axes, strict=True):
        if id(variable) in known:
            chosen.setdefault(variable.path.replace("/", "_"), set()).add(tuple(names))
    # Paths that differ in slashes only have state of one name, so it must have one layout.
    return {
        _slot_key(flat, list(chosen)): layout
        for flat, layouts in chosen.items()
        if len(layouts) == 1 and any(layout := next(iter(layouts)))
    }


def _slot_key(flat: str, others: Sequence[str]) -> str:
    """The regular expression for the optimizer state of one variable, and no other.

    An optimizer calls it by its own name, the variable's path with underscores, and what it is.
    """
    start = f"{flat}_"
    longer = [re.escape(f"{other}_".removeprefix(start)) for other in others]
    longer = [rest for other, rest in zip(others, longer, strict=True) if other.startswith(start)]
    return f"[^/]+/{re.escape(start)}" + (f"(?!{'|'.join(longer)})" if longer else "") + "[^/]+"
