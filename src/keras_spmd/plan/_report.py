"""What a dry run found out."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from typing import Any

from keras_spmd.plan._figures import Device


@dataclass(frozen=True)
class Transfer:
    """A collective of a step.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        nbytes: The size of what is reduced or gathered.
        axis: The mesh axis.
        phase: "forward", "backward" or "update".
        layers: The layers that caused it.
        of: What it moves: "weights", "gradients" or "activations".
        count: How often the step has it.
    """

    kind: str
    nbytes: int
    axis: str
    phase: str
    layers: list[str]
    of: str = "activations"
    count: int = 1


@dataclass(frozen=True)
class Variable:
    """A variable of the model: its global shape, and the part of it that a device holds."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    local_shape: tuple[int, ...]
    itemsize: int
    is_trained: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def local_nbytes(self) -> int:
        return math.prod(self.local_shape) * self.itemsize

    @property
    def divided(self) -> tuple[str | None, ...]:
        """The axes that divide its dims. One that is too small for its axis is whole."""
        sizes = zip(self.axes, self.local_shape, self.shape, strict=True)
        return tuple(axis if local != whole else None for axis, local, whole in sizes)


@dataclass(frozen=True)
class Memory:
    """Bytes in a device's memory when most is in use."""

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    where: str

    @property
    def peak(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.activations


@dataclass(frozen=True)
class Plan:
    """A training step on a mesh, as far as it can be known without running it.

    Attributes:
        model: The model's name.
        device: The figures that were assumed.
        mesh: The mesh's axes and their sizes.
        batch: The arrays of the global batch.
        variables: The variables of the model.
        memory: What is in a device's memory at its peak.
        transfers: The collectives of the step.
        flops: Operations that a device does in a step.
        seconds: Estimated time of a step, in which collectives run beside the compute that the
            graph has for them.
        compute_seconds: The part that the device computes.
        network_seconds: How long collectives take in all.
        exposed_seconds: How long the device waits for them.
        mfu: The share of the device's peak operations that the step's own make up.
        warnings: What a user should know.
        repeats: Blocks that were captured in part: the first one's path, and how many there are.
        spans: What happens when, of the part of the step that was captured.
        planning_seconds: How long planning took.
    """

    model: str
    device: Device
    mesh: dict[str, int]
    batch: list[str]
    variables: list[Variable]
    memory: Memory
    transfers: list[Transfer]
    flops: float
    seconds: float
    compute_seconds: float
    network_seconds: float
    exposed_seconds: float
    mfu: float
    warnings: list[str]
    repeats: dict[str, int]
    spans: list[Any] = field(repr=False)
    planning_seconds: float = 0.0

    @property
    def memory_limit(self) -> int:
        """What of a device's memory a program can use."""
        return self.device.memory - self.device.reserved

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.memory_limit

    @property
    def transferred_bytes(self) -> int:
        return sum(t.nbytes * t.count for t in self.transfers)

    def show(self) -> None:
        """Print the plan as tables."""
        from keras_spmd.plan._text import show

        show(self)

    def __str__(self) -> str:
        from keras_spmd.plan._text import text_of

        return text_of(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan as numbers, strings, lists and dicts."""
        result = dataclasses.asdict(self)
        result["memory"] |= {"peak": self.memory.peak, "limit": self.memory_limit}
        result["fits"] = self.fits
        for variable, row in zip(self.variables, result["variables"], strict=True):
            row |= {"nbytes": variable.nbytes, "local_nbytes": variable.local_nbytes}
        return result

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """The plan as JSON, which is also written to `path`, if given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

    def to_html(self, path: str | os.PathLike) -> None:
        """Write the plan as one page with pictures, which needs no network."""
        from keras_spmd.plan._html import page_of

        with open(path, "w", encoding="utf-8") as file:
            file.write(page_of(self))
