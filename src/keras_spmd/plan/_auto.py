"""Layouts chosen by dry runs: the fastest that fits."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_spmd._progress import progress
from keras_spmd.plan._figures import Device, device_of
from keras_spmd.plan._planner import make_plan
from keras_spmd.plan._report import Plan
from keras_spmd.plan._sizes import duration, size


@dataclass(frozen=True)
class Choice:
    """Which layouts were chosen, and why.

    Attributes:
        name: The name of the candidate.
        layouts: The candidate.
        plan: Its plan.
        plans: The plans of all candidates that could be planned.
        failures: Why the others could not.
        limit: The bytes that a step may take.
    """

    name: str
    layouts: Any
    plan: Plan
    limit: int
    plans: dict[str, Plan] = field(repr=False)
    failures: dict[str, str] = field(repr=False)

    @property
    def why(self) -> str:
        """The alternatives as a table, the best first."""
        rows = [("", "layouts", "step", "memory", "network", "")]
        for name, plan in sorted(self.plans.items(), key=lambda item: self._rank(item[1])):
            rows.append(
                (
                    "->" if name == self.name else "",
                    name,
                    duration(plan.seconds),
                    size(plan.memory.peak),
                    size(plan.transferred_bytes),
                    self._verdict(name, plan),
                )
            )
        rows += [("", name, "", "", "", why) for name, why in self.failures.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        cells = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in cells)

    def _rank(self, plan: Plan) -> tuple[bool, float]:
        return (plan.memory.peak > self.limit, plan.seconds)

    def _verdict(self, name: str, plan: Plan) -> str:
        if name == self.name:
            return "the fastest that fits"
        if plan.memory.peak > self.limit:
            return f"does not fit into {size(self.limit)}"
        ratio = plan.seconds / self.plan.seconds if self.plan.seconds else math.inf
        return f"{ratio:.2f}x the time"

    def __str__(self) -> str:
        return f"'{self.name}' is chosen:\n{self.why}"


def auto(
    model_fn: Callable[[], Any],
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    batch: Any,
    *,
    candidates: Mapping[str, Any],
    device: Device | str = "H100",
    device_memory: int | None = None,
    batch_axis: str | None = None,
    after_each: Callable[[], object] = lambda: None,
) -> Choice:
    """Plan a step with each of several layouts, and take the fastest one that fits.

    Example:

    >>> import keras, keras_spmd
    >>> from keras_spmd.plan._auto import auto
    >>> def make_model():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="first")])
    ...     model.compile("adamw", "mse")
    ...     return model
    >>> choice = auto(make_model, (4,), ("batch",), ((32, 64), (32, 64)), candidates={
    ...     "data parallel": None, "sharded": {".*kernel": ("batch",)}})
    >>> choice.name
    'data parallel'

    Args:
        model_fn: A function without arguments that makes and compiles the model.
        mesh_shape: The mesh.
        axis_names: The names of its axes.
        batch: The global batch, as for `keras_spmd.plan`.
        candidates: Layouts by name, each as for `keras_spmd.plan`.
        device: The figures of the devices.
        device_memory: Bytes that a step may take; by default what the device has.
        batch_axis: The axis that the batch is divided over; the first one by default.
        after_each: Called whenever a candidate has been planned.

    Returns:
        A `Choice`. `print` it to see the alternatives.
    """
    if not candidates:
        raise ValueError("There are no candidates: pass layouts by name, {'data parallel': None}.")
    limit = device_of(device).memory - device_of(device).reserved
    limit = limit if device_memory is None else device_memory
    plans: dict[str, Plan] = {}
    failures: dict[str, str] = {}
    with progress("Planning layouts", total=len(candidates)) as advance:
        for name, layouts in candidates.items():
            try:
                plans[name] = make_plan(
                    model_fn,
                    mesh_shape,
                    axis_names,
                    layouts,
                    batch,
                    device=device,
                    batch_axis=batch_axis,
                    whole=False,
                )
            except (ValueError, TypeError) as error:
                failures[name] = str(error).splitlines()[0]
            advance()
            after_each()
    if not plans:
        reasons = "; ".join(f"'{name}': {why}" for name, why in failures.items())
        raise ValueError(f"None of the candidates can be planned. {reasons}")
    fitting = {name: plan for name, plan in plans.items() if plan.memory.peak <= limit}
    if not fitting:
        name, plan = min(plans.items(), key=lambda item: item[1].memory.peak)
        raise ValueError(
            f"None of the candidates {list(plans)} fits into {size(limit)}; '{name}' needs least, "
            f"{size(plan.memory.peak)}. {plan.warnings[0] if plan.warnings else ''}".rstrip()
        )
    name = min(fitting, key=lambda name: fitting[name].seconds)
    return Choice(name, candidates[name], plans[name], limit, plans, failures)
