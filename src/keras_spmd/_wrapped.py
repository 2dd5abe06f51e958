"""Torch modules that Keras wraps: they have tensors that are not Keras's to exchange."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from keras.src.utils.torch_utils import TorchModuleWrapper
from torch.distributed.tensor import DTensor


def get_config_or(original: Callable) -> Callable:
    """`TorchModuleWrapper.get_config`, which has the module in it: the whole, not this rank's part.

    Takes all ranks.
    """

    def get_config(self: Any) -> dict[str, Any]:
        module = self._modules["module"]
        tensors = itertools.chain(module.parameters(), module.buffers())
        with plain([self], {id(x): _whole(x) for x in tensors if isinstance(x, DTensor)}):
            return original(self)

    get_config.__doc__ = original.__doc__
    return get_config


def _whole(x: DTensor) -> torch.Tensor:
    whole = x.detach().full_tensor()
    if not isinstance(x, torch.nn.Parameter):
        return whole
    return torch.nn.Parameter(whole, requires_grad=x.requires_grad)


@contextlib.contextmanager
def plain(layers: Iterable[Any], tensors: dict[int, torch.Tensor]) -> Iterator[None]:
    """For a while, wrappers among layers have copies of their modules, with other tensors.

    Args:
        layers: Of a model, or one wrapper.
        tensors: What takes the place of a tensor, by the tensor's id.
    """
    wrappers = [layer for layer in layers if isinstance(layer, TorchModuleWrapper)]
    modules = [wrapper._modules["module"] for wrapper in wrappers]
    for wrapper, module in zip(wrappers, modules, strict=True):
        # What a deep copy finds in its memory, it takes for the copy of a thing.
        wrapper._modules["module"] = copy.deepcopy(module, dict(tensors)) if tensors else module
    try:
        yield
    finally:
        for wrapper, module in zip(wrappers, modules, strict=True):
            wrapper._modules["module"] = module
