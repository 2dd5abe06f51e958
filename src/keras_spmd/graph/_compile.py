"""A captured graph as compiled code."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from keras_spmd import _settings

# Raw random ops of torch draw what they draw in an eager step.
_OPTIONS = {"fallback_random": True}


def compile_graph(module: GraphModule, inputs: Sequence[torch.Tensor]) -> Callable:
    """Inductor's version of the graph. It writes new state into its inputs."""
    if _settings.compiler() == "none":
        return module
    with torch.no_grad(), warnings.catch_warnings():
        # Inductor warns of its own use of torch.
        warnings.simplefilter("ignore")
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(module, list(inputs), config_patches=_OPTIONS)
    return compiled
