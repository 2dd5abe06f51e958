"""Products of rows that are divided with a weight that is divided along the dim they share.

torch looks at what it costs to move the factors, and not at the sum that is pending afterwards. So
it would rather exchange the rows, which are smaller than the weight, and leave a sum over the whole
result, which may be larger by far. Here the weight is gathered if that costs less than both.
"""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from keras_spmd._capturing import is_capturing
from keras_spmd.rules._specs import MANY_BYTES, local_as, nbytes, wrap

aten = torch.ops.aten
# Where the two factors are among the arguments, and their common dims.
_PRODUCTS = {
    aten.mm.default: (0, 1, 1, 0),
    aten.addmm.default: (1, 2, 1, 0),
    aten.bmm.default: (0, 1, 2, 1),
    aten.baddbmm.default: (1, 2, 2, 1),
}


def with_gathered_factor(op: Any, args: tuple, have: list, want: list) -> tuple | None:
    """The arguments with one factor gathered, where that is cheaper; None where it isn't.

    Args:
        op: Any op.
        args: Its arguments.
        have: How its tensors lie.
        want: How torch wants them to lie.
    """
    if op not in _PRODUCTS:
        return None
    first, second, *common = _PRODUCTS[op]
    offset = first - sum(not isinstance(x, torch.Tensor) for x in args[:first])
    if len(have) < offset + 2 or not all(isinstance(args[i], DTensor) for i in (first, second)):
        return None
    for i in (0, 1):
        axes = _exchanged(have[offset + i], want[offset + i], common[i])
        j = 1 - i
        stays = [a for a in axes if have[offset + j].placements[a] == Shard(common[j])]
        if stays and _costs_less(args, (first, second), i, stays):
            at = (first, second)[j]
            return (*args[:at], _gathered(args[at], stays), *args[at + 1 :])
    return None


def _exchanged(before: DTensorSpec, after: DTensorSpec, dim: int) -> list[int]:
    """The mesh axes on which another dim is divided now, and `dim` would be."""
    return [
        axis
        for axis, (p, q) in enumerate(zip(before.placements, after.placements, strict=True))
        if q == Shard(dim) and isinstance(p, Shard) and p.dim != dim
    ]


def _costs_less(args: tuple, factors: tuple[int, int], moved: int, axes: list[int]) -> bool:
    """Whether it moves fewer bytes to gather the one factor than to exchange the other and sum."""
    rows, weight = args[factors[moved]], args[factors[1 - moved]]
    common = rows.shape[-1 if moved == 0 else -2]
    batches = rows.shape[0] if rows.ndim == 3 else 1
    result = nbytes(rows) // common * weight.numel() // common // batches
    parts_of_rows, parts_of_weight = _divisor(rows, axes), _divisor(weight, axes)
    ranks = math.prod(rows.device_mesh.size(axis) for axis in axes)
    exchanged = nbytes(rows) / parts_of_rows / ranks
    summed = result / parts_of_rows / parts_of_weight
    least = 0 if is_capturing() else MANY_BYTES
    return nbytes(weight) / parts_of_weight + least < exchanged + summed


def _divisor(x: DTensor, axes: list[int]) -> int:
    """Into how many parts the other axes divide a tensor."""
    return math.prod(
        x.device_mesh.size(axis)
        for axis, p in enumerate(x.placements)
        if axis not in axes and isinstance(p, Shard)
    )


def _gathered(x: DTensor, axes: list[int]) -> DTensor:
    placements = [Replicate() if a in axes else p for a, p in enumerate(x.placements)]
    return wrap(local_as(x, x.device_mesh, placements), x.device_mesh, placements, x.shape)
