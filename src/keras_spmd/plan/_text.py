"""A plan as tables in a terminal."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from keras_spmd.plan import _terminal
from keras_spmd.plan._report import Plan
from keras_spmd.plan._sizes import duration, operations, size
from keras_spmd.plan._terminal import titled

_SHOWN = 12
_WIDTH = 110
_NUMBERS = ("bytes", "share", "times", "on a device")


def show(plan: Plan) -> None:
    _terminal.console().print(_view(plan))


def text_of(plan: Plan) -> str:
    return _terminal.text_of(_view(plan), _WIDTH)


def _view(plan: Plan) -> Group:
    parts: list[Any] = [_head(plan), _memory(plan), _time(plan)]
    if plan.transfers:
        parts.append(_transfers(plan))
    parts.append(_variables(plan))
    parts += [Text(f"! {warning}", style="yellow") for warning in plan.warnings]
    return Group(*parts)


def _head(plan: Plan) -> Text:
    mesh = " x ".join(f"{name}={count}" for name, count in plan.mesh.items())
    lines = [
        f"Training step of '{plan.model}' on {mesh} {plan.device.name}",
        f"for a batch of {', '.join(plan.batch)}; planned in {plan.planning_seconds:.1f} s",
    ]
    lines += [
        f"{count} blocks like '{path}': three were captured, the others add what the third did"
        for path, count in plan.repeats.items()
    ]
    return Text("\n".join(lines), style="bold")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify: Any = "right" if column in _NUMBERS else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def _memory(plan: Plan) -> Group:
    memory = plan.memory
    title = f"\nMemory of a device, at its peak ({memory.where})"
    table = _table("", "bytes", "share")
    rows = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer_state,
        "activations": memory.activations,
        "in all": memory.peak,
    }
    for name, nbytes in rows.items():
        table.add_row(name, size(nbytes), f"{nbytes / plan.memory_limit:.1%}")
    verdict = "fits" if plan.fits else "does not fit"
    table.add_row(Text(f"{plan.device.name} has"), size(plan.memory_limit), verdict)
    return titled(title, table)


def _time(plan: Plan) -> Group:
    table = _table("", "")
    table.show_header = False
    table.add_row("step", f"{duration(plan.seconds)} ({plan.mfu:.0%} MFU)")
    table.add_row("compute", f"{duration(plan.compute_seconds)} for {operations(plan.flops)}")
    table.add_row(
        "network",
        f"{duration(plan.network_seconds)}, of which {duration(plan.exposed_seconds)} are waited",
    )
    return titled("\nTime of a step, estimated", table)


def _transfers(plan: Plan) -> Group:
    count = sum(t.count for t in plan.transfers)
    title = f"\n{count} collectives, {size(plan.transferred_bytes)} a step; the largest"
    table = _table("kind", "bytes", "times", "axis", "of", "phase", "layers")
    for t in sorted(plan.transfers, key=lambda t: -t.nbytes * t.count)[:_SHOWN]:
        layers = ", ".join(t.layers[:2])
        more = f" and {len(t.layers) - 2} more" if len(t.layers) > 2 else ""
        row = [t.kind, size(t.nbytes), str(t.count), t.axis, t.of, t.phase, layers + more]
        table.add_row(*map(Text, row))
    return titled(title, table)


def _variables(plan: Plan) -> Group:
    total = sum(v.nbytes for v in plan.variables)
    title = f"\n{len(plan.variables)} variables, {size(total)}; the largest"
    table = _table("path", "shape", "dtype", "layout", "on a device")
    for v in sorted(plan.variables, key=lambda v: -v.nbytes)[:_SHOWN]:
        layout = ", ".join(axis or "-" for axis in v.axes)
        row = [v.path, str(v.shape), v.dtype, f"({layout})", size(v.local_nbytes)]
        table.add_row(*map(Text, row))
    return titled(title, table)
