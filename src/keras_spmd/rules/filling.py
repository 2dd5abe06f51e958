"""Filling a tensor with a number that is a tensor: each rank fills its own part.

torch's rule wants the number to lie like the tensor it goes into.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import counts_here, only_if, to_replicated
from keras_spmd.rules.writing import write_through


@handler("aten.fill_.Tensor")
def fill(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, value = args
    number = to_replicated(value) if isinstance(value, DTensor) else value
    if not isinstance(x, DTensor):
        return op(x, number)
    op(x._local_tensor, only_if(counts_here(x), number))
    write_through(x)
    return x
