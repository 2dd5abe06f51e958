"""A model that exists already is laid out anew, in place."""

from collections.abc import Iterator
from typing import Any

import keras
from keras.distribution import LayoutMap
from keras.src.utils.torch_utils import TorchModuleWrapper

from keras_spmd import _layouts, _optimizers
from keras_spmd._variables import use_sharded_parameters


def apply(model: keras.Model, layout_map: LayoutMap) -> None:
    """Lay the variables of a model out as the map says, with the values that they have.

    Example:

    >>> import keras, keras_spmd
    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    >>> mesh = keras.distribution.DeviceMesh((1,), ("batch",))
    >>> layout_map = keras_spmd.layouts.fsdp(model, mesh)
    >>> keras.distribution.set_distribution(
    ...     keras.distribution.ModelParallel(layout_map=layout_map))
    >>> keras_spmd.layouts.apply(model, layout_map)

    For a model that was made, loaded or trained before the distribution was set, or under another
    one. Its optimizer's state follows the weights, or has the layout of a key of its own; metrics
    and seeds are whole on every device. Every device held the whole model before, so it must fit:
    a model that doesn't is made under the distribution instead. Call it on all ranks.

    Args:
        model: A model that is built.
        layout_map: The layouts. Its distribution must be active.
    """
    distribution = _layouts.active_distribution()
    if distribution is None or getattr(distribution, "_layout_map", None) is not layout_map:
        raise ValueError(
            "The layout map is not that of the active distribution. Call keras.distribution."
            "set_distribution(keras.distribution.ModelParallel(layout_map=layout_map)) first. "
            f"Received layout_map={layout_map}, and the active distribution is {distribution}."
        )
    if not model.built:
        raise ValueError(
            f"The model '{model.name}' has no variables yet. Just build it: under the active "
            "distribution they are made in their layouts."
        )
    for variable in model.weights:
        _lay_out(variable, distribution.get_variable_layout(_without_layout(variable)))
    for variable, layout in _state_of_optimizer(model, distribution):
        _lay_out(variable, layout)
    known = {id(v) for v in model.weights}
    others = [*model.variables, *model.metrics_variables]
    for variable in {id(v): v for v in others if id(v) not in known}.values():
        _lay_out(variable, _whole(variable, distribution))
    _tell_layers(model)


def _lay_out(variable: Any, layout: Any) -> None:
    variable._layout, variable._keras_spmd_resolved = layout, True
    # As when it was made, from the parameter that it has.
    variable._initialize(variable._value)


def _tell_layers(model: keras.Model) -> None:
    """Whoever holds the old parameters gets the new ones; steps are made anew."""
    for layer in model._flatten_layers():
        if isinstance(layer, TorchModuleWrapper):
            use_sharded_parameters(layer.module)
        if hasattr(layer, "_torch_params"):
            layer._track_variables()
    model.train_function = model.test_function = model.predict_function = None


def _without_layout(variable: Any) -> Any:
    """Keras asks a variable for a layout that it was given before it looks into the map."""
    variable._layout = None
    return variable


def _whole(variable: Any, distribution: Any) -> Any:
    return _layouts.replicated_layout(distribution.device_mesh, len(variable.shape))


def _state_of_optimizer(model: keras.Model, distribution: Any) -> Iterator[tuple[Any, Any]]:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return
    weights = {v.path.replace("/", "_"): v for v in model.trainable_variables}
    for slot in optimizer.variables:
        own = distribution.get_tensor_layout(slot.path)
        weight = _weight_of(slot, weights)
        if own is not None and len(own.axes) <= len(slot.shape):
            if weight is not None:
                _optimizers.note_slot(optimizer, weight, slot, own)
            yield slot, own
        elif weight is not None:
            yield slot, weight._layout
        else:
            yield slot, _whole(slot, distribution)


def _weight_of(slot: Any, weights: dict[str, Any]) -> Any:
    """The weight whose state it is: the longest path that its name begins with."""
    name = slot.path.rsplit("/", 1)[-1]
    paths = [path for path in weights if name.startswith(f"{path}_")]
    weight = weights[max(paths, key=len)] if paths else None
    return weight if weight is not None and weight.shape == slot.shape else None
