"""A plan as one page: figures, pictures, and tables that can be sorted and filtered."""

import json
import math
from collections.abc import Sequence
from html import escape

from keras_spmd.plan._page import page
from keras_spmd.plan._pictures import (
    COLOURS,
    Pictures,
    copies_of,
    drawn_devices,
    mesh_svg,
)
from keras_spmd.plan._report import Plan, Variable
from keras_spmd.plan._sizes import duration, operations, size
from keras_spmd.plan._timeline import timeline

_LAYERS_SHOWN = 3


def page_of(plan: Plan) -> str:
    sections = [
        _section("Memory of a device", _memory(plan)),
        _section("Time of a step", _times(plan) + timeline(plan)),
        _section("Communication", _transfers(plan)),
        _section("Variables, and where they lie", _variables(plan)),
    ]
    body = _header(plan) + _tiles(plan) + _warnings(plan) + "\n".join(sections)
    return page(f"{plan.model} on {_mesh(plan)} {plan.device.name}", body)


def _mesh(plan: Plan) -> str:
    return " x ".join(f"{name} {count}" for name, count in plan.mesh.items())


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _header(plan: Plan) -> str:
    devices = math.prod(plan.mesh.values())
    return (
        f"<header><div><h1>{escape(plan.model)}</h1><p>A training step on "
        f"{escape(_mesh(plan))}, {devices:,} {escape(plan.device.name)}, for a batch of "
        f"{escape(', '.join(plan.batch))}. {_repeats(plan)}</p></div>"
        '<button type="button" id="theme" title="change the theme">Dark theme</button></header>\n'
    )


def _repeats(plan: Plan) -> str:
    return " ".join(
        f"{count} blocks are like <code>{escape(path)}</code>: three were captured, and the others "
        "add what the third one did."
        for path, count in plan.repeats.items()
    )


def _tiles(plan: Plan) -> str:
    total = sum(v.nbytes for v in plan.variables)
    count = sum(math.prod(v.shape) for v in plan.variables)
    share = plan.memory.peak / plan.memory_limit
    verdict = ("good", "fits") if plan.fits else ("bad", "does not fit")
    waiting = plan.exposed_seconds / plan.seconds if plan.seconds else 0.0
    transfers = sum(t.count for t in plan.transfers)
    tiles = [
        (
            "Memory of a device",
            size(plan.memory.peak),
            f'<span class="{verdict[0]}">{verdict[1]}</span>: {_percent(share)} of '
            f"{size(plan.memory_limit)}",
        ),
        (
            "Time of a step",
            duration(plan.seconds),
            f"estimated; {_percent(plan.mfu)} of the device's operations",
        ),
        (
            "Communication of a step",
            size(plan.transferred_bytes),
            f"{transfers:,} collectives; {_percent(waiting)} of the time is waiting for them",
        ),
        (
            "Weights",
            _number(count),
            f"{size(total)} in all, {size(plan.memory.parameters)} on a device",
        ),
    ]
    content = "".join(
        f'<div class="tile"><h2>{name}</h2><strong>{figure}</strong><p>{more}</p></div>'
        for name, figure, more in tiles
    )
    return f'<div class="tiles">{content}</div>\n'


def _percent(share: float) -> str:
    return "&lt;1%" if 0 < share < 0.01 else f"{share:.0%}"


def _number(count: float) -> str:
    for unit in ("", " thousand", " million", " billion"):
        if count < 1000:
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:,.1f} trillion"


def _warnings(plan: Plan) -> str:
    if not plan.warnings:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in plan.warnings)
    return f'<ul class="warnings">{items}</ul>\n'


def _memory(plan: Plan) -> str:
    memory, limit = plan.memory, plan.memory_limit
    parts = [
        ("parameters", memory.parameters, COLOURS[0]),
        ("gradients", memory.gradients, COLOURS[2]),
        ("optimizer state", memory.optimizer_state, COLOURS[1]),
        ("activations", memory.activations, COLOURS[3]),
    ]
    whole = max(memory.peak, limit)
    bars = "".join(
        f'<i style="background:{colour};width:{nbytes / whole:.4%}" '
        f'title="{name}: {size(nbytes)}"></i>'
        for name, nbytes, colour in parts
    )
    at = limit / whole
    label = f"right:{1 - at:.4%}" if at > 0.5 else f"left:{at:.4%}"
    largest = max(1, *(nbytes for _, nbytes, _ in parts))
    rows = "".join(
        f'<tr><td><span class="swatch" style="background:{colour}"></span>{name}</td>'
        f"<td>{size(nbytes)}</td><td>{_percent(nbytes / max(1, memory.peak))}</td>"
        f'<td><i style="background:{colour};width:{nbytes / largest:.2%}"></i></td></tr>'
        for name, nbytes, colour in parts
    )
    reserved = (
        f" {size(plan.device.reserved)} more of it are kept for libraries."
        if plan.device.reserved
        else ""
    )
    return (
        f"<p>{size(memory.peak)} at the peak ({escape(memory.where)}). "
        f"{escape(plan.device.name)} has {size(limit)} for a program.{reserved}</p>"
        f'<div class="bar memory" role="img" aria-label="{size(memory.peak)} of {size(limit)}">'
        f'<div>{bars}</div><b class="limit" style="left:{at:.4%}"></b>'
        f'<span style="{label}">limit {size(limit)}</span></div>'
        f'<table class="parts-of">{rows}</table>'
    )


def _times(plan: Plan) -> str:
    return (
        f"<p>A step takes about {duration(plan.seconds)}: {duration(plan.compute_seconds)} of "
        f"compute for {operations(plan.flops)}, and {duration(plan.exposed_seconds)} of waiting "
        f"for collectives, which take {duration(plan.network_seconds)} in all and otherwise run "
        "beside it.</p>"
    )


class _Cell:
    """What a cell shows, what it is sorted by if not by that, and its class."""

    def __init__(self, html: str, key: object = None, kind: str = "", name: str = "") -> None:
        self.html, self.key, self.kind, self.name = html, key, kind, name

    def __str__(self) -> str:
        key = "" if self.key is None else f' data-key="{escape(str(self.key))}"'
        kind = f' class="{self.kind}"' if self.kind else ""
        name = f' data-name="{self.name}"' if self.name else ""
        return f"<td{kind}{key}{name}>{self.html}</td>"


def _table(name: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[_Cell]]]) -> str:
    """A table with a field to filter it. A column with a # in front of its name is of numbers."""
    head = "".join(
        f"<th{' class=n' if column[0] == '#' else ''}>"
        f'<button type="button">{column.lstrip("#")}</button></th>'
        for column in columns
    )
    body = "\n".join(
        f"<tr{attributes}>{''.join(map(str, cells))}</tr>" for attributes, cells in rows
    )
    return (
        f'<div class="listing {name}"><div class="tools"><input type="search" class="filter" '
        f'placeholder="filter by any words" aria-label="filter {name}"/>'
        f'<span><span class="told" aria-live="polite">{len(rows)}</span> {name}</span></div>'
        f'<div class="table"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div></div>"
    )


def _transfers(plan: Plan) -> str:
    if not plan.transfers:
        return "<p>No device needs anything from another.</p>"
    rows = [
        (
            "",
            [
                _Cell(t.kind, kind="path"),
                _Cell(size(t.nbytes), t.nbytes, "n", "bytes"),
                _Cell(f"{t.count:,}", t.count, "n", "times"),
                _Cell(size(t.nbytes * t.count), t.nbytes * t.count, "n", "in all"),
                _Cell(escape(t.axis)),
                _Cell(t.of),
                _Cell(t.phase),
                _Cell(_layers(t.layers), kind="layers"),
            ],
        )
        for t in sorted(plan.transfers, key=lambda t: -t.nbytes * t.count)
    ]
    columns = ("kind", "#bytes", "#times", "#in all", "axis", "of", "phase", "layers")
    return _table("collectives", columns, rows)


def _layers(layers: Sequence[str]) -> str:
    first = ", ".join(escape(layer) for layer in layers[:_LAYERS_SHOWN])
    rest = ", ".join(escape(layer) for layer in layers[_LAYERS_SHOWN:])
    if not rest:
        return first
    more = len(layers) - _LAYERS_SHOWN
    return f"<details><summary>{first} and {more} more</summary>{rest}</details>"


def _variables(plan: Plan) -> str:
    pictures = Pictures(plan.mesh)
    first = max(plan.variables, key=_interest, default=None)
    rows = [
        (
            _attributes(v, plan, is_first=v is first),
            [
                _Cell(escape(v.path), kind="path"),
                _Cell(escape(str(v.shape)), math.prod(v.shape), "n"),
                _Cell(v.dtype),
                _Cell(escape(", ".join(axis or "-" for axis in v.axes))),
                _Cell(pictures.of(v.divided), math.prod(v.shape) // max(1, _held(v)), "n"),
                _Cell(size(v.local_nbytes), v.local_nbytes, "n", "on a device"),
                _Cell(f"{_copies(v, plan):,}", _copies(v, plan), "n", "copies"),
            ],
        )
        for v in plan.variables
    ]
    columns = ("path", "#shape", "dtype", "layout", "#parts", "#on a device", "#copies")
    table = _table("variables", columns, rows)
    return _where(plan) + table + pictures.drawn()


def _held(v: Variable) -> int:
    return math.prod(v.local_shape)


def _copies(v: Variable, plan: Plan) -> int:
    return copies_of(v.divided, plan.mesh)


def _interest(v: Variable) -> tuple[int, int]:
    """The one to show first is divided over most axes, and large."""
    return sum(axis is not None for axis in v.divided), v.nbytes


def _attributes(v: Variable, plan: Plan, *, is_first: bool) -> str:
    names = list(plan.mesh)
    axes = [-1 if axis is None else names.index(axis) for axis in v.divided]
    copies, parts = _copies(v, plan), math.prod(plan.mesh.values()) // _copies(v, plan)
    on = "one device" if copies == 1 else f"{copies:,} devices"
    how = (
        f"{parts:,} parts of {v.local_shape}, {size(v.local_nbytes)} each, each on {on}"
        if parts > 1
        else f"whole on {on}"
    )
    about = f"{v.shape} {v.dtype}, {size(v.nbytes)}: {how}"
    first = " data-first" if is_first else ""
    return f' data-shape="{list(v.shape)}" data-axes="{axes}" data-about="{escape(about)}"{first}'


def _where(plan: Plan) -> str:
    colours = json.dumps(COLOURS)
    devices, drawn = math.prod(plan.mesh.values()), drawn_devices(plan.mesh)
    more = f"; {devices - drawn:,} more are not drawn" if drawn < devices else ""
    return (
        '<p class="soft">Choose a variable in the table. What has one colour is the same part, in '
        "the tensor and on the devices.</p>"
        f'<div class="where" data-mesh="{list(plan.mesh.values())}" '
        f"data-colours='{colours}'><p><code></code> <span class=\"soft\"></span></p>"
        '<figure><figcaption>the tensor<span class="drawn"></span></figcaption>'
        '<svg class="tensor" role="img" aria-label="parts of the tensor"></svg></figure>'
        f"<figure><figcaption>{devices:,} devices{more}</figcaption>"
        f"{mesh_svg(plan.mesh, plan.device.network.devices_per_host)}</figure>"
        '<output aria-live="polite"></output></div>'
    )
