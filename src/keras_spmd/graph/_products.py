"""Matrix products on AMD CPUs by oneDNN.

torch multiplies matrices with MKL, which reaches 95 GFLOP/s on one core of an EPYC with AVX-512
where oneDNN reaches 107. Products of a transposed left matrix, which weight gradients are, gain
nothing, unless the right one is wide.
"""

import functools
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
_library = torch.library.Library("keras_spmd", "DEF")
_library.define("product(Tensor a, Tensor b) -> Tensor")


@torch.library.impl(_library, "product", "CPU")
def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


@torch.library.register_fake("keras_spmd::product", lib=_library)
def _fake_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@functools.cache
def _is_faster() -> bool:
    info = Path("/proc/cpuinfo")
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkl.is_available():
        return False
    return info.exists() and "AuthenticAMD" in info.read_text()


def use_onednn(module: GraphModule) -> None:
    """Replace the products that oneDNN is faster at, in place."""
    if not _is_faster():
        return
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is aten.mm.default and _gains(*node.args):
            node.target = torch.ops.keras_spmd.product.default
        elif node.target is aten.bmm.default and _gains(*node.args):
            _replace_batch_of_one(graph, node)


def _gains(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return (
        x.device.type == "cpu"
        and x.dtype == y.dtype == torch.float32
        and (x.ndim == 2 or x.shape[0] == 1)
        and (x.stride(-1) == 1 or y.shape[-1] >= 4096)
        and x.shape[-2] >= 32
        and x.numel() * y.shape[-1] >= 2**20
    )


def _replace_batch_of_one(graph: torch.fx.Graph, node: Node) -> None:
    """Keras's einsum makes products of a batch of one."""
    with graph.inserting_before(node):
        sides = []
        for x in node.args:
            side = graph.call_function(aten.squeeze.dim, (x, 0))
            side.meta = {**x.meta, "val": x.meta["val"].squeeze(0)}  # type: ignore[union-attr]
            sides.append(side)
        product = graph.call_function(torch.ops.keras_spmd.product.default, tuple(sides))
        product.meta = {**node.meta, "val": node.meta["val"].squeeze(0)}
    node.target, node.args = aten.unsqueeze.default, (product, 0)
