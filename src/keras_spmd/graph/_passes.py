"""What is done to a captured step before it is compiled, in order."""

import torch
from torch.fx import GraphModule

from keras_spmd import _settings
from keras_spmd._planning import is_on_gpu
from keras_spmd.graph import _collectives
from keras_spmd.graph._buckets import merge_into_buckets
from keras_spmd.graph._constants import fold_constants
from keras_spmd.graph._products import use_onednn
from keras_spmd.graph._recompute import recompute_cheap_activations
from keras_spmd.graph._scalars import keep_on_device


def improved(module: GraphModule) -> GraphModule:
    """A graph that computes the same with less: reads of values, memory, communication."""
    keep_on_device(module)
    fold_constants(module)
    _collectives.merge_duplicates(module.graph)
    on_gpu = _is_on_gpu(module)
    if _settings.recompute(default=on_gpu):
        module = recompute_cheap_activations(module)
    if not on_gpu and _settings.compiler() != "none":
        use_onednn(module)
    if _collectives.collectives_of(module):
        merge_into_buckets(module.graph)
        # On CPUs it was left out because gloo damaged memory (`_gloo.py`), and not measured since.
        if on_gpu:
            _collectives.prefetch_weights(module.graph)
        _collectives.sort(module.graph, late_waits=on_gpu)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _is_on_gpu(module: GraphModule) -> bool:
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    return any(isinstance(value, torch.Tensor) and is_on_gpu(value) for value in values)
