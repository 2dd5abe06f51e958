"""What a checkpoint holds of a model, by names."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from keras.src.backend.common import global_state
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import global_seed_generator
from torch.distributed.tensor import DTensor

from keras_spmd import _callbacks, _processes
from keras_spmd._gathering import parts_of
from keras_spmd.checkpoints._names import OPTIMIZER, OPTIMIZERS, matched
from keras_spmd.checkpoints._safetensors import Part

# What a model may do without: it is there only after the first batch, or not at all.
OPTIONAL = ("metrics/", "random/", _callbacks.PREFIX)


def variables_of(model: Any) -> dict[str, Any]:
    """All variables of a model: weights, seeds, optimizers, metrics."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def add(group: str, variables: Iterable[Any]) -> None:
        for v in variables:
            if id(v) not in seen and v._value is not None:
                seen.add(id(v))
                found[_unique(f"{group}/{v.path}", found)] = v

    metrics = getattr(model, "metrics_variables", [])
    of_metrics = {id(v) for v in metrics}
    add("model", (v for v in model.variables if id(v) not in of_metrics))
    add("metrics", metrics)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        add("optimizer", optimizer.variables)
    for name, other in other_optimizers(model):
        add(f"{OPTIMIZERS}{name}", other.variables)
    generator = global_state.get_global_attribute("global_seed_generator")
    if generator is not None:
        add("random", [generator.state])
    return found


def other_optimizers(model: Any) -> Iterator[tuple[str, Any]]:
    """Those that a model has besides the one it was compiled with, by the name of the attribute."""
    for name, value in sorted(vars(model).items()):
        if isinstance(value, BaseOptimizer) and value is not getattr(model, "optimizer", None):
            yield name, value


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    if name not in taken:
        return name
    i = 2
    while f"{name}#{i}" in taken:
        i += 1
    return f"{name}#{i}"


def make_what_is_missing(model: Any, names: Iterable[str]) -> None:
    """An optimizer's state, and the seed of random numbers without one, if they were saved."""
    names = list(names)
    optimizer = getattr(model, "optimizer", None)
    saved = sum(name.startswith(OPTIMIZER) for name in names)
    if optimizer is not None and not optimizer.built and saved > len(optimizer.variables):
        optimizer.build(model.trainable_variables)
    if any(name.startswith("random/") for name in names):
        global_seed_generator()


def own_parts(variables: Mapping[str, Any], buffers: dict[str, torch.Tensor] | None) -> dict:
    """What this rank writes: each part of a variable is written by the first rank that has it.

    Args:
        variables: All variables, by name.
        buffers: Copies that an earlier call has made, to be used again: memory that is new takes
            longer to write to. None if the parts need not be copied.
    """
    rank = _processes.process_id()
    parts: dict[str, Part] = {}

    def add(name: str, x: torch.Tensor, start: tuple[int, ...]) -> None:
        parts[name] = Part(x.detach() if buffers is None else _copied(name, x, buffers), start)

    for name, v in variables.items():
        x = v._value
        if isinstance(x, DTensor):
            for owner, box in parts_of(x):
                if owner == rank:
                    add(name, x._local_tensor, tuple(side.start for side in box))
        elif rank == 0:
            add(name, x, (0,) * x.ndim)
    return parts


def _copied(name: str, x: torch.Tensor, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    """A copy in host memory."""
    buffer = buffers.get(name)
    if buffer is None or (buffer.shape, buffer.dtype) != (x.shape, x.dtype):
        buffer = buffers[name] = torch.empty(x.shape, dtype=x.dtype)
    return buffer.copy_(x.detach())


def check_fit(variables: Mapping[str, Any], saved: Mapping[str, dict], model: Any) -> None:
    """Raise if a checkpoint is not one of this model."""
    names = matched(variables, saved, model)
    is_trained = getattr(model, "optimizer", None) is not None
    # Those of the model's own get their state when they are built.
    unbuilt = [f"{OPTIMIZERS}{n}/" for n, o in other_optimizers(model) if not o.built]
    ignored = (*OPTIONAL, *(unbuilt if is_trained else [OPTIMIZER, OPTIMIZERS]))
    known = set(names.values())
    missing = [n for n in variables if n not in names and not n.startswith(ignored)]
    unexpected = [n for n in saved if n not in known and not n.startswith(ignored)]
    mismatched = [
        f"{name}: {tuple(saved[old]['shape'])} was saved, the model has "
        f"{tuple(variables[name].shape)}"
        for name, old in names.items()
        if not name.startswith(OPTIONAL) and not have_same_shape(variables[name], saved[old])
    ]
    if missing or unexpected or mismatched:
        raise ValueError(
            f"The checkpoint is not one of the model '{model.name}'."
            + _listed("Missing in the checkpoint", missing)
            + _listed("Not in the model", unexpected)
            + _listed("Of another shape", mismatched)
        )


def have_same_shape(variable: Any, saved: Mapping[str, Any]) -> bool:
    return tuple(saved["shape"]) == tuple(variable.shape)


def _listed(title: str, lines: list[str]) -> str:
    if not lines:
        return ""
    shown = lines[:20]
    more = [f"... and {len(lines) - 20} more"] if len(lines) > 20 else []
    return f"\n{title} ({len(lines)}):" + "".join(f"\n  {line}" for line in [*shown, *more])
