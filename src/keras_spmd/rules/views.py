"""Views that merge or split a dim whose shards are not of one size.

The rows of a batch that doesn't divide evenly are merged with others in every Dense layer of a
sequence. torch refuses: 5 rows of 4 on two ranks are shards of 12 and 8, and of the 20 merged ones
each rank should have 10. Both are ranges of the same numbers, so the ranks exchange what lies
between, instead of all.
"""

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Shard

from keras_spmd._exchange import all_to_all
from keras_spmd._layouts import divides, local_shape_and_offset
from keras_spmd.rules._specs import wrap

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def view_by_exchange(op: torch._ops.OpOverload, args: tuple) -> DTensor | None:
    """The view, with its first dim sharded as that of the tensor is; None if that can't be."""
    if op not in _VIEWS:
        return None
    x, shape = args[0], _complete(args[1], args[0].numel())
    if math.prod(shape) != x.numel():
        return None  # For torch to say so.
    old, new = _first(x.shape), _first(shape)
    axes = [i for i, p in enumerate(x.placements) if p == Shard(old)]
    kept = _kept(x.shape[old:], shape[new:])
    if len(axes) != 1 or not _are_kept(x, kept, axes[0]):
        return None
    (axis,) = axes
    mesh, local = x.device_mesh, x._local_tensor
    ranks, mine = mesh.size(axis), mesh.get_coordinate()[axis]
    # In rows of the dims that stay as they are.
    have = _ranges(x.shape[old], ranks, math.prod(x.shape[old + 1 : x.ndim - kept]))
    want = _ranges(shape[new], ranks, math.prod(shape[new + 1 : len(shape) - kept]))
    moved = all_to_all(
        local.reshape(have[mine][1] - have[mine][0], *local.shape[x.ndim - kept :]),
        [_common(want[mine], theirs) for theirs in have],
        [_common(have[mine], theirs) for theirs in want],
        mesh,
        axis,
    )
    placements = [
        Shard(p.dim + len(shape) - x.ndim) if isinstance(p, Shard) else p for p in x.placements
    ]
    placements[axis] = Shard(new)
    local_shape, _ = local_shape_and_offset(shape, mesh, placements)
    return wrap(moved.reshape(local_shape), mesh, placements, shape)


def _first(shape: Sequence[int]) -> int:
    """The first dim that has several elements."""
    return next((i for i, size in enumerate(shape) if size != 1), 0)


def _complete(shape: Sequence[int], count: int) -> list[int]:
    known = math.prod(n for n in shape if n >= 0)
    return [count // max(known, 1) if n < 0 else n for n in shape]


def _kept(before: Sequence[int], after: Sequence[int]) -> int:
    """How many of the last dims are the same; the first is not one of them."""
    kept = 0
    while kept < min(len(before), len(after)) - 1 and before[-1 - kept] == after[-1 - kept]:
        kept += 1
    return kept


def _are_kept(x: DTensor, kept: int, first: int) -> bool:
    """Whether other axes shard only dims that the view leaves alone."""
    others = [p for i, p in enumerate(x.placements) if i != first]
    return all(type(p) is Shard and p.dim >= x.ndim - kept for p in others if divides(p))


def _ranges(size: int, ranks: int, rest: int) -> list[tuple[int, int]]:
    """What each rank has of a dim, in units of `rest`."""
    full = -(-size // ranks)
    return [(min(full * r, size) * rest, min(full * (r + 1), size) * rest) for r in range(ranks)]


def _common(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
