"""`model.export` of a sharded model: rank 0 exports the whole, as one device would."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from keras import distribution
from torch.distributed.tensor import DTensor

from keras_spmd import _layouts, _variables, _wrapped
from keras_spmd._gathering import whole_on_rank_0
from keras_spmd._saving import done_by_rank_0


def export_or(original: Callable) -> Callable:
    """`Model.export`."""

    def export(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = [v for v in self.variables if isinstance(v._value, DTensor)]
        if not sharded:
            return original(self, filepath, *args, **kwargs)
        wholes = [whole_on_rank_0(v._value) for v in sharded]

        def act() -> None:
            with _alone(self, sharded, wholes):
                original(self, filepath, *args, **kwargs)

        done_by_rank_0(act, f"export '{filepath}'")
        return None

    export.__doc__ = original.__doc__
    return export


@contextlib.contextmanager
def _alone(model: Any, variables: list[Any], wholes: list[torch.Tensor | None]) -> Iterator[None]:
    """A model of plain tensors, without a distribution, for a while."""
    active, any_sharded = _layouts.active_distribution(), _variables.any_sharded
    values = [v._value for v in variables]
    for v, whole in zip(variables, wholes, strict=True):
        assert whole is not None
        v._value = torch.nn.Parameter(whole.to(v._value.device), requires_grad=False)
    _variables.any_sharded = False
    distribution.set_distribution(None)
    tensors = {id(old): v._value for v, old in zip(variables, values, strict=True)}
    try:
        with _wrapped.plain(model._flatten_layers(), tensors):
            yield
    finally:
        for v, value in zip(variables, values, strict=True):
            v._value = value
        _variables.any_sharded = any_sharded
        distribution.set_distribution(active)
