"""`keras_spmd.show`: the variables of a model, with their shards drawn in colour."""

import math
from dataclasses import dataclass
from html import escape
from typing import Any

import torch.distributed as dist
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keras_spmd import _layouts
from keras_spmd.graph._capture import local_of
from keras_spmd.plan._pictures import COLOURS, Pictures, copies_of, cuts_of, look_of
from keras_spmd.plan._sizes import size
from keras_spmd.plan._terminal import console, text_of, titled

_MOST_ROWS, _MOST_COLUMNS = 4, 8
_WIDTH, _NARROW = 120, 90
_COLUMNS = ("variable", "shape", "layout", "parts", "on each rank", "copies")
_NUMBERS = ("on each rank", "copies")
_CELL = "padding:.25rem .75rem;vertical-align:middle;text-align:"


@dataclass(frozen=True)
class Row:
    """A variable and how it lies."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    nbytes: int
    local_nbytes: int

    @property
    def layout(self) -> str:
        return ", ".join(axis or "-" for axis in self.axes) if any(self.axes) else "whole"


class Shards:
    """What `keras_spmd.show` returns: notebooks draw it."""

    def __init__(self, name: str, mesh: dict[str, int], rows: list[Row]) -> None:
        self.name, self.mesh, self.rows = name, mesh, rows

    def __repr__(self) -> str:
        return f"<shards of '{self.name}': {len(self.rows)} variables on {self._mesh}>"

    def __str__(self) -> str:
        return text_of(self.view(), _WIDTH)

    @property
    def title(self) -> str:
        local, whole = (sum(getattr(r, n) for r in self.rows) for n in ("local_nbytes", "nbytes"))
        return f"'{self.name}' on {self._mesh}: {size(local)} on each rank, {size(whole)} in all"

    @property
    def _mesh(self) -> str:
        return ", ".join(f"{name}={count}" for name, count in self.mesh.items()) or "one device"

    def _repr_html_(self) -> str:
        # Pictures of several outputs are on one page.
        pictures = Pictures(self.mesh, f"shards-{id(self)}")
        body = "".join(
            "<tr>"
            + _cell(f"<code>{escape(r.path)}</code>")
            + _cell(escape(str(r.shape)))
            + _cell(escape(r.layout))
            + _cell(pictures.of(r.axes))
            + _cell(size(r.local_nbytes), "right")
            + _cell(f"{copies_of(r.axes, self.mesh):,}", "right")
            + "</tr>"
            for r in self.rows
        )
        head = "".join(
            f'<th style="{_CELL}{"right" if name in _NUMBERS else "left"}">{name}</th>'
            for name in _COLUMNS
        )
        return (
            f"<p>{escape(self.title)}</p>{pictures.drawn()}"
            '<div style="max-height:40rem;overflow:auto"><table style="border-collapse:collapse">'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def view(self, width: int = _WIDTH) -> Group:
        """For a terminal of that width. In a narrow one shape and layout are below the path."""
        is_narrow = width < _NARROW
        columns = [c for c in _COLUMNS if not is_narrow or c not in ("shape", "layout")]
        table = Table(box=None, pad_edge=False)
        for name in columns:
            justify: Any = "right" if name in _NUMBERS else "left"
            table.add_column(name, overflow="fold", justify=justify, no_wrap=name != "variable")
        for r in self.rows:
            texts = [r.path, str(r.shape), r.layout]
            if is_narrow:
                texts = [f"{r.path}\n{r.shape} {r.layout}"]
            copies = f"{copies_of(r.axes, self.mesh):,}"
            parts = self._parts(r, 4 if is_narrow else _MOST_COLUMNS)
            table.add_row(*map(Text, texts), parts, size(r.local_nbytes), copies)
        return titled(self.title, table)

    def _parts(self, row: Row, most_columns: int) -> Text:
        """The parts with their numbers, a line for each row of them, as in a picture."""
        rows, columns = cuts_of(row.axes, self.mesh)
        down, across = min(rows, _MOST_ROWS), min(columns, most_columns)
        width = len(str((down - 1) * columns + across - 1))
        text = Text()
        for r in range(down):
            for c in range(across):
                colour, _ = look_of(r, c, rows, columns)
                ink = "white" if colour == COLOURS[0] else "black"
                text.append(f" {r * columns + c:>{width}} ", style=f"{ink} on {colour}")
            if across < columns:
                text.append(" …")
            if r < down - 1:
                text.append("\n")
        if (down, across) != (rows, columns):
            text.append(f"\n… {rows * columns:,} parts")
        return text


def _cell(html: str, align: str = "left") -> str:
    return f'<td style="{_CELL}{align}">{html}</td>'


def show(model: Any) -> Shards:
    rows = [_row(v) for v in model.variables if v._value is not None]
    shards = Shards(model.name, _mesh_of(model), rows)
    out = console()
    # A notebook draws what is returned.
    if not out.is_jupyter and (not dist.is_initialized() or dist.get_rank() == 0):
        out.print(shards.view(out.width))
    return shards


def _row(v: Any) -> Row:
    local = local_of(v._value)
    shape = tuple(v.shape)
    axes = list(getattr(v._layout, "axes", None) or ())
    axes += [None] * (len(shape) - len(axes))
    # A dim that is too small to be divided is whole, whatever its layout says.
    held = [axis if local.shape[d] != shape[d] else None for d, axis in enumerate(axes)]
    nbytes = math.prod(shape) * local.element_size()
    return Row(v.path, shape, tuple(held), nbytes, local.nbytes)


def _mesh_of(model: Any) -> dict[str, int]:
    for v in model.variables:
        mesh = getattr(v._layout, "device_mesh", None)
        if mesh is not None and not _layouts.is_mesh_of_one(mesh):
            return dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return {}
