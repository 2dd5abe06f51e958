"""The timeline of a step: what a device computes, when it waits, and what the network does."""

import math
from html import escape

from keras_spmd.plan._pictures import COLOURS
from keras_spmd.plan._report import Plan
from keras_spmd.plan._sizes import duration
from keras_spmd.plan._timing import Span

PHASES = {"forward": COLOURS[0], "backward": COLOURS[2], "update": COLOURS[1]}
_LANES = {"compute": 22, "network": 68}
_HEIGHT, _BOTTOM = 28, 100
# Narrower than this share of the step nobody sees.
_SMALL = 2e-5
_TICKS = 6


def timeline(plan: Plan) -> str:
    """Two lanes, with all waiting hatched. Nothing if the step has no time."""
    end = max((span.start + span.seconds for span in plan.spans), default=0.0)
    if not end:
        return ""
    parts = [_ticks(end)]
    parts += [f'<text x="4" y="{y - 5}">{lane}</text>' for lane, y in _LANES.items()]
    parts += [_box(s, _LANES["compute"], end, "url(#waiting)") for s in waits_of(plan.spans)]
    parts += [
        _box(span, _LANES[span.lane], end, PHASES.get(span.phase, COLOURS[7]))
        for span in plan.spans
        if span.seconds / end > _SMALL
    ]
    legend = "".join(
        f'<li><span class="swatch" style="background:{colour}"></span>{name}</li>'
        for name, colour in PHASES.items()
    )
    part = " The timeline has the blocks that were captured only." if plan.repeats else ""
    return (
        f'<div class="scroll"><svg class="timeline" role="img" width="100%" '
        f'aria-label="timeline of {duration(end)}"><defs><pattern id="waiting" width="6" '
        'height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="2" height="6" style="fill:var(--soft)"/></pattern></defs>'
        f'{"".join(parts)}</svg></div><output id="span">Point at a piece of it.{part}</output>'
        f'<div class="tools"><ul class="legend">{legend}<li><span class="swatch hatch"></span>'
        'waiting for the network</li></ul><label>zoom <input type="range" id="zoom" min="0" '
        'max="6" step="0.5" value="0"/></label></div>'
    )


def waits_of(spans: list[Span]) -> list[Span]:
    """When the device computes nothing, because it waits for a collective."""
    computed = [span for span in spans if span.lane == "compute"]
    end = max((span.start + span.seconds for span in spans), default=0.0)
    found, clock = [], 0.0
    for start, until in [(s.start, s.start + s.seconds) for s in computed] + [(end, end)]:
        if start - clock > _SMALL * end:
            found.append(Span("compute", clock, start - clock, "waiting", "for the network"))
        clock = max(clock, until)
    return found


def _box(span: Span, y: int, end: float, fill: str) -> str:
    what = f"{span.phase}, {span.label or 'the step itself'}"
    label = f"{what}: {duration(span.seconds)}, from {duration(span.start)} on"
    return (
        f'<rect x="{span.start / end:.4%}" y="{y}" width="{span.seconds / end:.4%}" '
        f'height="{_HEIGHT}" fill="{fill}"><title>{escape(label)}</title></rect>'
    )


def _ticks(end: float) -> str:
    """Lines at round times."""
    raw = end / _TICKS
    unit = 10 ** math.floor(math.log10(raw))
    step = next(n * unit for n in (1, 2, 5, 10) if n * unit >= raw)
    parts = []
    for i in range(math.floor(end / step) + 1):
        x = f"{i * step / end:.4%}"
        anchor = "start" if i == 0 else "end" if i * step > 0.97 * end else "middle"
        parts.append(
            f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{_BOTTOM}"/>'
            f'<text x="{x}" y="{_BOTTOM + 14}" text-anchor="{anchor}">{_time(i * step)}</text>'
        )
    return "".join(parts)


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            return f"{seconds * scale:.3g} {unit}" if seconds else "0"
    return ""
