"""The states of random number generators, as JSON."""

import base64
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The states of all common random number generators, as JSON."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = as_text(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": as_text(torch.get_rng_state()),
        "cuda": cuda,
    }


def set_random_states(states: dict[str, Any], others: Iterable[torch.Generator] = ()) -> None:
    """Set them, and those of a loader."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, "uint32"), *rest))
    torch.set_rng_state(_of_text(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_of_text(states["cuda"]))
    for generator, state in zip(others, states.get("loader", []), strict=False):
        generator.set_state(_of_text(state))


def as_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _of_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
