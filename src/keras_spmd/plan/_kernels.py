"""A graph as the kernels that a compiler would make of it, and the memory that they write.

Inductor computes elementwise ops together with those that use them, so that most values never are
in memory. Which ones are is decided here as it decides: inputs of ops that aren't elementwise, and
values with several users that would be long to compute twice.
"""

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from keras_spmd.graph._collectives import is_collective
from keras_spmd.graph._origins import Origin, origin_of
from keras_spmd.plan._ops import Kind, is_heavy, kind_of, name_of, nbytes_of

# Inductor's: so many inputs are too many to be read twice, or at all; so many ops are too many.
_READ_TWICE, _READ_AT_ALL = 4, 8
_OPS_ON_CPU, _OPS_ON_GPU = 30, 100


@dataclass(eq=False)
class Buffer:
    """Memory that kernels write and read. That of an input is there before the step."""

    node: Node
    nbytes: int
    is_gradient: bool = False
    is_input: bool = False
    is_optional: bool = False  # elementwise, so that it may be a part of what reads it
    writers: list["Kernel"] = field(default_factory=list)
    readers: list["Kernel"] = field(default_factory=list)


@dataclass(eq=False)
class Kernel:
    """One thing that a device does: an op with all that is computed together with it."""

    node: Node
    kind: Kind
    position: int
    reads: dict[Buffer, int]
    writes: list[Buffer]
    written_bytes: int

    @property
    def origin(self) -> Origin:
        """Who caused it. What writes a variable was caused by whoever computed the value."""
        written = self.node.args[1] if self.kind is Kind.WRITE else None
        return origin_of(written if isinstance(written, Node) else self.node)

    @property
    def moved_bytes(self) -> int:
        return sum(self.reads.values()) + self.written_bytes


@dataclass
class _Value:
    """A node's value: what it is computed from, with the bytes of that, and with how many ops."""

    sources: dict[Buffer, int]
    ops: int = 0
    is_heavy: bool = False


def kernels_of(graph: Graph, *, for_gpu: bool) -> list[Kernel]:
    """The kernels of a graph, in its order."""
    lowering = _Lowering(graph, for_gpu)
    _drop_fused(lowering)
    return sorted(lowering.kernels, key=lambda kernel: kernel.position)


class _Lowering:
    """Goes through a graph and decides which values are in memory."""

    def __init__(self, graph: Graph, for_gpu: bool) -> None:
        self.nodes = list(graph.nodes)
        self.for_gpu = for_gpu
        self.kinds = {node: kind_of(node) for node in self.nodes}
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.wanted = self._inputs_of_whole_ops()
        self.buffers: list[Buffer] = []
        self.kernels: list[Kernel] = []
        self.values: dict[Node, _Value] = {}
        for node in self.nodes:
            self._lower(node)

    def _inputs_of_whole_ops(self) -> set[Node]:
        """Nodes that must be in memory because somebody reads them from there."""
        wanted: set[Node] = set()
        for node in reversed(self.nodes):
            kind = self.kinds[node]
            if name_of(node) == "cat":
                continue  # What is joined is written to its place in the whole.
            if kind is Kind.WHOLE and name_of(node).startswith("scatter"):
                # What is scattered, and where to, is computed element by element.
                wanted.add(node.all_input_nodes[0])
                continue
            if kind in (Kind.WHOLE, Kind.OUTPUT) or (kind is Kind.VIEW and node in wanted):
                wanted.update(node.all_input_nodes)
        return wanted

    def _lower(self, node: Node) -> None:
        kind = self.kinds[node]
        if kind is Kind.INPUT:
            nbytes = nbytes_of(node.meta.get("val"))
            self.values[node] = _Value({Buffer(node, nbytes, is_input=True): nbytes})
            return
        joined = self._inputs(node, kind)
        if kind is Kind.VIEW:
            self.values[node] = self._part(node, joined)
        elif name_of(node) == "cat":
            self.values[node] = self._joined(node)
        elif kind is Kind.ELEMENTWISE and not self._is_in_memory(node, joined):
            self.values[node] = joined
        else:
            self.values[node] = self._computed(node, kind, joined)

    def _inputs(self, node: Node, kind: Kind) -> _Value:
        values = [self.values[x] for x in node.all_input_nodes]
        sources: dict[Buffer, int] = {}
        for value in values:
            for buffer, nbytes in value.sources.items():
                sources[buffer] = max(nbytes, sources.get(buffer, 0))
        ops = sum(value.ops for value in values) + (kind is not Kind.VIEW)
        return _Value(sources, ops, any(v.is_heavy for v in values) or is_heavy(node))

    def _part(self, node: Node, whole: _Value) -> _Value:
        """A view; of several results of one op, the one that is taken."""
        source = node.all_input_nodes[0]
        if name_of(node) == "getitem" and self.kinds[source] is not Kind.VIEW:
            results = [b for b in whole.sources if b.node is source]
            index: Any = node.args[1]
            if len(results) > index:
                return _Value({results[index]: results[index].nbytes})
        most = nbytes_of(node.meta.get("val"))
        whole.sources = {buffer: min(nbytes, most) for buffer, nbytes in whole.sources.items()}
        return whole

    def _is_in_memory(self, node: Node, value: _Value) -> bool:
        if node in self.wanted or len(value.sources) > _READ_AT_ALL:
            return True
        if len(node.users) < 2:
            return False
        heavy = value.is_heavy and not self.for_gpu
        limit = _OPS_ON_GPU if self.for_gpu else _OPS_ON_CPU
        return heavy or len(value.sources) > _READ_TWICE or value.ops > limit

    def _computed(self, node: Node, kind: Kind, value: _Value) -> _Value:
        results = [] if kind in (Kind.WRITE, Kind.OUTPUT) else _results(node)
        buffers = [Buffer(node, nbytes_of(result), is_gradient(node)) for result in results]
        for buffer in buffers:
            buffer.is_optional = kind is Kind.ELEMENTWISE and node not in self.wanted
        written = nbytes_of(node.meta.get("val")) if kind is Kind.WRITE else None
        self._add(node, kind, self.position[node], value, buffers, written)
        self.buffers += buffers
        return _Value({buffer: buffer.nbytes for buffer in buffers})

    def _joined(self, node: Node) -> _Value:
        """What is joined: each part is written to its place as soon as it is there."""
        whole = Buffer(node, nbytes_of(node.meta["val"]), is_gradient(node))
        self.buffers.append(whole)
        for x in node.all_input_nodes:
            value, nbytes = self.values[x], nbytes_of(x.meta["val"])
            self._add(node, Kind.ELEMENTWISE, self.position[x], value, [whole], nbytes)
        return _Value({whole: whole.nbytes})

    def _add(
        self,
        node: Node,
        kind: Kind,
        position: int,
        value: _Value,
        writes: list[Buffer],
        nbytes: int | None,
    ) -> None:
        written = sum(b.nbytes for b in writes) if nbytes is None else nbytes
        kernel = Kernel(node, kind, position, dict(value.sources), writes, written)
        for buffer in kernel.reads:
            buffer.readers.append(kernel)
        for buffer in writes:
            buffer.writers.append(kernel)
        self.kernels.append(kernel)


def _results(node: Node) -> list[Any]:
    value = node.meta["val"]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def is_gradient(node: Node) -> bool:
    """Whether it holds gradients of weights: the update uses it as it is, or summed over ranks."""
    if _joins(node):
        # A bucket has the origin of its first member.
        return any(is_gradient(_without_views(x)) for x in node.all_input_nodes)
    phase = origin_of(node).phase
    if phase != "backward":
        return phase == "update"
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if origin_of(user).phase == "update":
                return True
            if kind_of(user) is Kind.VIEW or _joins(user):
                waiting.append(user)
    return False


def _joins(node: Node) -> bool:
    return name_of(node) == "cat" or is_collective(node)


def _without_views(node: Node) -> Node:
    while kind_of(node) is Kind.VIEW and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _drop_fused(lowering: _Lowering) -> None:
    """Leave out what only lives inside of one kernel: all that read it are computed with it."""
    count, segment = 0, []
    for node in lowering.nodes:
        count += lowering.kinds[node] is Kind.WHOLE
        segment.append(count)
    for buffer in lowering.buffers:
        if buffer.is_optional and all(
            segment[reader.position] == segment[buffer.writers[0].position]
            and reader.kind is not Kind.WHOLE
            for reader in buffer.readers
        ):
            buffer.nbytes = 0
