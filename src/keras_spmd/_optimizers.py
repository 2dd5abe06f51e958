"""Updates on shards: gradients take their variable's layout first, and accumulate before that.

With `gradient_accumulation_steps` a gradient that isn't in its variable's layout, such as a pending
sum, is kept and added to on each rank by itself until the step that updates. Keras's accumulators
get what needs no communication, and everything when somebody reads the optimizer's variables.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from keras.src.backend.common.stateless_scope import in_stateless_scope
from torch.distributed.tensor import DTensor

from keras_spmd import _layouts, _promotion
from keras_spmd._capturing import is_capturing
from keras_spmd._gradients import lay_out_gradients

# Where an optimizer keeps sums of gradients that are not in their variable's layout yet, by the
# variable's index; past Keras's tracking of attributes.
_PENDING = "_keras_spmd_pending"
# Where it keeps slots that have a layout of their own, by the id of the weight, with the weight.
_SLOTS = "_keras_spmd_slots"


def core_or(original: Any) -> Any:
    """What Keras's Nadam uses of its backend: two numbers stay tensors while a step is captured."""

    def convert_to_numpy(x: Any) -> Any:
        return x if is_capturing() else original.convert_to_numpy(x)

    return SimpleNamespace(convert_to_numpy=convert_to_numpy)


def apply_or(original: Callable) -> Callable:
    """`Optimizer.apply`: lay the gradients out first."""

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        known = self._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(known)
        values = [v._value for v in variables]
        targets = _targets(self, variables)
        if len(grads) != len(values) or not any(isinstance(x, DTensor) for x in [*grads, *values]):
            return original(self, grads, trainable_variables)
        with torch.no_grad(), _promotion.promoting():
            if _waits(self):
                grads = _ready_to_wait(grads, variables, targets)
            else:
                grads = lay_out_gradients(grads, targets)
            return original(self, grads, variables if trainable_variables is not None else None)

    apply.__doc__ = original.__doc__
    return apply


def _waits(optimizer: Any) -> bool:
    """Whether gradients may stay as they are until the optimizer has accumulated them."""
    return bool(optimizer.gradient_accumulation_steps) and not in_stateless_scope()


def _ready_to_wait(
    grads: Sequence[Any], variables: Sequence[Any], targets: Sequence[torch.Tensor]
) -> list[Any]:
    """Gradients that Keras uses at once, or that need no communication, in their layouts."""
    return [
        lay_out_gradients([g], [target])[0]
        if getattr(v, "overwrite_with_gradient", False) or not isinstance(g, DTensor)
        else g
        for g, v, target in zip(grads, variables, targets, strict=True)
    ]


def add_slot_or(original: Callable) -> Callable:
    """`add_variable_from_reference`: remember slots that are not laid out as their weight is."""

    def add_variable_from_reference(self: Any, reference_variable: Any, *a: Any, **kw: Any) -> Any:
        slot = original(self, reference_variable, *a, **kw)
        if slot._layout is not None:
            note_slot(self, reference_variable, slot, slot._layout)
        return slot

    add_variable_from_reference.__doc__ = original.__doc__
    return add_variable_from_reference


def note_slot(optimizer: Any, weight: Any, slot: Any, layout: Any) -> None:
    given = getattr(weight, "_layout", None)
    if given is not None and layout.axes != given.axes:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        inner.__dict__.setdefault(_SLOTS, {})[id(weight)] = (weight, slot)


def _targets(optimizer: Any, variables: Sequence[Any]) -> list[torch.Tensor]:
    """What has the layout that each gradient should have: a slot of the weight, or the weight.

    A gradient that is used on shards of the slots arrives as shards, and the weight is gathered
    when it is updated.
    """
    slots = getattr(optimizer, "inner_optimizer", optimizer).__dict__.get(_SLOTS, {})
    targets = []
    for variable in variables:
        reference, slot = slots.get(id(variable), (None, None))
        targets.append(slot._value if reference is variable else variable._value)
    return targets


def apply_gradients_or(original: Callable) -> Callable:
    """`_backend_apply_gradients`: on the step that updates, what was kept is laid out."""

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
        pending: dict[int, DTensor] = self.__dict__.get(_PENDING, {})
        is_sharded = bool(pending) or any(isinstance(g, DTensor) for g in grads)
        if is_sharded and _waits(self) and _is_update_step(self):
            grads = [
                _sum(pending.get(self._get_variable_index(v)), g, v)
                for g, v in zip(grads, trainable_variables, strict=True)
            ]
            pending.clear()
            grads = lay_out_gradients(grads, _targets(self, trainable_variables))
        original(self, grads, trainable_variables)

    return _backend_apply_gradients


def _is_update_step(optimizer: Any) -> bool:
    return (int(optimizer._iterations) + 1) % optimizer.gradient_accumulation_steps == 0


def _sum(kept: DTensor | None, grad: Any, variable: Any) -> Any:
    if kept is None:
        return grad
    if isinstance(grad, DTensor) and _can_add(kept, grad):
        return _add(kept, grad)
    both = lay_out_gradients([kept, grad], [variable._value] * 2)
    return both[0] + both[1]


def _can_add(kept: DTensor, grad: DTensor) -> bool:
    return kept.device_mesh == grad.device_mesh and kept.placements == grad.placements


def _add(kept: DTensor, grad: DTensor) -> DTensor:
    local = kept.to_local().add_(grad.to_local())
    return _layouts.wrap_local(local, kept.device_mesh, kept.placements, kept.shape)


def increment_or(original: Callable) -> Callable:
    """`_backend_increment_gradient_accumulators`: keep what would need communication."""

    def _backend_increment_gradient_accumulators(self: Any, grads: Any, acc_grads: Any) -> None:
        ready: list[tuple[Any, Any]] = []
        index_of = {id(a): i for i, a in enumerate(self._accumulated_gradients)}
        for grad, accumulator in zip(grads, acc_grads, strict=True):
            if _waits(self) and _needs_communication(grad, accumulator._value):
                _keep(self, index_of[id(accumulator)], grad, accumulator)
            else:
                ready.append((grad, accumulator))
        if ready:
            original(self, [g for g, _ in ready], [a for _, a in ready])

    return _backend_increment_gradient_accumulators


def _needs_communication(grad: Any, value: torch.Tensor) -> bool:
    if not isinstance(grad, DTensor):
        return False
    return not isinstance(value, DTensor) or grad.placements != value.placements


def _keep(optimizer: Any, index: int, grad: DTensor, accumulator: Any) -> None:
    pending: dict[int, DTensor] = optimizer.__dict__.setdefault(_PENDING, {})
    kept = pending.get(index)
    if kept is not None and _can_add(kept, grad):
        pending[index] = _add(kept, grad)
        return
    if kept is not None:
        _fold({index: kept}, [accumulator])
    # A copy: the gradient belongs to the caller.
    local = grad.to_local().clone()
    pending[index] = _layouts.wrap_local(local, grad.device_mesh, grad.placements, grad.shape)


def _settle(optimizer: Any) -> None:
    """Bring what was kept into Keras's accumulators. Takes all ranks."""
    pending = optimizer.__dict__.get(_PENDING)
    if pending:
        taken = dict(pending)
        pending.clear()
        _fold(taken, [optimizer._accumulated_gradients[i] for i in taken])


def _fold(pending: dict[int, DTensor], accumulators: Sequence[Any]) -> None:
    with torch.no_grad(), _promotion.promoting():
        laid_out = lay_out_gradients(list(pending.values()), [a._value for a in accumulators])
        for grad, accumulator in zip(laid_out, accumulators, strict=True):
            accumulator.assign_add(grad)


def variables_or(original: property) -> property:
    """`optimizer.variables`: what was kept belongs into them."""
    assert original.fget is not None
    read = original.fget

    def variables(self: Any) -> list:
        _settle(self)
        return read(self)

    return property(variables, doc=original.__doc__)


def set_weights_or(original: Callable) -> Callable:
    """`optimizer.set_weights`: what was kept is overwritten too."""

    def set_weights(self: Any, weights: Any) -> None:
        self.__dict__.pop(_PENDING, None)
        original(self, weights)

    set_weights.__doc__ = original.__doc__
    return set_weights
