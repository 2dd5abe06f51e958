"""A sample of the audit: `make audit` goes through every function of keras.ops."""

import sys
import warnings
from pathlib import Path

import pytest
from keras import distribution

from bench import on_ranks
from keras_spmd.distribution_lib import _to_backend_mesh
from meshes import grid, model_parallel

AUDIT = Path(__file__).parent.parent / "audit"
SAMPLE = {
    "reductions": ["amax", "moments", "logsumexp", "median"],
    "shapes": ["reshape", "rearrange", "kron", "squeeze"],
    "numbers": ["cast", "view", "saturate_cast"],
    "activations": ["hard_shrink", "hard_silu", "hard_tanh", "log_sigmoid", "soft_shrink"],
    "borders": ["pad"],
    "searching": ["searchsorted", "digitize", "top_k"],
    "products": ["einsum", "solve_triangular", "conv"],
}
# No way to split these: each result needs all of the input.
REPLICATED = {"aten.view.default", "aten._unsafe_view.default", "aten.squeeze.default"}


def rows(names, run_name):
    sys.path.insert(0, str(AUDIT))
    try:
        import worker
        from cases import CASES
    finally:
        sys.path.remove(str(AUDIT))
    mesh = grid()
    distribution.set_distribution(model_parallel({}, mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            row
            for case in CASES
            if case.name in names
            for row in worker.audit(case, _to_backend_mesh(mesh), getattr(worker, run_name), 0)
        ]


@pytest.mark.parametrize("names", SAMPLE.values(), ids=SAMPLE)
@on_ranks(4)
def test_ops_with_inputs_laid_out_in_every_way(names):
    found = rows(names, "eager")
    assert len(found) > 8
    assert [row for row in found if row["wrong"]] == []
    assert {op for row in found for op in row["replicated"]} <= REPLICATED


@on_ranks(4)
def test_the_same_captured():
    found = rows(["add", "softmax", "matmul", "take", "cumsum"], "captured")
    assert [row for row in found if row["wrong"]] == []


def test_every_function_has_a_case():
    import keras

    sys.path.insert(0, str(AUDIT))
    try:
        from cases import CASES, WITHOUT_TENSORS
    finally:
        sys.path.remove(str(AUDIT))
    functions = {name for name in dir(keras.ops) if callable(getattr(keras.ops, name))}
    covered = {case.name for case in CASES} | set(WITHOUT_TENSORS)
    assert {name for name in functions if not name.startswith("_")} == covered
