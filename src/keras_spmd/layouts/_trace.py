"""A model is called once with tensors that have no memory, and their dims are followed."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import keras
import torch
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.backend.torch import core as keras_torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from keras_spmd._notices import warn_once
from keras_spmd.layouts import _follow_layers as _follow_layers  # registers its rules
from keras_spmd.layouts._dims import Dim, Tensors, tensors_in
from keras_spmd.layouts._follow import Call, follow
from keras_spmd.layouts._models import symbols

# What a length that the model leaves open may be: learned positions may be few, images need more.
_LENGTHS = (8, 64, 256)


class Trace:
    """What was seen: each group of dims once, and what the layers' outputs look like."""

    def __init__(self) -> None:
        self.tensors = Tensors()
        self.outputs: dict[str, tuple[int, ...]] = {}
        # Products with weights: who made what is multiplied, and the weight's rows and columns.
        self.products: list[tuple[str, Dim, Dim]] = []
        # The dims of each variable.
        self.weights: list[list[Dim]] = []


class _Following(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **(kwargs or {}))
        path, tensors = current_path(), self.trace.tensors
        call = Call(op, args, kwargs or {}, results, tensors, path)
        if call.name in ("mm", "addmm", "bmm", "baddbmm"):
            x, kernel = call.inputs[-2:]
            if tensors.is_data(x) and not tensors.is_data(kernel):
                rows, columns = tensors.dims(kernel)[-2:]
                self.trace.products.append((tensors.maker(x), rows, columns))
        follow(op, call)
        if call.results:
            self.trace.outputs[path] = tuple(call.results[0].shape)
        return results


def trace(model: keras.Model, inputs: Any = None) -> Trace | None:
    """Follow the dims of the model's weights; None, with a warning, if it can't be called so."""
    errors: list[Exception] = []
    for length in _LENGTHS:
        for example in _examples(model, inputs):
            try:
                return _follow_call(model, example, length)
            except Exception as error:
                # Whatever a user's layer may raise: the warning below tells it.
                errors.append(error)
    reason = errors[0] if errors else "the shapes of its inputs are not known; pass inputs="
    warn_once(
        ("not traced", model.name),
        f"What the model '{model.name}' does with its weights could not be followed, so no layer "
        f"of it is sharded by features: {reason!r}. Lay its weights out with overrides=.",
    )
    return None


def _examples(model: keras.Model, inputs: Any) -> list[Any]:
    """What the model may be called with."""
    if inputs is not None:
        return [inputs]
    functional = getattr(model, "_functional", model)
    if hasattr(functional, "_inputs_struct"):
        return [functional._inputs_struct]
    shapes = model._build_shapes_dict
    if not shapes or len(shapes) > 1:
        return []
    (shape,) = shapes.values()
    is_one = all(size is None or isinstance(size, int) for size in shape)
    # Keras remembers the shapes that a model was built with, and not the dtypes.
    return [
        keras.KerasTensor(shape, dtype) if is_one else _tensors_of(shape, dtype)
        for dtype in ("float32", "int32")
    ]


def _tensors_of(shapes: Any, dtype: str) -> Any:
    if isinstance(shapes, dict):
        return {name: keras.KerasTensor(shape, dtype) for name, shape in shapes.items()}
    return [keras.KerasTensor(shape, dtype) for shape in shapes]


def _follow_call(model: keras.Model, example: Any, length: int) -> Trace:
    seen, scope = Trace(), StatelessScope()
    # Not Keras's "meta" device, for which some of its ops compute a shape and nothing else.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _quietly(), fake, keras_torch.device_scope("cpu"):
        inputs = symbols(example, length, device="cpu")
        for x in tensors_in(keras.tree.flatten(inputs)):
            dims = [Dim(size) for size in x.shape]
            for dim in dims:
                dim.is_data = True
            seen.tensors.put(x, dims, is_data=True)
        for variable in model.weights:
            scope.add_update((variable, _weight(variable, seen)))
        with scope, torch.no_grad(), _Following(seen):
            outputs = model(inputs, training=False)
    for x in tensors_in(keras.tree.flatten(outputs)):
        for dim in seen.tensors.dims(x):
            dim.note_output()
    return seen


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """torch logs an op that fails, which here only means that another length is tried."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _weight(variable: Any, seen: Trace) -> torch.Tensor:
    dtype = keras_torch.to_torch_dtype(variable._dtype)
    symbol = torch.empty(tuple(variable.shape), dtype=dtype)
    seen.weights.append([Dim(size) for size in symbol.shape])
    seen.tensors.put(symbol, seen.weights[-1], is_data=False)
    return symbol
