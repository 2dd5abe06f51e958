"""`ops.cond`, `ops.while_loop`, `ops.scatter` and `ops.slice` in a captured step: no value is read
on the host.

The value of a predicate is not known then, and reading it would stop the host at each step. So both
branches of a condition are computed and what they give is selected, variables that they write
included. A loop whose predicate is known is unrolled; another one runs as often as it may at most,
each time as a condition.
"""

from collections.abc import Callable
from typing import Any

import torch
from keras.src import tree
from keras.src.backend.torch.core import convert_to_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from keras_spmd._capturing import here
from keras_spmd.graph._scope import Branch

_LONGEST_LOOP = 128


def cond_or(original: Callable) -> Callable:
    """`ops.cond`: both branches, and a selection of what they return and write."""

    def cond(pred: Any, true_fn: Callable, false_fn: Callable) -> Any:
        if here.scope is None or not isinstance(pred, torch.Tensor) or pred.is_meta:
            return original(pred, true_fn, false_fn)
        return _selected(pred, true_fn, false_fn)

    cond.__doc__ = original.__doc__
    return cond


def _selected(pred: torch.Tensor, true_fn: Callable, false_fn: Callable) -> Any:
    scope = here.scope
    branches, outputs = [], []
    for function in (true_fn, false_fn):
        branch = Branch(scope)
        with branch:
            outputs.append(function())
        branches.append(branch.written())
    pred = pred.reshape(()).bool()
    for key in {**branches[0], **branches[1]}:
        variable = (branches[0].get(key) or branches[1][key])[0]
        before = scope.get_current_value(variable)
        values = [written[key][1] if key in written else before for written in branches]
        scope.add_update((variable, torch.where(pred, *values)))
    return tree.map_structure(lambda a, b: _select(pred, a, b), *outputs)


def _select(pred: torch.Tensor, a: Any, b: Any) -> Any:
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b:
        return a
    return torch.where(pred, a, b)


def scatter_or(original: Callable) -> Callable:
    """`ops.scatter`, which confusion matrices are made with: without a loop over its indices."""

    def scatter(indices: Any, values: Any, shape: Any) -> Any:
        if here.scope is None:
            return original(indices, values, shape)
        indices, values = convert_to_tensor(indices), convert_to_tensor(values)
        count = indices.shape[-1]
        places = indices.reshape(-1, count).unbind(-1)
        zeros = torch.zeros(tuple(shape), dtype=values.dtype, device=values.device)
        return zeros.index_put(places, values.reshape(-1, *shape[count:]), accumulate=True)

    scatter.__doc__ = original.__doc__
    return scatter


def slice_or(original: Callable) -> Callable:
    """`ops.slice` from a place that is a tensor: by index, since a view would need its value."""

    def slice_(inputs: Any, start_indices: Any, shape: Any) -> Any:
        starts = list(start_indices)
        are_known = all(isinstance(start, int) for start in starts)
        if here.scope is None or are_known or not all(isinstance(n, int) for n in shape):
            return original(inputs, start_indices, shape)
        x = convert_to_tensor(inputs)
        for dim, (start, length) in enumerate(zip(starts, shape, strict=True)):
            if length != x.shape[dim]:
                x = x.index_select(dim, torch.arange(length, device=x.device) + start)
        return x

    slice_.__doc__ = original.__doc__
    return slice_


def while_loop_or(original: Callable) -> Callable:
    """`ops.while_loop`: unrolled as far as the predicate is known."""

    def while_loop(
        cond: Callable, body: Callable, loop_vars: Any, maximum_iterations: int | None = None
    ) -> Any:
        if here.scope is None:
            return original(cond, body, loop_vars, maximum_iterations)
        is_single = not isinstance(loop_vars, (tuple, list))
        state = (loop_vars,) if is_single else tuple(loop_vars)
        count = 0
        while maximum_iterations is None or count < maximum_iterations:
            goes_on = cond(*state)
            known = _known(goes_on)
            if known is False:
                break
            if known is None:
                state = _masked(cond, body, state, goes_on, maximum_iterations, count)
                break
            state = _as_tuple(body(*state))
            count += 1
        return state[0] if is_single else state

    while_loop.__doc__ = original.__doc__
    return while_loop


def _as_tuple(x: Any) -> tuple:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _known(pred: Any) -> bool | None:
    """The predicate's value, if it doesn't depend on the graph's inputs."""
    if isinstance(pred, DTensor):
        pred = pred.to_local()
    try:
        return bool(pred)
    except (DataDependentOutputException, GuardOnDataDependentSymNode):
        return None


def _masked(
    cond: Callable, body: Callable, state: tuple, goes_on: Any, most: int | None, count: int
) -> tuple:
    """The rest of a loop, as often as it may run at most."""
    if most is None or most - count > _LONGEST_LOOP:
        bool(goes_on)  # can't be captured, which this says with the line
    assert most is not None
    for _ in range(count, most):
        state = _selected(goes_on, lambda s=state: _as_tuple(body(*s)), lambda s=state: s)
        goes_on = torch.logical_and(goes_on.reshape(()), cond(*state).reshape(()))
    return state
