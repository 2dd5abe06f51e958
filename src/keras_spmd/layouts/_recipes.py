"""Layouts for whole models: who holds which part of which weight."""

from typing import Any

import keras
from keras.distribution import DeviceMesh, LayoutMap

from keras_spmd.layouts._assembly import Overrides, layout_map_of, size_of_axis, slot_layouts
from keras_spmd.layouts._models import model_at_hand
from keras_spmd.layouts._pairs import Axes, no_axes, shard_pairs
from keras_spmd.layouts._sequence import sequence_layouts
from keras_spmd.layouts._shares import add_shares
from keras_spmd.layouts._trace import trace


def fsdp(
    model: Any,
    mesh: DeviceMesh,
    *,
    axis: str = "batch",
    min_size: int = 1024,
    overrides: Overrides | None = None,
    inputs: Any = None,
) -> LayoutMap:
    """Shard every weight over the data axis, and with it its gradient and optimizer state.

    Example:

    >>> import keras, keras_spmd
    >>> def make_model():
    ...     return keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    >>> mesh = keras.distribution.DeviceMesh((1,), ("batch",))
    >>> layout_map = keras_spmd.layouts.fsdp(make_model, mesh)
    >>> layout_map["sequential/dense/kernel"].axes
    (None, 'batch')
    >>> keras.distribution.set_distribution(
    ...     keras.distribution.ModelParallel(layout_map=layout_map))
    >>> model = make_model()

    Each device keeps its share of the weights (ZeRO's third stage, "fully sharded data parallel").
    They are gathered for the layers that use them, and gradients arrive as shares.

    Args:
        model: A model, or the function that makes it. Nothing of what it makes here is kept.
        mesh: The mesh.
        axis: The axis of the mesh that batches are divided over.
        min_size: Variables with fewer elements than this stay whole: gathering them costs more
            than it saves.
        overrides: Layouts of your own, by patterns for paths; they win.
        inputs: What the model is called with, if it is a subclassed model that isn't built: a
            batch, or `keras.Input`s.

    Returns:
        A layout map with a key for each variable. The key for one in a `Sequential` names it twice:
        Keras leaves the name of the `Sequential` out of paths when it loads the model.
    """
    count = size_of_axis(mesh, axis)
    with model_at_hand(model, inputs) as made:
        axes = no_axes(made.weights)
        add_shares(axes, made.weights, axis, count, min_size)
        return layout_map_of(mesh, made, axes, overrides=overrides)


def zero1(
    model: Any,
    mesh: DeviceMesh,
    *,
    axis: str = "batch",
    min_size: int = 1024,
    overrides: Overrides | None = None,
    inputs: Any = None,
) -> LayoutMap:
    """Shard the optimizer's state over the data axis; weights stay whole on every device.

    Example:

    >>> import keras, keras_spmd
    >>> def make_model():
    ...     return keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    >>> mesh = keras.distribution.DeviceMesh((1,), ("batch",))
    >>> layout_map = keras_spmd.layouts.zero1(make_model, mesh)
    >>> layout_map["adamw/sequential_dense_kernel_momentum"].axes
    (None, 'batch')
    >>> layout_map["sequential/dense/kernel"].axes
    (None, None)

    Each device updates its share of the weights (ZeRO's first stage). Gradients arrive there as
    shares, and the new weights are gathered.

    Args:
        model: A model, or the function that makes it. Nothing of what it makes here is kept.
        mesh: The mesh.
        axis: The axis of the mesh that batches are divided over.
        min_size: State of variables with fewer elements than this stays whole.
        overrides: Layouts of your own, by patterns for paths; they win.
        inputs: What the model is called with, if it is a subclassed model that isn't built: a
            batch, or `keras.Input`s.

    Returns:
        A layout map with a key for each variable, and one for the state of each.
    """
    count = size_of_axis(mesh, axis)
    with model_at_hand(model, inputs) as made:
        whole, shares = no_axes(made.weights), no_axes(made.weights)
        add_shares(shares, made.weights, axis, count, min_size)
        slots = slot_layouts(made, shares)
        return layout_map_of(mesh, made, whole, slots=slots, overrides=overrides)


def tensor_parallel(
    model: Any,
    mesh: DeviceMesh,
    *,
    axis: str = "model",
    min_size: int = 1024,
    overrides: Overrides | None = None,
    inputs: Any = None,
) -> LayoutMap:
    """Divide layers over the model axis: columns of one, rows of the next, attention by heads.

    Example:

    >>> import keras, keras_spmd
    >>> def make_model():
    ...     dense = keras.layers.Dense
    ...     return keras.Sequential([keras.Input((8,)), dense(64, "relu"), dense(8), dense(2)])
    >>> mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"))
    >>> layout_map = keras_spmd.layouts.tensor_parallel(make_model, mesh)
    >>> [layout_map[f"sequential/{name}/kernel"].axes for name in ("dense", "dense_1")]
    [(None, 'model'), ('model', None)]

    The model is called once with tensors that have no memory, to see which dims of its weights
    belong together: those that one layer makes, that only pass through elementwise ops, attention
    and the like, and that the next layer sums over. Each such group is sharded as a whole, which
    takes one sum in the forward pass and one in the backward pass. Vocabularies of embeddings and
    the features of the model's output are sharded too. All that doesn't divide evenly by the axis,
    or isn't understood, stays whole.

    Args:
        model: A model, or the function that makes it. Nothing of what it makes here is kept.
        mesh: The mesh.
        axis: The axis of the mesh that layers are divided over.
        min_size: Embeddings and output layers with fewer elements than this stay whole.
        overrides: Layouts of your own, by patterns for paths; they win.
        inputs: What the model is called with, if it is a subclassed model: a batch, or
            `keras.Input`s.

    Returns:
        A layout map with a key for each variable. The key for one in a `Sequential` names it twice:
        Keras leaves the name of the `Sequential` out of paths when it loads the model.
    """
    with model_at_hand(model, inputs) as made:
        axes = _pairs_of(made, mesh, axis, min_size, inputs)
        return layout_map_of(mesh, made, axes, overrides=overrides)


def _pairs_of(made: keras.Model, mesh: DeviceMesh, axis: str, min_size: int, inputs: Any) -> Axes:
    count, seen = size_of_axis(mesh, axis), trace(made, inputs)
    return (
        no_axes(made.weights)
        if seen is None
        else shard_pairs(seen, made.weights, axis, count, min_size)[0]
    )


def sequence_parallel(
    model: Any,
    mesh: DeviceMesh,
    *,
    axis: str = "model",
    data_axis: str | None = None,
    min_size: int = 1024,
    overrides: Overrides | None = None,
    inputs: Any = None,
) -> LayoutMap:
    """`tensor_parallel`, and between the layers each device keeps its part of the sequence.

    Example:

    >>> import keras, keras_spmd
    >>> def make_model():
    ...     x = keras.Input((32, 64))
    ...     y = keras.layers.LayerNormalization(name="norm")(x)
    ...     y = keras.layers.Dense(256, "gelu", name="up")(y)
    ...     return keras.Model(x, x + keras.layers.Dense(64, name="down")(y))
    >>> mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"))
    >>> layout_map = keras_spmd.layouts.sequence_parallel(make_model, mesh)
    >>> layout_map["up/kernel"].axes, layout_map["down/output"].axes
    ((None, 'model'), ('batch', 'model', None))

    What is normalized, dropped and added between the layers takes a part of the memory and the
    time, and the same bytes are sent: sums arrive as parts, which are gathered for the next layer.

    Args:
        model: A model, or the function that makes it. Nothing of what it makes here is kept.
        mesh: The mesh.
        axis: The axis of the mesh that layers and sequences are divided over.
        data_axis: The axis of the mesh that batches are divided over. Defaults to the first one
            that isn't `axis`.
        min_size: Embeddings and output layers with fewer elements than this stay whole.
        overrides: Layouts of your own, by patterns for paths; they win.
        inputs: What the model is called with, if it is a subclassed model: a batch, or
            `keras.Input`s.

    Returns:
        A layout map with a key for each variable, and one for the outputs of layers that change
        how the sequence is laid out: `"<layer path>/output"`.
    """
    count = size_of_axis(mesh, axis)
    if data_axis is None:
        data_axis = next((name for name in mesh.axis_names if name != axis), None)
    else:
        size_of_axis(mesh, data_axis, "data_axis")
    with model_at_hand(model, inputs) as made:
        seen = trace(made, inputs)
        if seen is None:
            return layout_map_of(mesh, made, no_axes(made.weights), overrides=overrides)
        axes, chosen = shard_pairs(seen, made.weights, axis, count, min_size)
        outputs = sequence_layouts(seen, chosen, axis, data_axis)
        return layout_map_of(mesh, made, axes, outputs=outputs, overrides=overrides)


def hybrid(
    model: Any,
    mesh: DeviceMesh,
    *,
    data_axis: str = "batch",
    model_axis: str = "model",
    fsdp: bool = True,
    min_size: int = 1024,
    overrides: Overrides | None = None,
    inputs: Any = None,
) -> LayoutMap:
    """Divide layers over one axis, and what is left of each weight over the other.

    Example:

    >>> import keras, keras_spmd
    >>> def make_model():
    ...     dense = keras.layers.Dense
    ...     return keras.Sequential([keras.Input((64,)), dense(256, "relu"), dense(64)])
    >>> mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"))
    >>> layout_map = keras_spmd.layouts.hybrid(make_model, mesh)
    >>> [layout_map[f"sequential/{name}/kernel"].axes for name in ("dense", "dense_1")]
    [('batch', 'model'), ('model', 'batch')]

    `tensor_parallel` on the model axis, and `fsdp` on another dim of the same weights. The mesh may
    have further axes.

    Args:
        model: A model, or the function that makes it. Nothing of what it makes here is kept.
        mesh: The mesh.
        data_axis: The axis of the mesh that batches are divided over.
        model_axis: The axis of the mesh that layers are divided over.
        fsdp: Whether weights are sharded over the data axis too.
        min_size: Variables with fewer elements than this are not sharded over the data axis, and
            embeddings and output layers of that size not at all.
        overrides: Layouts of your own, by patterns for paths; they win.
        inputs: What the model is called with, if it is a subclassed model: a batch, or
            `keras.Input`s.

    Returns:
        A layout map with a key for each variable. The key for one in a `Sequential` names it twice:
        Keras leaves the name of the `Sequential` out of paths when it loads the model.
    """
    count = size_of_axis(mesh, data_axis, "data_axis")
    size_of_axis(mesh, model_axis, "model_axis")
    with model_at_hand(model, inputs) as made:
        axes = _pairs_of(made, mesh, model_axis, min_size, inputs)
        if fsdp:
            add_shares(axes, made.weights, data_axis, count, min_size)
        return layout_map_of(mesh, made, axes, overrides=overrides)
