"""Pictures of shards: which part of a tensor lies on which devices."""

import itertools
import math
from collections.abc import Sequence
from html import escape

# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_MOST = 16
_MOST_ACROSS, _MOST_DOWN = 64, 32
_WIDTH, _HEIGHT = 84, 30


def copies_of(axes: Sequence[str | None], mesh: dict[str, int]) -> int:
    """How many devices hold each part."""
    return math.prod(count for name, count in mesh.items() if name not in axes)


def cuts_of(axes: Sequence[str | None], mesh: dict[str, int]) -> tuple[int, int]:
    """Into how many rows and columns a picture is cut; dims beyond two are rows."""
    counts = [mesh.get(axis or "", 1) for axis in axes] or [1]
    return math.prod(counts[:-1]), counts[-1]


def look_of(row: int, column: int, rows: int, columns: int) -> tuple[str, float]:
    """The colour and the opacity of a part.

    Few parts have colours of their own. Of many, those of one row have a colour, and pale along it;
    or those of one column, if there are fewer columns.
    """
    if rows * columns <= len(COLOURS):
        few, many, count = row * columns + column, 0, 1
    elif min(rows, columns) == 1:
        few, many = row + column, (row + column) // len(COLOURS)
        count = math.ceil(rows * columns / len(COLOURS))
    else:
        few, many, count = (row, column, columns) if rows <= columns else (column, row, rows)
    return COLOURS[few % len(COLOURS)], 1 - 0.7 * many / (count - 1) if count > 1 else 1.0


class Pictures:
    """Pictures of tensors as parts of one page, each of which is drawn once.

    With more than sixteen cuts in a direction, sixteen are drawn.
    """

    def __init__(self, mesh: dict[str, int], prefix: str = "parts") -> None:
        self.mesh, self.prefix = mesh, prefix
        self._known: dict[tuple[int, int], str] = {}

    def of(self, axes: Sequence[str | None]) -> str:
        """A reference to a rectangle that is cut as the mesh cuts the tensor."""
        cuts = cuts_of(axes, self.mesh)
        name = self._known.setdefault(cuts, f"{self.prefix}-{len(self._known)}")
        parts, copies = math.prod(cuts), copies_of(axes, self.mesh)
        label = f"{_count(parts, 'part')}, each on {_count(copies, 'device')}"
        return (
            f'<svg class="parts" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
            f'aria-label="{label}"><title>{label}</title><use href="#{name}"/></svg>'
        )

    def drawn(self) -> str:
        """What the references refer to."""
        symbols = "".join(
            f'<symbol id="{name}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{_parts(*cuts)}</symbol>'
            for cuts, name in self._known.items()
        )
        hidden = 'width="0" height="0" style="position:absolute" aria-hidden="true"'
        return f"<svg {hidden}>{symbols}</svg>"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _parts(rows: int, columns: int) -> str:
    """One path for each look."""
    down, across = min(rows, _MOST), min(columns, _MOST)
    width, height = _WIDTH / across, _HEIGHT / down
    gap_x, gap_y = min(1.0, width / 5), min(1.0, height / 5)
    paths: dict[tuple[str, float], list[str]] = {}
    for r, c in itertools.product(range(down), range(across)):
        place = f"M{c * width:.4g} {r * height:.4g}"
        shape = f"h{width - gap_x:.3g}v{height - gap_y:.3g}h-{width - gap_x:.3g}z"
        paths.setdefault(look_of(r, c, down, across), []).append(place + shape)
    return "".join(
        f'<path fill="{colour}" fill-opacity="{opacity:.2f}" d="{"".join(path)}"/>'
        for (colour, opacity), path in paths.items()
    )


def mesh_svg(mesh: dict[str, int], devices_per_host: int) -> str:
    """The devices as a grid, which is wider than high: the last axis runs along one side of it."""
    names, counts = list(mesh), list(mesh.values())
    outer, inner = math.prod(counts[:-1]), counts[-1]
    is_across = outer <= inner
    rows, columns = (outer, inner) if is_across else (inner, outer)
    down, across = min(rows, _MOST_DOWN), min(columns, _MOST_ACROSS)
    cell = 26 if across <= 16 else max(11, 640 // across)
    first, last = " x ".join(f"{n} {mesh[n]}" for n in names[:-1]), f"{names[-1]} {inner}"
    to_right, to_bottom = (last, first) if is_across else (first, last)
    top = 22
    parts = [f'<text x="0" y="12">{escape(to_right)} →</text>']
    if to_bottom:
        parts.append(
            f'<text transform="translate(10 {top}) rotate(90)">{escape(to_bottom)} →</text>'
        )
    left = 22 if to_bottom else 0
    for r, c in itertools.product(range(down), range(across)):
        number = r * columns + c if is_across else c * rows + r
        parts.append(
            _device(number, mesh, (left + c * cell, top + r * cell), cell, devices_per_host)
        )
    width = max(left + across * cell, 120)
    height = max(top + down * cell, top + (7 * len(to_bottom) + 20 if to_bottom else 0))
    label = f"{math.prod(counts)} devices"
    return (
        f'<svg class="mesh" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )


def drawn_devices(mesh: dict[str, int]) -> int:
    counts = list(mesh.values())
    sides = sorted([math.prod(counts[:-1]), counts[-1]])
    return min(sides[0], _MOST_DOWN) * min(sides[1], _MOST_ACROSS)


def _device(
    number: int, mesh: dict[str, int], place: tuple[int, int], cell: int, per_host: int
) -> str:
    at: list[int] = []
    rest = number
    for count in reversed(mesh.values()):
        at.insert(0, rest % count)
        rest //= count
    names = ", ".join(f"{name} {k}" for name, k in zip(mesh, at, strict=True))
    (x, y), side = place, cell - 1
    text = ""
    if cell >= 20:
        text = f'<text class="number" x="{x + side / 2}" y="{y + side / 2 + 4}">{number}</text>'
    return (
        f'<g data-number="{number}" data-at="{at}"><title>device {number} ({escape(names)}), '
        f'host {number // per_host}</title><rect x="{x}" y="{y}" width="{side}" height="{side}" '
        f'rx="{3 if cell >= 20 else 1}" stroke-width="0"/>{text}</g>'
    )
