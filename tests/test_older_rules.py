"""Rules for versions of torch that have none: parts of the inputs give parts of the results.

What they list is tested without a mesh, and so with every version.
"""

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from bench import on_ranks
from keras_spmd.distribution_lib import _to_backend_mesh
from keras_spmd.rules import _registry
from keras_spmd.rules.instead import divisor, instead_of
from meshes import line

OLDER = {name: rule for name, rule, before in _registry.shardings if before is not None}
PARTS = 2


def x(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape))) + 0.1


def whole_numbers(*shape):
    return (x(*shape) * 40).long() + 1


def matrices(*shape):
    return x(*shape) + 3 * torch.eye(shape[-1])


ROWS = x(4, 6, 8)
SYMMETRIC = matrices(4, 3, 3) @ matrices(4, 3, 3).mT
LU, PIVOTS, _ = torch.linalg.lu_factor_ex(matrices(4, 3, 3))
UNARY = ["celu", "elu", "frac", "hardshrink", "hardsigmoid", "hardtanh", "hardtanh_", "isfinite"]
UNARY += ["leaky_relu", "leaky_relu_", "mish", "relu6", "selu", "softplus", "softshrink"]
UNARY += [f"special_{name}" for name in ("entr", "erfcx", "i0e", "i1", "i1e", "log_ndtr")]
ARGUMENTS = {
    **{f"aten.{name}.default": [(ROWS - 0.5,)] for name in UNARY},
    "aten.special_ndtri.default": [(ROWS / 2,)],
    "aten.threshold.default": [(ROWS, 0.5, 0.1)],
    "aten.threshold_.default": [(ROWS, 0.5, 0.1)],
    "aten.div.Scalar_mode": [(ROWS, 2, {"rounding_mode": "floor"})],
    "aten.gcd.default": [(whole_numbers(4, 6), whole_numbers(4, 6))],
    "aten.lcm.default": [(whole_numbers(4, 6), whole_numbers(6))],
    **{
        f"aten.{name}": [
            (x(4, 6), x(4, 6) - 0.1),
            (x(4, 6), x(6)),
            (x(4, 1), x(8, 1, 6)),
            (x(4, 1), x(4, 1) * 2),
        ]
        for name in ("max.other", "min.other", "ne.Tensor", "special_xlog1py.default")
    },
    "aten.special_zeta.default": [(x(4, 6) + 2, x(4, 6))],
    "aten.flip.default": [(ROWS, [1]), (ROWS, [0, -1])],
    "aten.roll.default": [(ROWS, [1], [1]), (ROWS, [3])],
    "aten.rot90.default": [(ROWS, 1, [1, 2]), (ROWS,)],
    "aten.cumprod.default": [(ROWS, 1), (ROWS, -1)],
    "aten.logcumsumexp.default": [(ROWS, 0)],
    "aten.cummax.default": [(ROWS, 1)],
    "aten.cummin.default": [(ROWS, -1)],
    "aten.kthvalue.default": [(ROWS, 2, 1), (ROWS, 2, 0, True)],
    "aten.median.dim": [(ROWS, 1), (ROWS, 0, True)],
    "aten.nanmedian.dim": [(ROWS, -1)],
    "aten.mode.default": [(whole_numbers(4, 6, 8), 1)],
    "aten.nansum.default": [(ROWS,), (ROWS, [1]), (ROWS, [0, -1], True)],
    "aten.squeeze.dims": [(x(4, 1, 6), [1]), (x(1, 4, 1, 6), [0, -2])],
    "aten.constant_pad_nd.default": [(ROWS, [1, 2]), (ROWS, [0, 0, -1, 1], 3.0), (ROWS, [0, 0])],
    "aten.glu.default": [(ROWS,), (ROWS, 1)],
    "aten.glu_backward.default": [(x(4, 6, 4), ROWS, -1)],
    "aten._linalg_det.default": [(matrices(4, 3, 3),)],
    "aten._linalg_slogdet.default": [(matrices(4, 6, 3, 3),)],
    "aten.linalg_cholesky_ex.default": [(SYMMETRIC,)],
    "aten.linalg_inv_ex.default": [(matrices(4, 3, 3),)],
    "aten.linalg_eig.default": [(matrices(4, 3, 3),)],
    "aten.linalg_lu_factor_ex.default": [(matrices(4, 3, 3),)],
    "aten.linalg_lu.default": [(matrices(4, 3, 3),)],
    "aten.cholesky_inverse.default": [(torch.linalg.cholesky(SYMMETRIC),)],
    "aten.linalg_matrix_exp.default": [(matrices(4, 3, 3),)],
    "aten._linalg_solve_ex.default": [
        (matrices(4, 3, 3), x(4, 3, 2)),
        (matrices(4, 3, 3), x(4, 3)),
        (matrices(4, 4, 4), x(4, 5)),
        (matrices(3, 3), x(3)),
    ],
    "aten.linalg_lu_solve.default": [(LU, PIVOTS, x(4, 3, 2)), (LU, PIVOTS, x(3, 2))],
    "aten.linalg_cross.default": [
        (x(4, 3), x(4, 3)),
        (x(3, 4), x(3, 4), {"dim": 0}),
        (x(1, 3), x(4, 3)),
    ],
}


def part(tensor, placement, i):
    if isinstance(placement, Shard):
        return tensor.chunk(PARTS, placement.dim)[i].clone()
    return tensor.clone()


def joined(parts, placement):
    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim)
    return sum(parts) if isinstance(placement, Partial) else parts[0]


def test_every_rule_is_tested():
    assert set(ARGUMENTS) == set(OLDER)


@pytest.mark.parametrize(
    ("name", "arguments"), [(n, a) for n, several in ARGUMENTS.items() for a in several]
)
def test_parts_give_parts(name, arguments):
    op = _registry.find(name)
    options = arguments[-1] if isinstance(arguments[-1], dict) else {}
    args = [a for a in arguments if not isinstance(a, dict)]

    def run(values):
        results = op(*values, **options)
        return list(results) if isinstance(results, (tuple, list)) else [results]

    expected = run([a.clone() if torch.is_tensor(a) else a for a in args])
    choices = OLDER[name](*args, **options)
    assert all(p == Replicate() for p in choices[0][0])
    for outputs, inputs in choices:
        of_args = itertools.zip_longest(args, inputs[: len(args)])
        places = list(of_args)
        ranks = [
            run([part(a, p, i) if torch.is_tensor(a) else a for a, p in places])
            for i in range(PARTS)
        ]
        assert len(outputs) == len(expected)
        for k, (want, placement) in enumerate(zip(expected, outputs, strict=True)):
            found = joined([rank[k] for rank in ranks], placement)
            torch.testing.assert_close(found, want, msg=lambda m, p=placement: f"{p}: {m}")


@on_ranks(2)
def test_calls_that_older_versions_get_wrong_become_others():
    mesh = _to_backend_mesh(line())

    def sharded(tensor, dim):
        return distribute_tensor(tensor, mesh, [Shard(dim)])

    def run_instead(op, *args):
        other, arguments = instead_of(op, args)
        return other(*arguments).full_tensor()

    aten = torch.ops.aten
    rows = sharded(x(2, 1, 6), 0)  # of which each rank has one
    assert torch.equal(run_instead(aten.squeeze.default, rows), x(2, 1, 6).squeeze())
    assert torch.equal(run_instead(aten.squeeze.dim, rows, 0), x(2, 1, 6))
    assert instead_of(aten.squeeze.dims, (rows, [1])) is None
    pair = [sharded(x(4, 6), 0), sharded(x(4, 6) * 2, 0)]
    expected = torch.stack([x(4, 6), x(4, 6) * 2], -1)
    assert torch.equal(run_instead(aten.stack.default, pair, -1), expected)
    one = sharded(torch.tensor([3]), 0)  # which the second rank doesn't have
    whole = distribute_tensor(x(4, 6), mesh, [Replicate()])
    assert torch.equal(run_instead(aten.index.Tensor, whole, [one]), x(4, 6)[[3]])
    assert divisor(aten.div.Tensor, (1, 2)) == (2,)
    assert divisor(aten.mul.Tensor, (1, 2)) == ()
