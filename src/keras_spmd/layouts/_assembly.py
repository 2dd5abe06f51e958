"""From the axes of variables to an ordinary `LayoutMap`, with the user's own entries on top."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
from keras.distribution import DeviceMesh, LayoutMap

from keras_spmd.layouts._pairs import Axes

Overrides = Mapping[str, Sequence[str | None]]
Layout = tuple[str | None, ...]
Layouts = dict[str, Layout]


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
    model: keras.Model,
    axes: Axes,
    *,
    outputs: Layouts | None = None,
    slots: Layouts | None = None,
    overrides: Overrides | None = None,
) -> LayoutMap:
    """A key for each variable's path, and for other things, less what the overrides say.

    Args:
        axes: Of each of the model's weights.
        outputs: Layouts of outputs, by paths.
        slots: Layouts of the optimizer's state, by regular expressions.
        overrides: Layouts by regular expressions, which win.
    """
    overrides = dict(overrides or {})
    entries: Layouts = {}
    clashes = set()
    for variable, chosen in zip(model.weights, axes, strict=True):
        path, layout = variable.path, tuple(chosen)
        if entries.setdefault(path, layout) != layout:
            clashes.add(path)
    entries |= outputs or {}
    shorter = _paths_when_loaded(model, entries)
    keys: Layouts = {}
    for path, layout in entries.items():
        if path not in clashes and not _is_overridden(path, overrides):
            paths = [path, shorter[path]] if path in shorter else [path]
            keys["|".join(map(re.escape, paths))] = layout
    excluded = "".join(f"(?!(?:{pattern})$)" for pattern in overrides)
    keys |= {excluded + pattern: layout for pattern, layout in (slots or {}).items()}
    layout_map = LayoutMap(mesh)
    for key, names in {**keys, **overrides}.items():
        _check(key, names, mesh)
        layout_map[key] = tuple(names)
    return layout_map


def _paths_when_loaded(model: keras.Model, layouts: Layouts) -> dict[str, str]:
    """The paths that Keras gives when it loads or clones the model, where they are others.

    It leaves the names of `Sequential`s out. A path that things with several layouts have then is
    left out here, and one that several with the same layout have is there once.
    """
    names = {layer.name for layer in model._flatten_layers() if isinstance(layer, keras.Sequential)}
    meant: dict[str, list[str]] = {}
    for path in layouts:
        *parts, last = path.split("/")
        short = "/".join([*(part for part in parts if part not in names), last])
        meant.setdefault(short, []).append(path)
    return {
        paths[0]: short
        for short, paths in meant.items()
        if short not in layouts and len({layouts[path] for path in paths}) == 1
    }


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


def slot_layouts(model: keras.Model, axes: Axes) -> Layouts:
    """Layouts for the optimizer state of a model's trained variables, where it is sharded."""
    trained = {id(v) for v in model.trainable_variables}
    chosen: dict[str, set[Layout]] = {}
    layouts: Layouts = {}
    for variable, names in zip(model.weights, axes, strict=True):
        if id(variable) in trained:
            layouts[variable.path] = tuple(names)
            chosen.setdefault(_flat(variable.path), set()).add(tuple(names))
    shorter = {_flat(a): _flat(b) for a, b in _paths_when_loaded(model, layouts).items()}
    others = {*chosen, *shorter.values()}
    # Paths that differ in slashes only have state of one name, so it must have one layout.
    return {
        _slot_key([flat, shorter[flat]] if flat in shorter else [flat], others): layout
        for flat, found in chosen.items()
        if len(found) == 1 and any(layout := next(iter(found)))
    }


def _flat(path: str) -> str:
    """A variable's path in the names of its optimizer state."""
    return path.replace("/", "_")


def _slot_key(flats: Sequence[str], others: Iterable[str]) -> str:
    """The regular expression for the optimizer state of one variable, and no other.

    An optimizer calls it by its own name, the variable's path with underscores, and what it is.
    """
    starts = []
    for start in (f"{flat}_" for flat in flats):
        longer = [f"{other}_" for other in sorted(others)]
        rest = [re.escape(other[len(start) :]) for other in longer if other.startswith(start)]
        rest = [text for text in rest if text]
        starts.append(re.escape(start) + (f"(?!{'|'.join(rest)})" if rest else ""))
    return f"[^/]+/({'|'.join(starts)})[^/]+"
