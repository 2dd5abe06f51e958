"""Reading a DTensor on the host: numpy arrays and lists are the global values."""

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from keras_spmd import _whereabouts
from keras_spmd.rules._specs import to_replicated


def whole(tensor: DTensor) -> torch.Tensor:
    """The global tensor, on every rank and in host memory, without a gradient."""
    _whereabouts.note()
    # On the local tensors: torch can't even detach a DTensor in inference mode.
    return to_replicated(tensor).detach().cpu()


def to_array(self: DTensor, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """`np.array(dtensor)`."""
    return np.array(whole(self).numpy(), dtype=dtype)


def to_numpy(self: DTensor, *, force: bool = False) -> np.ndarray:
    """`dtensor.numpy()`, with torch's rules for tensors that have a gradient or are not on CPU."""
    return self.full_tensor().numpy(force=force)


def to_text(self: DTensor, spec: str) -> str:
    """`f"{loss:.3f}"`: the number, for a tensor of no dims."""
    return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)


def to_list(self: DTensor) -> Any:
    """`dtensor.tolist()`."""
    return whole(self).tolist()
