"""A sample of the audit: `make audit` goes through all of keras.ops and keras.layers."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

from bench import on_ranks, sample
from meshes import grid

AUDIT = Path(__file__).parent.parent / "audit"
OPS = {
    "reductions": ["amax", "moments", "logsumexp", "median"],
    "shapes": ["reshape", "rearrange", "kron", "squeeze"],
    "numbers": ["cast", "view", "saturate_cast"],
    "activations": ["hard_shrink", "hard_silu", "hard_tanh", "log_sigmoid", "soft_shrink"],
    "borders": ["pad"],
    "searching": ["searchsorted", "digitize", "top_k"],
    "products": ["solve_triangular", "conv"],
}
LAYERS = {
    "dense": ["Dense", "Embedding", "Dropout"],
    "normalization": ["BatchNormalization"],
    "convolution": ["Conv1D"],
    "recurrent": ["SimpleRNN"],
    "images": ["RandomFlip"],
}
# No way to split these: each result needs all of the input.
REPLICATED = {"aten.view.default", "aten._unsafe_view.default", "aten.squeeze.default"}


def module(name):
    sys.path.insert(0, str(AUDIT))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(AUDIT))


def rows(kind, names, mode, dtypes=("float32",)):
    worker = module("worker")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            row
            for case in worker.cases_of(kind)
            if case.name in names and case.dtype in dtypes
            for row in worker.audit(case, grid(), mode)
        ]


def wrong(found):
    return [row for row in found if row["wrong"]]


@pytest.mark.parametrize("family", sample(OPS, "shapes", "numbers", "borders", "searching"))
@on_ranks(4, timeout=180)
def test_ops_with_inputs_laid_out_in_every_way(family):
    found = rows("ops", OPS[family], "eager")
    assert len(found) > 8
    assert wrong(found) == []
    assert {op for row in found for op in row["replicated"]} <= REPLICATED


@on_ranks(4)
def test_the_same_captured():
    found = rows("ops", ["add", "softmax", "take"], "captured")
    assert all(row["captured"] for row in found)
    assert wrong(found) == []


@on_ranks(4)
def test_integers_and_bfloat16():
    found = rows("ops", ["add", "mean", "matmul"], "eager", ("bfloat16", "int32"))
    assert {row["dtype"] for row in found} == {"bfloat16", "int32"}
    assert wrong(found) == []


@pytest.mark.parametrize("family", sample(LAYERS, "dense", "convolution"))
@on_ranks(4, timeout=180)
def test_layers_with_inputs_and_weights_laid_out_in_every_way(family):
    found = rows("layers", LAYERS[family], "eager")
    assert len(found) > 8
    assert wrong(found) == []


@on_ranks(4)
def test_a_layer_captured():
    found = rows("layers", ["Dense"], "captured")
    assert {row["weights"] for row in found} == {"R", "S"}
    assert wrong(found) == []


def test_every_function_has_a_case():
    import keras

    cases = module("cases")
    modules = {"": keras.ops, "image.": keras.ops.image}
    functions = {
        prefix + name
        for prefix, space in modules.items()
        for name in dir(space)
        if callable(getattr(space, name)) and not name.startswith("_")
    }
    covered = {case.name for case in cases.CASES} | set(cases.WITHOUT_TENSORS)
    assert functions == covered


def test_every_layer_has_a_case():
    assert module("layer_cases").missing() == []
