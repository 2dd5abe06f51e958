"""What a captured step does and costs, for the user who asks why it is slow."""

import itertools
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

from keras_spmd.graph._buckets import causes_of, nbytes_of
from keras_spmd.graph._capture import Slot
from keras_spmd.graph._collectives import collectives_of, group_ranks
from keras_spmd.graph._cuda_graphs import Replayed
from keras_spmd.graph._origins import origin_of
from keras_spmd.graph._step import Entry, Step

_NAMES = {"train": "Training", "test": "Evaluation", "predict": "Prediction"}
_SHOWN = 12


@dataclass
class Collective:
    """One collective of a step.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        nbytes: The size of what is reduced or gathered.
        axis: The mesh axis, or the ranks where they are no axis of the mesh.
        phase: "forward", "backward" or "update".
        layers: The layers that caused it.
    """

    kind: str
    nbytes: int
    axis: str
    phase: str
    layers: list[str]


@dataclass
class GraphReport:
    """One graph of a step: there is one for each kind of batch."""

    batch: list[str]
    ops: dict[str, int]
    collectives: list[Collective]
    parameter_bytes: int
    state_bytes: int
    kept_bytes: int
    fallbacks: Counter
    capture_seconds: float
    compile_seconds: float
    is_replayed: bool
    text: str = field(repr=False)


@dataclass
class StepReport:
    """A model's training, evaluation or prediction step. `reason` says why it runs eagerly."""

    kind: str
    graphs: list[GraphReport]
    reason: str | None


def explain(model: Any, graph_file: str | os.PathLike | None) -> list[StepReport]:
    reports = []
    for kind in _NAMES:
        step = getattr(model, f"{kind}_function", None)
        if isinstance(step, Step):
            graphs = [_report(entry) for entry in step.entries.values() if entry.run is not None]
            reports.append(StepReport(kind, graphs, step.reason))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(_text(model, reports))
        if graph_file is not None:
            _write(graph_file, reports)
    return reports


def _write(path: str | os.PathLike, reports: list[StepReport]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for report in reports:
            for graph in report.graphs:
                file.write(f"# {_NAMES[report.kind]} step for {', '.join(graph.batch)}\n")
                file.write(graph.text + "\n\n")


def _report(entry: Entry) -> GraphReport:
    captured = entry.captured
    assert captured is not None
    nodes = list(captured.module.graph.nodes)
    mesh = next((slot.spec.mesh for slot in captured.slots if slot.spec is not None), None)
    calls = [node for node in nodes if node.op == "call_function"]
    inputs = [node for node in nodes if node.op == "placeholder"]
    return GraphReport(
        batch=[_shape(node.meta["val"]) for node in inputs[len(captured.slots) :]],
        ops=dict(Counter(origin_of(node).phase for node in calls)),
        collectives=[_collective(node, mesh) for node in collectives_of(captured.module)],
        parameter_bytes=sum(s.local.nbytes for s in captured.slots if s.is_trained),
        state_bytes=sum(s.local.nbytes for s in captured.slots if not s.is_trained),
        kept_bytes=_kept_for_backward(calls),
        fallbacks=captured.fallbacks,
        capture_seconds=entry.seconds["capture"],
        compile_seconds=entry.seconds["compile"],
        is_replayed=isinstance(entry.run, Replayed) and entry.run.graph is not None,
        text="\n".join(
            [_input_line(*pair) for pair in itertools.zip_longest(inputs, captured.slots)]
            + [_line(node) for node in nodes[len(inputs) :]]
        ),
    )


def _collective(node: Node, mesh: Any) -> Collective:
    source: Any = node.args[0]
    kind = str(node.target).split(".")[1]
    return Collective(
        kind=kind.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single"),
        nbytes=max(nbytes_of(node), nbytes_of(source)),
        axis=_axis(node, mesh),
        phase=origin_of(node).phase,
        layers=list(dict.fromkeys(causes_of(node))),
    )


def _axis(node: Node, mesh: Any) -> str:
    for axis, name in enumerate(mesh.mesh_dim_names or () if mesh is not None else ()):
        if mesh.get_group(axis).group_name == node.args[-1]:
            return name
    return f"ranks {', '.join(map(str, group_ranks(node)))}"


def _kept_for_backward(calls: list[Node]) -> int:
    """Bytes of what the forward pass makes and the backward pass uses."""
    kept = {}
    first = next((i for i, n in enumerate(calls) if origin_of(n).phase == "backward"), len(calls))
    later = set(calls[first:])
    for node in calls[:first]:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(user in later for user in node.users):
            storage = value.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
    return sum(kept.values())


def _input_line(node: Node, slot: Slot | None) -> str:
    what = "batch" if slot is None else getattr(slot.variable, "path", "torch module")
    return f"{node.name}: {_shape(node.meta['val'])} = input  # {what}"


def _line(node: Node) -> str:
    value = node.meta.get("val")
    shape = f": {_shape(value)}" if isinstance(value, torch.Tensor) else ""
    if node.op == "output":
        return f"return {node.args[0]}"
    arguments = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
    origin = origin_of(node)
    place = f"{origin.phase} of {origin.layer}" if origin.layer else origin.phase
    return f"{node.name}{shape} = {node.target}({', '.join(arguments)})  # {place}"


def _shape(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def _text(model: Any, reports: list[StepReport]) -> str:
    if not reports:
        return (
            f"'{model.name}' has no compiled step. Compile it with jit_compile=True, run a step, "
            "and ask again."
        )
    lines = []
    for report in reports:
        lines.append(f"{_NAMES[report.kind]} step of '{model.name}'")
        if report.reason is not None:
            lines.append(f"  runs eagerly, because {report.reason}")
        elif not report.graphs:
            lines.append("  has not been captured yet")
        for graph in report.graphs:
            lines += ["  " + line for line in _graph_lines(graph)]
    return "\n".join(lines)


def _graph_lines(graph: GraphReport) -> list[str]:
    ops = ", ".join(f"{count:,} {phase}" for phase, count in graph.ops.items())
    lines = [
        f"for a batch of {', '.join(graph.batch)} on each device",
        f"  ops      {sum(graph.ops.values()):,}: {ops}",
        f"  time     captured in {graph.capture_seconds:.1f} s, compiled in "
        f"{graph.compile_seconds:.1f} s"
        + (", replayed as a CUDA graph" if graph.is_replayed else ""),
        f"  memory   parameters {_size(graph.parameter_bytes)}, other state "
        f"{_size(graph.state_bytes)}, kept for the backward pass {_size(graph.kept_bytes)}",
        *_collective_lines(graph.collectives),
    ]
    for (op, layer, gathered), times in graph.fallbacks.most_common():
        lines.append(
            f"  replicated  {op} in {layer or 'no layer'} has no way to run on shards: "
            f"{_size(gathered)} gathered" + (f", {times} times" if times > 1 else "")
        )
    return lines


def _collective_lines(collectives: list[Collective]) -> list[str]:
    if not collectives:
        return ["  network  no collectives"]
    total = sum(c.nbytes for c in collectives)
    count = f"{len(collectives)} collective{'s' if len(collectives) > 1 else ''}"
    lines = [f"  network  {count}, {_size(total)} a step; the largest:"]
    for c in sorted(collectives, key=lambda c: -c.nbytes)[:_SHOWN]:
        layers = ", ".join(c.layers[:3])
        if len(c.layers) > 3:
            layers += f" and {len(c.layers) - 3} more layers"
        lines.append(f"    {_size(c.nbytes):>10}  {c.kind:14} {c.axis:8} {c.phase:8}  {layers}")
    return lines
