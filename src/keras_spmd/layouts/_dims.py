"""Which dims of a model's tensors belong together.

If a dim of a weight is sharded, so are the dims that are computed from it element by element: the
features of a layer's output, the scale of the normalization behind it, the rows of the next kernel.
Dims that must be sharded together are one `Dim`, however many tensors have it. A dim that is
reshaped into several, such as features into heads, falls into parts.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Sum(NamedTuple):
    """A place where a sharded dim disappears, so that ranks must add their parts."""

    layer_path: str
    is_lookup: bool


class Dim:
    """One dim, or several that are sharded together or not at all."""

    def __init__(self, size: int) -> None:
        self._same: Dim | None = None
        self._parts: tuple[Dim, Dim] | None = None
        self.size = size
        # Why it can't be sharded: the first op that needs all of it.
        self.whole_for: str | None = None
        self.is_data = False
        self.is_output = False
        self.sums: list[Sum] = []

    def find(self) -> "Dim":
        root = self
        while root._same is not None:
            root = root._same
        return root

    def atoms(self) -> list["Dim"]:
        """What it consists of, the slowest first."""
        root = self.find()
        if root._parts is None:
            return [root]
        return [atom for part in root._parts for atom in part.atoms()]

    def split(self, size: int) -> None:
        """Fall into two parts, the first of this size."""
        assert self._same is self._parts is None
        assert self.size % size == 0
        self._parts = (Dim(size), Dim(self.size // size))
        for part in self._parts:
            part._take_over(self)

    def join(self, other: "Dim") -> None:
        """Be one dim from now on."""
        mine, theirs = self.atoms(), other.atoms()
        while mine and theirs:
            a, b = mine[0].find(), theirs[0].find()
            if a is b or a.size == b.size:
                a._be(b)
                mine.pop(0)
                theirs.pop(0)
            elif max(a.size, b.size) % min(a.size, b.size):
                for dim in mine + theirs:
                    dim.keep_whole("parts that don't fit")
                return
            else:
                (a if a.size > b.size else b).split(min(a.size, b.size))
                mine = [atom for dim in mine for atom in dim.atoms()]
                theirs = [atom for dim in theirs for atom in dim.atoms()]

    def _be(self, other: "Dim") -> None:
        if self is not other:
            other._same = self
            self._take_over(other)

    def _take_over(self, other: "Dim") -> None:
        self.whole_for = self.whole_for or other.whole_for
        self.is_data |= other.is_data
        self.is_output |= other.is_output
        self.sums += other.sums

    def keep_whole(self, op: str) -> None:
        for atom in self.atoms():
            atom.whole_for = atom.whole_for or op

    def note_sum(self, place: Sum) -> None:
        for atom in self.atoms():
            atom.sums.append(place)

    def note_output(self) -> None:
        for atom in self.atoms():
            atom.is_output = True


def merged(dims: Sequence[Dim]) -> Dim:
    """The dim that several become when they are reshaped into one."""
    if len(dims) == 1:
        return dims[0]
    whole = Dim(math.prod(dim.size for dim in dims))
    if dims:
        whole._parts = (dims[0], merged(dims[1:]))
    return whole


class Tensors:
    """The dims of every tensor that was seen."""

    def __init__(self) -> None:
        self._dims: dict[int, list[Dim]] = {}
        self._is_data: dict[int, bool] = {}
        self._makers: dict[int, str] = {}
        # A tensor that is gone could lend its id to another.
        self._kept: list[torch.Tensor] = []

    def dims(self, x: torch.Tensor) -> list[Dim]:
        if id(x) not in self._dims:
            self.put(x, [Dim(size) for size in x.shape], is_data=False)
        return list(self._dims[id(x)])

    def put(self, x: torch.Tensor, dims: list[Dim], *, is_data: bool, maker: str = "") -> None:
        assert [dim.size for dim in dims] == list(x.shape)
        self._dims[id(x)], self._is_data[id(x)] = dims, is_data
        self._makers[id(x)] = maker
        self._kept.append(x)

    def is_data(self, x: torch.Tensor) -> bool:
        """Whether it depends on the model's inputs, and not on weights and constants alone."""
        return self._is_data.get(id(x), False)

    def maker(self, x: torch.Tensor) -> str:
        """The path of the layer that computed it."""
        return self._makers.get(id(x), "")


def tensors_in(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for item in x for t in tensors_in(item)]
    if isinstance(x, dict):
        return [t for item in x.values() for t in tensors_in(item)]
    return []
