"""A captured graph as compiled code."""

import contextlib
import ctypes
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from keras_spmd import _settings
from keras_spmd._notices import warn_once
from keras_spmd.graph._updates import divided

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST = -1, -3, 2**30
_OPTIONS = {
    # Raw random ops of torch draw what they draw in an eager step.
    "fallback_random": True,
    # It moves weight gradients and the loss to where they are used: after the whole backward pass,
    # and all that they are computed from would be kept until then.
    "reorder_for_locality": False,
}
_GPU_OPTIONS = {
    # The gradient of a loss is one long expression. In one piece it is written over the scores.
    "realize_opcount_threshold": 100,
}


def decompositions() -> dict:
    """How the compiler takes ops apart."""
    if _settings.compiler() == "none":
        return {}
    # Some of its decompositions use `lowering` without importing it.
    from torch._inductor import config, lowering  # noqa: F401
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(_OPTIONS):
        return select_decomp_table()


def compile_graph(module: GraphModule) -> Callable:
    """Inductor's version of the graph, called with a list. It writes new state into its inputs."""
    if _settings.compiler() == "none":
        return _as_it_is(module)
    try:
        return _inductor(module)
    except Exception as error:
        message = (
            "Inductor could not compile a captured step, which runs as it is, more slowly: "
            f"{type(error).__name__}: {error}"
        )
        if _settings.strict():
            raise RuntimeError(f"KERAS_SPMD_STRICT: {message}") from error
        warn_once(("inductor", str(error)), message)
        return _as_it_is(module)


def _as_it_is(module: GraphModule) -> Callable:
    """Run op by op. torch foretells wrongly how some values lie, and a view may not fit them."""
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    module.recompile()
    return lambda args: module(*args)


@functools.cache
def _keep_memory() -> None:
    """Let the C library keep what a step frees for the next step, instead of giving it back.

    A CPU step allocates large tensors over and over, and each time the system would have to hand
    out their pages anew. Other C libraries than glibc have no such switch.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)


def _inductor(module: GraphModule) -> Callable:
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    is_on_gpu = any(x.is_cuda for x in inputs)
    if _settings.keep_memory() and not is_on_gpu:
        _keep_memory()
    with torch.no_grad(), warnings.catch_warnings():
        # Inductor warns of its own use of torch.
        warnings.simplefilter("ignore")
        # Functions for CPUs take longer to make, so there is one for all.
        parts = divided(module) if is_on_gpu else None
        if parts is None:
            return _whole(module, is_on_gpu)
        return parts.joined(_whole(parts.module, is_on_gpu), _update)


def _whole(module: GraphModule, is_on_gpu: bool) -> Callable:
    from torch._inductor.compile_fx import compile_fx

    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    options = _OPTIONS | (_GPU_OPTIONS if is_on_gpu else {})
    compiled: Any = compile_fx(module, inputs, config_patches=options)
    return lambda args: compiled(*args)


def _update(module: GraphModule) -> Callable:
    """A few elementwise ops, which need none of what Inductor does to prepare a graph."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    # Inductor keeps on disk only what has a place for conditions on shapes, though there are none.
    mode = inputs[0].fake_mode
    mode.shape_env = mode.shape_env or ShapeEnv()
    with config.patch(_OPTIONS), tracing(TracingContext(mode)):
        return compile_fx_inner(module, inputs, is_inference=True)
