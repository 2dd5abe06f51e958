"""The pictures: SVG whose colours are those of the page, light or dark."""

from collections.abc import Callable
from html import escape
from itertools import product

from builder.pages import SiteError

COLOURS = ("var(--one)", "var(--two)", "var(--three)", "var(--four)")


def picture(name: str, caption: str) -> str:
    """A figure with its caption."""
    if name not in PICTURES:
        raise SiteError(f"There is no picture '{name}'; there are {[*PICTURES]}.")
    width, height, parts = PICTURES[name]()
    label = escape(" ".join(caption.split()))
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg><figcaption>{label}</figcaption></figure>'
    )


def box(x: float, y: float, w: float, h: float, fill: str, text: str = "", size: int = 13) -> str:
    """A rectangle with text in its middle."""
    on = "on" if fill.startswith("var(--") and fill[6:-1] in ("one", "two", "three", "four") else ""
    return (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" '
        f'stroke="var(--line)"/>' + label(x + w / 2, y + h / 2 + size * 0.36, text, on, size)
    )


def label(x: float, y: float, text: str, kind: str = "", size: int = 13, at: str = "middle") -> str:
    if not text:
        return ""
    return (
        f'<text x="{x}" y="{y}" class="{kind}" font-size="{size}" text-anchor="{at}">'
        f"{escape(text)}</text>"
    )


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = "var(--soft)") -> str:
    """A line with a head; right, down, or left."""
    head = 6
    if x1 == x2:
        tip = f"M{x2 - head},{y2 - head} L{x2},{y2} L{x2 + head},{y2 - head}"
    else:
        back = -head if x2 > x1 else head
        tip = f"M{x2 + back},{y2 - head} L{x2},{y2} L{x2 + back},{y2 + head}"
    return f'<path d="M{x1},{y1} L{x2},{y2} {tip}" fill="none" stroke="{colour}" stroke-width="2"/>'


def mesh() -> tuple[int, int, list[str]]:
    """Eight devices as two rows of four."""
    parts = [label(120, 20, 'axis "model", size 4', "soft", at="start"), arrow(270, 16, 420, 16)]
    parts += [
        label(8, 66, 'axis "batch",', "soft", at="start"),
        label(8, 84, "size 2", "soft", at="start"),
    ]
    parts += [arrow(100, 50, 100, 150)]
    for r, c in product(range(2), range(4)):
        parts.append(box(120 + c * 78, 36 + r * 62, 70, 52, COLOURS[c], f"device {r * 4 + c}", 12))
    return 440, 164, parts


def layouts() -> tuple[int, int, list[str]]:
    """One kernel, cut in four ways by a mesh of 2 x 2."""
    cases = [
        ("()", 1, 1, "whole on all four"),
        ('(None, "model")', 1, 2, "columns; 2 copies"),
        ('("model", None)', 2, 1, "rows; 2 copies"),
        ('("batch", "model")', 2, 2, "quarters; 1 copy"),
    ]
    parts = []
    for i, (axes, rows, columns, what) in enumerate(cases):
        x, w, h = 10 + i * 168, 144, 88
        parts.append(label(x + w / 2, 18, axes, "", 13))
        for r, c in product(range(rows), range(columns)):
            number = r * columns + c
            fill = "var(--raised)" if rows * columns == 1 else COLOURS[number]
            parts.append(
                box(x + c * w / columns, 30 + r * h / rows, w / columns - 2, h / rows - 2, fill)
            )
        parts.append(label(x + w / 2, 138, what, "soft", 12))
    return 680, 148, parts


def tensor_parallel() -> tuple[int, int, list[str]]:
    """Two dense layers on two devices, and the one sum between them."""
    parts = [
        label(52, 22, "input"), label(190, 22, 'up: (None, "model")'), label(330, 22, "hidden"),
        label(466, 22, 'down: ("model", None)'), label(640, 22, "output"),
    ]  # fmt: skip
    for d in range(2):
        y, colour = 40 + d * 76, COLOURS[d]
        parts += [
            box(16, y, 72, 52, "var(--raised)", "whole"), arrow(94, y + 26, 132, y + 26),
            box(138, y, 104, 52, colour, f"columns {d + 1}"), arrow(248, y + 26, 278, y + 26),
            box(284, y, 92, 52, colour, f"half {d + 1}"), arrow(382, y + 26, 408, y + 26),
            box(414, y, 104, 52, colour, f"rows {d + 1}"), arrow(524, y + 26, 552, y + 26),
            arrow(584, y + 26, 604, y + 26),
            box(610, y, 72, 52, "var(--raised)", "whole"),
            label(4, y + 70, f"device {d}", "soft", 11, "start"),
        ]  # fmt: skip
    parts.append(box(556, 36, 24, 136, "var(--four)"))
    parts.append(
        '<text class="on" font-size="13" text-anchor="middle" transform="translate(572 104) '
        'rotate(-90)">all-reduce</text>'
    )
    parts.append(label(568, 194, "the only exchange of the forward pass", "soft", 12))
    return 700, 204, parts


def fsdp() -> tuple[int, int, list[str]]:
    """A block's weights: shares, gathered, freed; gradients come back as shares."""
    parts = []
    steps = [
        ("shares", False), ("all-gather", True), ("forward", False), ("all-gather", True),
        ("backward", False), ("reduce-scatter", True), ("update of shares", False),
    ]  # fmt: skip
    x = 8.0
    for i, (text, is_collective) in enumerate(steps):
        w = 112 if len(text) > 10 else 92
        fill = "var(--four)" if is_collective else "var(--raised)"
        parts.append(box(x, 20, w, 46, fill, text, 12))
        if i + 1 < len(steps):
            parts.append(arrow(x + w + 3, 43, x + w + 15, 43))
        x += w + 18
    parts.append(label(8, 92, "weights: 1/N", "soft", 12, "start"))
    parts.append(label(236, 92, "one block is whole, then freed", "soft", 12, "start"))
    parts.append(label(578, 92, "gradients and state: 1/N", "soft", 12, "start"))
    return int(x), 104, parts


def batch() -> tuple[int, int, list[str]]:
    """A global batch of 8 rows on an axis of 2."""
    parts = [
        label(70, 18, "fit(batch_size=8)"),
        label(330, 18, "each device's rows"),
        label(548, 18, "results"),
    ]
    for row in range(8):
        parts.append(box(20, 28 + row * 19, 100, 16, COLOURS[row // 4], f"row {row}", 10))
    for d in range(2):
        y = 38 + d * 76
        parts += [
            arrow(128, y + 28, 260, y + 28),
            box(268, y, 124, 56, COLOURS[d], f"rows {4 * d} to {4 * d + 3}"),
        ]
        parts += [arrow(398, y + 28, 466, y + 28)]
    parts += [
        box(474, 52, 152, 96, "var(--raised)"),
        label(550, 92, "loss and metrics"),
        label(550, 112, "of all 8 rows"),
    ]
    return 640, 190, parts


def graph() -> tuple[int, int, list[str]]:
    """What a step is made of, eager and captured."""
    names = ("read batch", "forward", "loss", "metrics", "backward", "reduce", "update")
    parts = [label(8, 22, "eager: Python starts thousands of ops", "", 13, "start")]
    for i, name in enumerate(names):
        parts.append(box(8 + i * 96, 32, 84, 34, COLOURS[i % 4], name, 12))
        if i:
            parts.append(arrow(8 + i * 96 - 11, 49, 8 + i * 96 - 2, 49))
    parts.append(
        label(8, 100, "jit_compile=True: traced once for each kind of batch", "", 13, "start")
    )
    parts.append(box(8, 110, 84, 34, COLOURS[0], "read batch", 12))
    parts.append(arrow(93, 127, 102, 127))
    parts.append(
        '<rect x="104" y="110" width="564" height="34" rx="5" fill="var(--three)" '
        'stroke="var(--line)"/>'
        + label(
            386, 132, "one graph: forward, loss, metrics, backward, reductions, update", "on", 13
        )
    )
    return 680, 156, parts


def stack() -> tuple[int, int, list[str]]:
    """Who calls whom."""
    rows = [
        ("your script", "keras.distribution, Model.fit", "var(--raised)"),
        ("Keras", "released, untouched on disk", "var(--one)"),
        ("keras-spmd", "variables, data, rules, whole-step graphs, files", "var(--three)"),
        ("torch", "DTensor, Inductor, torch.distributed", "var(--two)"),
        ("devices", "NCCL on GPUs, gloo on CPUs; one process for each", "var(--raised)"),
    ]
    parts = []
    for i, (name, what, fill) in enumerate(rows):
        y = 8 + i * 48
        parts += [box(8, y, 150, 36, fill, name), label(172, y + 23, what, "soft", 13, "start")]
        if i:
            parts.append(arrow(83, y - 12, 83, y - 1))
    return 560, 248, parts


PICTURES: dict[str, Callable[[], tuple[int, int, list[str]]]] = {
    "mesh": mesh,
    "layouts": layouts,
    "tensor_parallel": tensor_parallel,
    "fsdp": fsdp,
    "batch": batch,
    "graph": graph,
    "stack": stack,
}
