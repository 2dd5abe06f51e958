"""Python numbers: `dtensor.item()`, `float(dtensor)`, `bool(dtensor)`.

torch's own gives this rank's part, which for a pending sum or an empty shard is not the value.
"""

from typing import Any

import torch

from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import to_replicated


@handler("aten._local_scalar_dense.default")
def item(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    return op(to_replicated(args[0]))
