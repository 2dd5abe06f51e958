"""How long a step takes, as far as figures of a device and its links can tell.

Each kernel takes as long as its operations or its bytes take, whichever is longer. A collective
begins where the graph begins it and runs beside the kernels, one at a time, until the graph waits
for it: what is not done by then is exposed.
"""

import math
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from keras_spmd.graph._buckets import WAIT
from keras_spmd.graph._collectives import group_ranks, is_collective
from keras_spmd.graph._explain import Collective, _collective
from keras_spmd.plan._figures import Device, Link
from keras_spmd.plan._flops import flops_of
from keras_spmd.plan._kernels import Kernel

_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Span:
    """Something that happens from one second of the step to another."""

    lane: str  # "compute" or "network"
    start: float
    seconds: float
    phase: str
    label: str


@dataclass
class Timing:
    """The seconds of a step and the work done in them."""

    seconds: float = 0.0
    compute: float = 0.0
    network: float = 0.0
    exposed: float = 0.0
    flops: float = 0.0
    full_speed: float = 0.0  # seconds that the operations would take at the device's peak
    spans: list[Span] = field(default_factory=list)


def seconds_of(collective: Collective, link: Link, ranks: int) -> float:
    """How long a ring takes. What is reduced goes around twice, what is gathered once."""
    if ranks == 1:
        return 0.0
    rounds = 2 if collective.kind == "all_reduce" else 1
    share = (ranks - 1) / ranks
    begin = rounds * math.ceil(math.log2(ranks)) * link.latency
    return rounds * share * collective.nbytes / link.bandwidth + begin


def timing_of(graph: Graph, kernels: list[Kernel], device: Device, mesh: object) -> Timing:
    """Walk through a step with a clock for the device and one for the network."""
    at: dict[Node, list[Kernel]] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    nodes = list(order)
    for kernel in kernels:
        at.setdefault(nodes[kernel.position], []).append(kernel)
    timing, clock = Timing(), 0.0
    free, ends = 0.0, {}
    for node in nodes:
        if is_collective(node):
            collective, ranks = _collective(node, mesh), group_ranks(node)
            seconds = seconds_of(collective, device.network.link_of(ranks), len(ranks))
            start = max(clock, free)
            free = ends[node] = start + seconds
            timing.network += seconds
            label = f"{collective.kind} {collective.axis}: {', '.join(collective.layers[:3])}"
            timing.spans.append(Span("network", start, seconds, collective.phase, label))
        elif node.target is WAIT:
            late = ends.get(node.all_input_nodes[0], 0.0) - clock
            if late > 0:
                timing.exposed += late
                clock += late
        for kernel in at.get(node, ()):
            if not is_collective(kernel.node):
                clock = _compute(timing, kernel, device, clock)
    timing.seconds = max(clock, free)
    return timing


def _compute(timing: Timing, kernel: Kernel, device: Device, clock: float) -> float:
    flops = flops_of(kernel.node)
    peak = device.flops_32 if _is_wide(kernel.node) else device.flops_16
    moving = kernel.moved_bytes / (device.bandwidth * device.memory_efficiency)
    seconds = max(flops / (peak * device.product_efficiency), moving)
    if kernel.moved_bytes:
        seconds = max(seconds, device.launch)
    origin = kernel.origin
    timing.flops += flops
    timing.full_speed += flops / peak
    timing.compute += seconds
    last = timing.spans[-1] if timing.spans else None
    if (
        last is not None
        and (last.lane, last.phase, last.label) == ("compute", origin.phase, origin.layer)
        and abs(last.start + last.seconds - clock) < 1e-12
    ):
        timing.spans.pop()
        span = Span("compute", last.start, last.seconds + seconds, origin.phase, origin.layer)
    else:
        span = Span("compute", clock, seconds, origin.phase, origin.layer)
    timing.spans.append(span)
    return clock + seconds


def _is_wide(node: Node) -> bool:
    values = [x.meta.get("val") for x in node.all_input_nodes]
    return any(isinstance(v, torch.Tensor) and v.dtype in _WIDE for v in values[:2])
