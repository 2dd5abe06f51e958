"""fit, evaluate and predict: each step gets its batch laid out."""

import contextlib
from collections.abc import Callable
from typing import Any

from keras.src.backend.torch.core import get_device

from keras_spmd import _callbacks, _data, _layouts, _promotion, _random, _transfer, _variables


def make_function_or(attribute: str) -> Callable[[Callable], Callable]:
    """`make_train_function` and its like: the step's batch is laid out before the step sees it.

    Also for a `train_step` that the user wrote, and for `train_on_batch`.
    """

    def wrap(original: Callable) -> Callable:
        def make_function(self: Any, force: bool = False) -> Any:
            before = getattr(self, attribute)
            original(self, force)
            step = getattr(self, attribute)
            if step is not before:
                setattr(self, attribute, _step_of(self, attribute, _with_layout(step)))
            return getattr(self, attribute)

        make_function.__doc__ = original.__doc__
        return make_function

    return wrap


def _step_of(model: Any, attribute: str, eager: Callable) -> Callable:
    _data.for_graph = bool(model.jit_compile)
    if not model.jit_compile:
        return eager
    # Not at the top: it imports Inductor.
    from keras_spmd.graph._step import Step

    return Step(model, attribute.removesuffix("_function"), eager)


def should_torch_compile_or(original: Callable) -> Callable:
    """`_should_torch_compile`: never; with `jit_compile=True` the whole step becomes a graph."""

    def _should_torch_compile(self: Any) -> bool:
        return False

    return _should_torch_compile


def _with_layout(step: Callable) -> Callable:
    def function(data: list) -> Any:
        if _layouts.active_mesh() is None:
            # A sharded model may be trained outside of the scope that made it.
            with _promotion.promoting() if _variables.any_sharded else contextlib.nullcontext():
                logs = step(data)
        else:
            batches = [_data.distribute_batch(batch) for batch in data]
            with _random.layouts_at_hand(batches):
                logs = step(batches)
        _transfer.read_ahead()
        return logs

    return function


def callback_list_init_or(original: Callable) -> Callable:
    """`CallbackList.__init__`: who saves comes last, and no callbacks in a thread of their own.

    They read logs, which may take a collective, and collectives must come in the same order on
    every rank. The logs of a graph are whole: on a GPU a thread may wait for them while the next
    step is launched, and on a CPU they are there, so that a thread only costs.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _callbacks.savers_last(self.callbacks)
        is_graph = bool(getattr(self.model, "jit_compile", False))
        is_on_gpu = get_device().startswith("cuda")
        if (is_graph and not is_on_gpu) or (_layouts.active_mesh() is not None and not is_graph):
            self._async_train = self._async_test = self._async_predict = False

    return __init__
