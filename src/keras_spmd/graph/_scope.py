"""The state of a step while it is captured: every variable it touches is an input of the graph.

Keras reads and writes variables through a `StatelessScope` where there is one. This one also notes
variables that nobody declared, so that no value is frozen into the graph.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from keras.src.backend.common.stateless_scope import StatelessScope
from torch.distributed.tensor import DTensor

from keras_spmd._capturing import here
from keras_spmd.graph._origins import Origins


class CaptureScope(StatelessScope):
    """Maps variables to tensors of the graph, and notes those that it has no tensor for."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.undeclared: list[Any] = []
        self.trained: set[int] = set()
        self.origins = Origins()
        self.fallbacks: Counter = Counter()

    def declare(self, variable: Any, value: torch.Tensor) -> None:
        self.state_mapping[id(variable)] = value
        if value.requires_grad:
            self.trained.add(id(variable))

    def get_current_value(self, variable: Any) -> Any:
        value = self.state_mapping.get(id(variable))
        if value is None:
            # One that the step has made has no value yet: Keras would make one in the graph.
            self._note(variable)
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if id(variable) not in self.state_mapping:
            self._note(variable)
        self.state_mapping[id(variable)] = self._assigned(variable, value)

    def _assigned(self, variable: Any, value: torch.Tensor) -> torch.Tensor:
        """What is assigned to a variable has no gradient, and is a leaf if the variable is one."""
        value = value.detach()
        return value.requires_grad_() if id(variable) in self.trained else value

    def _note(self, variable: Any) -> None:
        if not any(variable is other for other in self.undeclared):
            self.undeclared.append(variable)

    def __enter__(self) -> "CaptureScope":
        super().__enter__()
        self._before, here.scope = here.scope, self
        return self

    def __exit__(self, *args: Any, **kwargs: Any) -> None:
        here.scope = self._before
        super().__exit__(*args, **kwargs)


class Branch(CaptureScope):
    """One branch of a condition: it sees copies of the state, and what it writes stays here."""

    def __init__(self, outer: CaptureScope) -> None:
        super().__init__()
        self.outer = outer
        self.losses = outer.losses
        self.undeclared = outer.undeclared
        self.trained = outer.trained
        self.origins = outer.origins
        self.fallbacks = outer.fallbacks
        self.copies: dict[int, tuple[Any, torch.Tensor]] = {}

    def get_current_value(self, variable: Any) -> Any:
        value = self.state_mapping.get(id(variable))
        if value is not None:
            return value
        value = self.outer.get_current_value(variable)
        if value is None:
            return None
        copy = value.clone()
        self.state_mapping[id(variable)] = copy
        self.copies[id(variable)] = (variable, copy)
        return copy

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if self.get_current_value(variable) is None:
            self._note(variable)
        self.state_mapping[id(variable)] = self._assigned(variable, value)

    def written(self) -> dict[int, tuple[Any, torch.Tensor]]:
        """The variables that this branch wrote, with their new values.

        torch doesn't count what a foreach op writes. An optimizer does that, without autograd.
        """
        return {
            key: (variable, self.state_mapping[key])
            for key, (variable, copy) in self.copies.items()
            if self.state_mapping[key] is not copy
            or _version(copy) > 0
            or not torch.is_grad_enabled()
        }


def _version(x: torch.Tensor) -> int:
    return max(x._version, x._local_tensor._version) if isinstance(x, DTensor) else x._version


@contextlib.contextmanager
def module_tensors(swaps: list[tuple[dict, str, torch.Tensor]]) -> Iterator[None]:
    """Let torch modules compute with other tensors: `(owner's dict, name, tensor)`."""
    before = [owner[name] for owner, name, _ in swaps]
    for owner, name, value in swaps:
        owner[name] = value
    try:
        yield
    finally:
        for (owner, name, _), value in zip(swaps, before, strict=True):
            owner[name] = value
