"""Matrix products by oneDNN: the same numbers, and only where it gains."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_spmd.graph import _products

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def on_a_cpu_that_gains(monkeypatch):
    monkeypatch.setattr(_products, "_is_faster", lambda: True)


def count(module):
    return sum("keras_spmd.product" in str(node.target) for node in module.graph.nodes)


def replaced(function, *inputs):
    """The function as a graph with replaced products, whose results are as before."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    _products.use_onednn(module)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-4)
    return module


def test_products_of_rows():
    a, b = torch.randn(64, 128), torch.randn(128, 256)
    assert count(replaced(torch.mm, a, b)) == 1
    assert count(replaced(lambda a, b: torch.mm(a, b.t()), a, torch.randn(256, 128))) == 1
    assert count(replaced(torch.bmm, a[None], b[None])) == 1


def test_what_gains_nothing_stays():
    a, b = torch.randn(64, 128), torch.randn(128, 256)
    assert count(replaced(lambda a, b: torch.mm(a.t(), b), torch.randn(128, 64), b)) == 0
    assert count(replaced(torch.mm, a.double(), b.double())) == 0
    assert count(replaced(torch.mm, a[:, :4].contiguous(), b[:4])) == 0
    assert count(replaced(torch.bmm, torch.randn(3, 64, 128), torch.randn(3, 128, 256))) == 0
