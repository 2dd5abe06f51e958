"""The figures of captured steps, and of a step with more blocks than were captured."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from keras_spmd.graph._capture import Captured
from keras_spmd.graph._collectives import collectives_of
from keras_spmd.graph._explain import _collective
from keras_spmd.plan._dry_run import DryRun
from keras_spmd.plan._figures import Device
from keras_spmd.plan._kernels import is_gradient, kernels_of
from keras_spmd.plan._memory import moments_of
from keras_spmd.plan._ops import Kind, kind_of
from keras_spmd.plan._repeats import Group, NotAlike, groups_of, only
from keras_spmd.plan._report import Transfer
from keras_spmd.plan._timing import Timing, timing_of


@dataclass
class Measured:
    """What is known of a step. `memory` holds (activations, gradients) at each place of it."""

    memory: dict[tuple[str, str], tuple[float, float]]
    transfers: list[Transfer]
    timing: Timing
    fallbacks: Counter
    groups: list[Group] = field(default_factory=list)


def measured(run: DryRun, device: Device, *, whole: bool) -> Measured:
    """The figures of a training step; of blocks that are alike, a few are captured."""
    groups = [] if whole else groups_of(run.model)
    if groups:
        try:
            return _measured_in_part(run, device, groups)
        except NotAlike:
            pass
    return _figures(run, run.capture(), device, [])


def _measured_in_part(run: DryRun, device: Device, groups: list[Group]) -> Measured:
    ends = [layer for group in groups for layer in group.kept(with_middle=False)]
    with only(groups, ends):
        base = _figures(run, run.capture(), device, groups)
    others = []
    for group in groups:
        with only(groups, [*ends, group.layers[1]]):
            more = _figures(run, run.capture(), device, groups)
        others.append((group.count - 2, more))
    return _extended(base, others, groups)


def _figures(run: DryRun, captured: Captured, device: Device, groups: list[Group]) -> Measured:
    graph = captured.module.graph
    kernels = kernels_of(graph, for_gpu=device.is_gpu)
    memory: dict[tuple[str, str], tuple[float, float]] = {}
    for moment in moments_of(kernels, for_gpu=device.is_gpu):
        place = (moment.phase, _canonical(moment.layer, groups))
        memory[place] = max(
            memory.get(place, (0.0, 0.0)), (moment.activations, moment.gradients), key=sum
        )
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    batch = set(inputs[len(captured.slots) :])
    transfers = [_transfer(node, run.mesh, batch) for node in collectives_of(captured.module)]
    timing = timing_of(graph, kernels, device, run.mesh)
    return Measured(memory, transfers, timing, captured.fallbacks, groups)


def _canonical(layer: str, groups: list[Group]) -> str:
    return next((role for g in groups if (role := g.role_of(layer)) is not None), layer)


def _transfer(node: Node, mesh: Any, batch: set[Node]) -> Transfer:
    collective = _collective(node, mesh)
    return Transfer(**vars(collective), of=_what(node, batch))


def _what(node: Node, batch: set[Node]) -> str:
    """What a collective moves. Weights come from the state alone, by moves and casts."""
    if is_gradient(node):
        return "gradients"
    waiting, seen = [node], {node}
    while waiting:
        for x in waiting.pop().all_input_nodes:
            is_sum = kind_of(x) in (Kind.WHOLE, Kind.REDUCTION) and "cat" not in str(x.target)
            if is_sum or x in batch:
                return "activations"
            if x not in seen:
                seen.add(x)
                waiting.append(x)
    return "weights"


def _extended(base: Measured, others: list[tuple[int, Measured]], groups: list[Group]) -> Measured:
    """The figures with all blocks: those of the base, and for each more what one more adds."""

    def total(figure: Callable[[Measured], float]) -> float:
        first = figure(base)
        return first + sum(count * (figure(more) - first) for count, more in others)

    memory = {
        place: (
            total(lambda m, p=place: m.memory[p][0]),  # type: ignore[misc]
            total(lambda m, p=place: m.memory[p][1]),  # type: ignore[misc]
        )
        for place in base.memory
        if all(place in more.memory for _, more in others)
    }
    names = ("seconds", "compute", "network", "exposed", "flops", "full_speed")
    sums = {name: total(lambda m, n=name: getattr(m.timing, n)) for name in names}  # type: ignore[misc]
    timing = Timing(**sums, spans=base.timing.spans)
    return Measured(memory, _transfers(base, others), timing, base.fallbacks, groups)


def _transfers(base: Measured, others: list[tuple[int, Measured]]) -> list[Transfer]:
    """The collectives with all blocks, as often as they would be there."""
    captures = [base, *(more for _, more in others)]
    examples: dict[tuple, dict[int, Transfer]] = {}
    for m in captures:
        for t in m.transfers:
            examples.setdefault(_sort(t), {})[t.nbytes] = t
    result = []
    for sort, of_size in examples.items():
        counts = {
            nbytes: _linear([_count(m, sort, nbytes) for m in captures], others)
            for nbytes in of_size
        }
        if min(counts.values()) >= 0:
            result += [replace(of_size[n], count=c) for n, c in counts.items() if c > 0]
        else:
            result.append(_average(sort, of_size, captures, others))
    return result


def _average(
    sort: tuple,
    of_size: dict[int, Transfer],
    captures: list[Measured],
    others: list[tuple[int, Measured]],
) -> Transfer:
    """Buckets that hold more or less with other blocks: as many as can be told, of one size."""
    mine = [[t for t in m.transfers if _sort(t) == sort] for m in captures]
    total = _linear([sum(t.nbytes for t in ts) for ts in mine], others)
    count = max(1, _linear([len(ts) for ts in mine], others))
    example = of_size[max(of_size)]
    return replace(example, nbytes=total // count, count=count)


def _linear(values: list[int], others: list[tuple[int, Measured]]) -> int:
    first = values[0]
    pairs = zip(others, values[1:], strict=True)
    return first + sum(count * (value - first) for (count, _), value in pairs)


def _sort(t: Transfer) -> tuple:
    return (t.kind, t.axis, t.phase, t.of)


def _count(m: Measured, sort: tuple, nbytes: int) -> int:
    return sum(t.nbytes == nbytes and _sort(t) == sort for t in m.transfers)
