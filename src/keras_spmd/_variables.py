"""Variables: born sharded, assigned and read as if they were whole."""

from collections.abc import Callable
from typing import Any

import torch
from keras.src.backend.common import global_state
from keras.src.backend.torch import core as keras_torch
from keras.src.metrics.metric import Metric
from keras.src.random.seed_generator import SeedGenerator
from torch.distributed.tensor import DTensor

from keras_spmd import _coverage, _initial_values, _layouts, _promotion
from keras_spmd._layouts import BackendLayout
from keras_spmd._notices import warn_once

any_sharded = False


def _resolve_layout(variable: Any, shape: tuple[int, ...]) -> Any:
    """Give the variable its Keras layout, and return it; None without a distribution."""
    distribution = _layouts.active_distribution()
    if variable._layout is not None:
        if distribution is not None and not _is_state_of_optimizer():
            variable._shape = shape
            _coverage.note_variable(distribution, variable, layout_given=True)
        return variable._layout
    if distribution is None:
        return None
    if _is_state_of(Metric, SeedGenerator):
        # Counters and seeds are the same everywhere, whatever a pattern like '.*' says.
        variable._layout = _layouts.replicated_layout(distribution.device_mesh, len(shape))
    else:
        variable._shape = shape
        variable._layout = distribution.get_variable_layout(variable)
        if not _is_state_of_optimizer():
            _coverage.note_variable(distribution, variable, layout_given=False)
    return variable._layout


def _is_state_of(*kinds: type) -> bool:
    scopes = global_state.get_global_attribute("name_scope_stack") or []
    return bool(scopes) and isinstance(scopes[-1].caller, kinds)


def _is_state_of_optimizer() -> bool:
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    return _is_state_of(BaseOptimizer)


def _target(variable: Any, shape: tuple[int, ...]) -> BackendLayout | None:
    """Where a variable of this shape goes; None if it stays a plain tensor."""
    layout = _resolve_layout(variable, shape)
    if layout is None or isinstance(layout, BackendLayout):
        return layout
    placements = _layouts.placements_of(layout, shape, what=f"the variable '{variable.path}'")
    mesh = _layouts.compute_mesh(layout.device_mesh)
    return None if mesh is None else BackendLayout(mesh, placements)


def _is_symbolic() -> bool:
    return str(keras_torch.get_device()) == "meta"


def initialize_or(original: Callable) -> Callable:
    """`Variable._initialize`: from a value that this rank has whole."""

    def _initialize(self: Any, value: Any) -> None:
        if isinstance(value, torch.nn.Parameter):
            shape = tuple(value.shape)
        else:
            value = keras_torch.convert_to_tensor(value, dtype=self._dtype)
            shape = tuple(value.shape)
        target = None if _is_symbolic() else _target(self, shape)
        if target is None:
            if self.trainable and not _can_have_gradient(value):
                self._value = torch.nn.Parameter(value, requires_grad=False)
                return
            original(self, value)
            return
        whole = value.detach()
        if isinstance(whole, DTensor):
            sharded = whole.redistribute(target.device_mesh, target.placements)
        else:
            part = _layouts.local_slice(
                whole.to(target.device_mesh.device_type), target.device_mesh, target.placements
            )
            # A copy: a slice would keep the whole alive, and share memory with the caller's array.
            part = part.clone(memory_format=torch.contiguous_format)
            sharded = _layouts.wrap_local(part, target.device_mesh, target.placements, shape)
        if isinstance(value, torch.nn.Parameter):
            # A torch module holds this very object: it must become the sharded one in place.
            torch.utils.swap_tensors(value, _parameter(self, sharded))
            self._value = value
            _note_sharded()
        else:
            _adopt(self, sharded)

    return _initialize


def initialize_with_initializer_or(original: Callable) -> Callable:
    """`Variable._initialize_with_initializer`: this rank makes its own shard only."""

    def _initialize_with_initializer(self: Any, initializer: Callable) -> None:
        target = None if _is_symbolic() else _target(self, self._shape)
        if target is None:
            if self._layout is None or _is_symbolic() or str(keras_torch.get_device()) == "cpu":
                original(self, initializer)
                return
            # A mesh of one GPU draws what a mesh of many draws.
            value = _initial_values.local_values(initializer, self._shape, self._dtype, None, ())
            if value is None:
                original(self, initializer)
            else:
                self._value = _parameter(self, value)
            return
        mesh, placements = target
        if _initial_values.takes_layout(initializer):
            self._initialize(initializer(self._shape, dtype=self._dtype, layout=self._layout))
            return
        with keras_torch.device_scope(mesh.device_type):
            local = _initial_values.local_values(
                initializer, self._shape, self._dtype, mesh, placements
            )
        if local is None:
            self._initialize(self._convert_to_tensor(initializer(self._shape, dtype=self._dtype)))
        else:
            _adopt(self, _layouts.wrap_local(local, mesh, placements, self._shape))

    return _initialize_with_initializer


def _can_have_gradient(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _parameter(variable: Any, value: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value, requires_grad=variable.trainable and _can_have_gradient(value))


def _adopt(variable: Any, value: DTensor) -> None:
    variable._value = _parameter(variable, value)
    _note_sharded()


def _note_sharded() -> None:
    global any_sharded
    any_sharded = True
    _promotion.sync_with_distribution()


def direct_assign_or(original: Callable) -> Callable:
    """`Variable._direct_assign`: the value takes the variable's layout, not the other way round."""

    def _direct_assign(self: Any, value: Any) -> None:
        target = self._value
        if not isinstance(target, DTensor):
            if isinstance(value, DTensor):
                value = value.full_tensor()
            original(self, value)
            return
        with torch.no_grad():
            if isinstance(value, DTensor):
                local = value.redistribute(target.device_mesh, target.placements).to_local()
            else:
                value = torch.as_tensor(value, device=target.device)
                local = _layouts.local_slice(value, target.device_mesh, target.placements)
            target.to_local().copy_(local)

    return _direct_assign


def promoting_outside_of_scope(original: Callable) -> Callable:
    """Let a method that mixes a variable with plain tensors work without a distribution too."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any_sharded:
            return original(self, *args, **kwargs)
        with _promotion.promoting():
            return original(self, *args, **kwargs)

    method.__name__ = original.__name__
    method.__doc__ = original.__doc__
    return method


def layer_call_or(original: Callable) -> Callable:
    """`Layer.__call__`: sharded layers also work outside of the scope that made them."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        distribution = _layouts.active_distribution()
        if distribution is None:
            if not any_sharded or _promotion.is_promoting():
                return original(self, *args, **kwargs)
            with _promotion.promoting():
                return original(self, *args, **kwargs)
        _promotion.sync_with_distribution()
        outputs = original(self, *args, **kwargs)
        if self.__dict__.get("_keras_spmd_seen_in") != id(distribution) and self.built:
            _warn_of_plain_variables(self, distribution)
        return outputs

    __call__.__doc__ = original.__doc__
    return __call__


def _warn_of_plain_variables(layer: Any, distribution: Any) -> None:
    # Past Keras's attribute tracking, which may be locked by now.
    layer.__dict__["_keras_spmd_seen_in"] = id(distribution)
    if _layouts.is_mesh_of_one(distribution.device_mesh):
        return
    plain = [
        v
        for v in layer._trainable_variables + layer._non_trainable_variables
        if v._value is not None and not isinstance(v._value, DTensor)
    ]
    if plain:
        warn_once(
            ("plain variable", id(layer)),
            f"The variable '{plain[0].path}' of shape {tuple(plain[0].shape)} was made before the "
            "distribution was set, so every device holds all of it. To shard it, call "
            "keras.distribution.set_distribution(...) before the model is made.",
        )
