"""Variables: born sharded, assigned and read as if they were whole."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from keras.src.backend.common import global_state
from keras.src.backend.torch import core as keras_torch
from keras.src.initializers.constant_initializers import Zeros
from keras.src.metrics.metric import Metric
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import SeedGenerator
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from keras_spmd import _coverage, _initial_values, _layouts, _promotion, _random, _whereabouts
from keras_spmd._capturing import here
from keras_spmd._layouts import BackendLayout
from keras_spmd._notices import warn_once
from keras_spmd._planning import is_planning

any_sharded = False


def _resolve_layout(variable: Any, shape: tuple[int, ...]) -> Any:
    """Give the variable its Keras layout, and return it; None without a distribution."""
    distribution = _layouts.active_distribution()
    if distribution is None or getattr(variable, "_keras_spmd_resolved", False):
        return variable._layout
    variable._keras_spmd_resolved = True
    variable._shape = shape
    layout_given = variable._layout is not None
    if _is_state_of(Metric, SeedGenerator):
        # Counters and seeds are the same everywhere, whatever a pattern like '.*' says.
        variable._layout = _layouts.replicated_layout(distribution.device_mesh, len(shape))
        return variable._layout
    is_slot = _is_state_of(BaseOptimizer)
    if layout_given and is_slot:
        # Its weight's layout, unless a key names the slot itself.
        variable._layout = _coverage.slot_layout(distribution, variable.path) or variable._layout
    if not layout_given:
        variable._layout = distribution.get_variable_layout(variable)
    if is_slot:
        if not layout_given and len(variable._layout.axes) > len(shape):
            # Rows or columns of a weight, under a name that the weight's pattern matches.
            variable._layout = _layouts.replicated_layout(distribution.device_mesh, len(shape))
    else:
        _coverage.note_variable(distribution, variable, layout_given=layout_given)
    return variable._layout


def _is_state_of(*kinds: type) -> bool:
    scopes = global_state.get_global_attribute("name_scope_stack") or []
    return bool(scopes) and isinstance(scopes[-1].caller, kinds)


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


def init_or(original: Callable) -> Callable:
    """`Variable.__init__`: Keras 3.14 keeps the argument `layout` on JAX only."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self._layout = kwargs.get("layout")
        original(self, *args, **kwargs)

    return __init__


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
        if isinstance(whole, DTensor) and whole.device_mesh != target.device_mesh:
            whole = whole.full_tensor()
        if isinstance(whole, DTensor):
            sharded = whole.redistribute(target.device_mesh, target.placements)
        else:
            _promotion.check_promoted(whole, f"making the variable '{self.path}'")
            part = _layouts.local_slice(
                whole.to(target.device_mesh.device_type), target.device_mesh, target.placements
            )
            # A copy: a slice would keep the whole alive, and share memory with the caller's array.
            part = part.clone(memory_format=torch.contiguous_format)
            sharded = _layouts.wrap_local(part, target.device_mesh, target.placements, shape)
        _adopt(self, sharded)
        if isinstance(value, torch.nn.Parameter):
            _sharded_parameters[value] = self._value

    return _initialize


# What became of the parameters of torch modules, until the module has been given the new ones.
_sharded_parameters = WeakIdKeyDictionary()


def track_module_parameters_or(original: Callable) -> Callable:
    """`TorchModuleWrapper._track_module_parameters`: the module uses the sharded parameters too."""

    def _track_module_parameters(self: Any) -> None:
        original(self)
        use_sharded_parameters(self.module)

    return _track_module_parameters


def use_sharded_parameters(wrapped: torch.nn.Module) -> None:
    for module in wrapped.modules():
        for name, parameter in module._parameters.items():
            if parameter in _sharded_parameters:
                module._parameters[name] = _sharded_parameters[parameter]


def initialize_with_initializer_or(original: Callable) -> Callable:
    """`Variable._initialize_with_initializer`: this rank makes its own shard only."""

    def _initialize_with_initializer(self: Any, initializer: Callable) -> None:
        with _random.initial_values():
            initialize(self, initializer)

    def initialize(self: Any, initializer: Callable) -> None:
        if is_planning():
            # Nobody looks at the values, and a generator can't be seeded without them.
            initializer = Zeros()
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
            mesh, placements = target.device_mesh, target.placements
            if isinstance(value, DTensor) and value.device_mesh != mesh:
                value = value.full_tensor()
            if not isinstance(value, DTensor):
                value = torch.as_tensor(value, device=target.device)
                _promotion.check_promoted(value, f"assigning the variable '{self.path}'")
                local = _layouts.local_slice(value, mesh, placements)
                value = _layouts.wrap_local(local, mesh, placements, value.shape)
            # As one op on the DTensor, so that autograd notices that it was written.
            target.copy_(value.redistribute(mesh, placements))

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

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        distribution = _layouts.active_distribution()
        if distribution is None and not any_sharded:
            return original(self, *args, **kwargs)
        if any_sharded and torch.is_inference_mode_enabled():
            # torch can't make views of DTensors there; without gradients it is the same.
            with torch.inference_mode(False), torch.no_grad():
                return call(self, *args, **kwargs)
        if distribution is None:
            if _promotion.is_promoting():
                return original(self, *args, **kwargs)
            with _promotion.promoting():
                return original(self, *args, **kwargs)
        _promotion.sync_with_distribution()
        if not _promotion.is_promoting():
            # A mesh of one, where all tensors are plain.
            return original(self, *args, **kwargs)
        if global_state.get_global_attribute("current_call_ctx") is None:
            _whereabouts.note()
        is_new = self.__dict__.get("_keras_spmd_seen_in") != id(distribution)
        if is_new and self.built:
            _check_mesh(self, distribution)
        with _random.layouts_at_hand((args, kwargs)):
            outputs = original(self, *args, **kwargs)
        if is_new and self.built:
            _warn_of_plain_variables(self, distribution)
        return outputs

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if here.scope is None:
            return call(self, *args, **kwargs)
        with here.scope.origins.inside(self):
            outputs = call(self, *args, **kwargs)
        here.scope.origins.made(self, outputs)
        return outputs

    __call__.__doc__ = original.__doc__
    return __call__


def _check_mesh(layer: Any, distribution: Any) -> None:
    mesh = _layouts.compute_mesh(distribution.device_mesh)
    for v in layer._trainable_variables + layer._non_trainable_variables:
        if isinstance(v._value, DTensor) and v._value.device_mesh != mesh:
            raise ValueError(
                f"The variable '{v.path}' of shape {tuple(v.shape)} lives on the mesh "
                f"{v._value.device_mesh}, where it was made, but the active distribution has the "
                f"mesh {mesh}. Make the model under this distribution (and take the weights over "
                "with set_weights(model.get_weights()), or from a file), or set the one it was "
                "made under again."
            )


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
