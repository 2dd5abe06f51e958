"""`synchronized=True` of batch normalization, which Keras refuses on torch.

A sharded batch is one batch here, so its statistics are those of all devices in any case.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from keras_spmd import _layouts


def batch_normalization_init_or(original: Callable) -> Callable:
    """`BatchNormalization.__init__`: accepts the argument while a distribution is active."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        synchronized = bool(bound.arguments.get("synchronized"))
        if synchronized and _layouts.active_distribution() is not None:
            bound.arguments["synchronized"] = False
        original(*bound.args, **bound.kwargs)
        # Its config says what was asked for.
        self.synchronized = synchronized

    # Keras reads the names of a layer's arguments from here, not through the wrapper.
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


def moments_or(original: Callable) -> Callable:
    """`moments`: of the whole batch, asked for or not."""

    @functools.wraps(original)
    def moments(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Any:
        is_global = isinstance(x, DTensor) or _layouts.active_distribution() is not None
        return original(x, axes, keepdims, synchronized=synchronized and not is_global)

    return moments
