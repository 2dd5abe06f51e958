"""Columns of one layer and rows of the next: which dims of the weights go over the model axis.

A dim that layers make and the next ones sum over is sharded in all of them: each rank computes its
features or heads from the first product to the last, and one sum brings the ranks together.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from keras_spmd.layouts._dims import Dim
from keras_spmd.layouts._trace import Trace

# The axes of a variable's dims, by the variable's index.
Axes = list[list[str | None]]
# Where a dim is in the variables: (the variable's index, its dim).
Places = list[tuple[int, int]]


def no_axes(variables: Sequence[Any]) -> Axes:
    return [[None] * len(v.shape) for v in variables]


def shard_pairs(
    trace: Trace, variables: Sequence[Any], axis: str, count: int, min_size: int
) -> tuple[Axes, list[Dim]]:
    """The axes of all variables, and the dims that were sharded."""
    axes, chosen = no_axes(variables), []
    for dim, places in _candidates(trace, variables, count, min_size):
        if any(axis in axes[i] for i, _ in places):
            continue
        for i, place in places:
            axes[i][place] = axis
        chosen.append(dim)
    return axes, chosen


def _candidates(
    trace: Trace, variables: Sequence[Any], count: int, min_size: int
) -> Iterator[tuple[Dim, Places]]:
    """Dims that may be sharded: those of pairs first, each kind in the order of the model."""
    possible = {d: p for d, p in _places(trace).items() if _can_be_sharded(d, p, variables, count)}
    pairs = [d for d, places in possible.items() if _is_pair(d, places, variables)]
    order = {path: i for i, path in enumerate(trace.outputs)}
    pairs.sort(key=lambda d: min(order[s.layer_path] for s in d.sums))
    singles = [
        d
        for d, places in possible.items()
        if d not in pairs and _stands_alone(d) and _size(places, variables) >= min_size
    ]
    for dim in pairs + singles:
        yield dim, possible[dim]


def _places(trace: Trace) -> dict[Dim, Places]:
    places: dict[Dim, Places] = {}
    for i, dims in enumerate(trace.weights):
        for place, dim in enumerate(dims):
            first, *others = dim.atoms()
            places.setdefault(first, []).append((i, place))
            for atom in others:
                # Shards of it are not in one piece in this weight.
                atom.keep_whole("a layout")
    return places


def _can_be_sharded(dim: Dim, places: Places, variables: Sequence[Any], count: int) -> bool:
    indices = [i for i, _ in places]
    return (
        dim.whole_for is None
        and not dim.is_data
        and dim.size % count == 0
        and len(set(indices)) == len(indices)
        and any(_is_matrix(variables[i]) for i in indices)
    )


def _is_pair(dim: Dim, places: Places, variables: Sequence[Any]) -> bool:
    matrices = [i for i, _ in places if _is_matrix(variables[i])]
    return len(matrices) > 1 and any(not s.is_lookup for s in dim.sums)


def _stands_alone(dim: Dim) -> bool:
    """A vocabulary, or the features that are the model's output."""
    return all(s.is_lookup for s in dim.sums) and (dim.is_output or bool(dim.sums))


def _size(places: Places, variables: Sequence[Any]) -> int:
    return max(math.prod(variables[i].shape) for i, _ in places)


def _is_matrix(variable: Any) -> bool:
    return len(variable.shape) > 1
