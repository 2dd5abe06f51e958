"""What torch 2.13 has rules for, and older versions have none, or one that gathers.

Most are ops that go along some dims of a tensor and treat the others one by one, so that those may
be sharded.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from keras_spmd.rules._registry import sharding

older = functools.partial(sharding, before=(2, 13))


def _others(x: Any, *dims: int) -> list[Placement]:
    """Whole, or sharded on any dim but these."""
    rank = len(x.shape)
    taken = {dim % rank for dim in dims if rank}
    return [Replicate(), *(Shard(dim) for dim in range(rank) if dim not in taken)]


def _none(items: Iterable[Any]) -> list[None]:
    return [None for _ in items]


@older(
    "aten.celu.default",
    "aten.elu.default",
    "aten.frac.default",
    "aten.hardshrink.default",
    "aten.hardsigmoid.default",
    "aten.hardtanh.default",
    "aten.hardtanh_.default",
    "aten.isfinite.default",
    "aten.leaky_relu.default",
    "aten.leaky_relu_.default",
    "aten.mish.default",
    "aten.relu6.default",
    "aten.selu.default",
    "aten.softplus.default",
    "aten.softshrink.default",
    "aten.special_entr.default",
    "aten.special_erfcx.default",
    "aten.special_i0e.default",
    "aten.special_i1.default",
    "aten.special_i1e.default",
    "aten.special_log_ndtr.default",
    "aten.special_ndtri.default",
    "aten.threshold.default",
    "aten.threshold_.default",
    "aten.div.Scalar_mode",
)
def one_by_one(x: Any, *numbers: Any, **options: Any) -> list:
    return [([p], [p, *_none(numbers)]) for p in _others(x)]


@older(
    "aten.gcd.default",
    "aten.lcm.default",
    "aten.max.other",
    "aten.min.other",
    "aten.ne.Tensor",
    "aten.special_xlog1py.default",
    "aten.special_zeta.default",
)
def two_by_two(x: Any, y: Any) -> list:
    """A tensor that is repeated along a dim is whole there."""
    rank = max(len(x.shape), len(y.shape))

    def part(tensor: Any, dim: int) -> Placement:
        own = dim - rank + len(tensor.shape)
        return Shard(own) if own >= 0 and tensor.shape[own] > 1 else Replicate()

    choices: list = [([Replicate()], [Replicate(), Replicate()])]
    for dim in range(rank):
        parts = [part(x, dim), part(y, dim)]
        if parts != [Replicate(), Replicate()]:
            choices.append(([Shard(dim)], parts))
    return choices


@older("aten.flip.default")
def flip(x: Any, dims: list[int]) -> list:
    return [([p], [p, None]) for p in _others(x, *dims)]


@older("aten.roll.default")
def roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> list:
    """Without dims it goes through all elements in a row."""
    return [([p], [p, None, None]) for p in (_others(x, *dims) if dims else [Replicate()])]


@older("aten.rot90.default")
def rot90(x: Any, k: int = 1, dims: Any = (0, 1)) -> list:
    return [([p], [p, None, None]) for p in _others(x, *dims)]


@older("aten.cumprod.default", "aten.logcumsumexp.default")
def cumulative(x: Any, dim: int, **options: Any) -> list:
    return [([p], [p, None]) for p in _others(x, dim)]


@older("aten.cummax.default", "aten.cummin.default")
def cumulative_with_indices(x: Any, dim: int) -> list:
    return [([p, p], [p, None]) for p in _others(x, dim)]


@older("aten.kthvalue.default")
def kth_value(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> list:
    return [([q, q], [p, None, None, None]) for p, q in _after(x, dim, keepdim)]


@older("aten.median.dim", "aten.nanmedian.dim", "aten.mode.default")
def middle(x: Any, dim: int = -1, keepdim: bool = False) -> list:
    return [([q, q], [p, None, None]) for p, q in _after(x, dim, keepdim)]


def _after(x: Any, dim: int, keepdim: bool) -> list[tuple[Placement, Placement]]:
    """Placements of a tensor, and of what is left of it when a dim is gone."""
    dim = dim % max(len(x.shape), 1)
    return [
        (p, Shard(p.dim - 1) if isinstance(p, Shard) and p.dim > dim and not keepdim else p)
        for p in _others(x, dim)
    ]


@older("aten.nansum.default")
def nansum(x: Any, dims: Any = None, keepdim: bool = False, **options: Any) -> list:
    rank = len(x.shape)
    gone = {d % rank for d in (dims or range(rank))} if rank else set()
    choices: list = [([Replicate()], [Replicate(), None, None])]
    for dim in range(rank):
        before = 0 if keepdim else sum(d < dim for d in gone)
        out: Placement = Partial() if dim in gone else Shard(dim - before)
        choices.append(([out], [Shard(dim), None, None]))
    return choices


@older("aten.squeeze.dims")
def squeeze(x: Any, dims: list[int]) -> list:
    rank = len(x.shape)
    gone = {d % rank for d in dims if x.shape[d % rank] == 1} if rank else set()
    choices: list = [([Replicate()], [Replicate(), None])]
    for dim in sorted(set(range(rank)) - gone):
        choices.append(([Shard(dim - sum(d < dim for d in gone))], [Shard(dim), None]))
    return choices


@older("aten.constant_pad_nd.default")
def pad(x: Any, padding: list[int], value: float = 0) -> list:
    """The numbers come in pairs, the last dim's first."""
    rank = len(x.shape)
    padded = [rank - 1 - i // 2 for i, count in enumerate(padding) if count]
    return [([p], [p, None, None]) for p in _others(x, *padded)]


@older("aten.glu.default")
def glu(x: Any, dim: int = -1) -> list:
    return [([p], [p, None]) for p in _others(x, dim)]


@older("aten.glu_backward.default")
def glu_backward(grad: Any, x: Any, dim: int) -> list:
    return [([p], [p, p, None]) for p in _others(x, dim)]


# Matrices are the last two dims.


@older("aten._linalg_det.default")
def det(x: Any) -> list:
    return [([p] * 3, [p]) for p in _others(x, -1, -2)]


@older("aten._linalg_slogdet.default")
def slogdet(x: Any) -> list:
    return [([p] * 4, [p]) for p in _others(x, -1, -2)]


@older(
    "aten.linalg_cholesky_ex.default",
    "aten.linalg_inv_ex.default",
    "aten.linalg_eig.default",
)
def two_of_a_matrix(x: Any, **options: Any) -> list:
    return [([p, p], [p]) for p in _others(x, -1, -2)]


@older("aten.linalg_lu_factor_ex.default", "aten.linalg_lu.default")
def three_of_a_matrix(x: Any, **options: Any) -> list:
    return [([p] * 3, [p]) for p in _others(x, -1, -2)]


@older("aten.cholesky_inverse.default", "aten.linalg_matrix_exp.default")
def one_of_a_matrix(x: Any, *options: Any) -> list:
    return [([p], [p, *_none(options)]) for p in _others(x, -1, -2)]


@older("aten._linalg_solve_ex.default")
def solve(a: Any, b: Any, **options: Any) -> list:
    """A right side may be a matrix for each matrix, or a vector."""
    choices: list = [([Replicate()] * 4, [Replicate(), Replicate()])]
    batch = len(a.shape) - 2
    is_matrix = len(b.shape) == len(a.shape) and tuple(b.shape[:batch]) == tuple(a.shape[:batch])
    if is_matrix or tuple(b.shape) == tuple(a.shape[:-1]):
        choices += [([Shard(d)] * 4, [Shard(d), Shard(d)]) for d in range(batch)]
    return choices


@older("aten.linalg_lu_solve.default")
def solve_factored(lu: Any, pivots: Any, b: Any, **options: Any) -> list:
    choices: list = [([Replicate()], [Replicate()] * 3)]
    batch = len(lu.shape) - 2
    if len(b.shape) == len(lu.shape) and tuple(b.shape[:batch]) == tuple(lu.shape[:batch]):
        choices += [([Shard(d)], [Shard(d)] * 3) for d in range(batch)]
    return choices


@older("aten.linalg_cross.default")
def cross(x: Any, y: Any, *, dim: int = -1) -> list:
    if tuple(x.shape) != tuple(y.shape):
        return [([Replicate()], [Replicate(), Replicate()])]
    return [([p], [p, p]) for p in _others(x, dim)]
