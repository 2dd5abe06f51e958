"""The list of all rules, and how they get into DTensor and out again.

A rule is one of two kinds:

- `@sharding(...)` lists placements for which the op is right when every rank runs it on its own
  part. It goes in through torch's public `register_sharding`, and torch picks the cheapest.
- `@handler(...)` computes the op itself, where more is needed than that.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import register_sharding

# Names of ops, their rules, and the version of torch from which on it has rules itself.
shardings: list[tuple[str, Callable, tuple[int, int] | None]] = []
_handlers: list[tuple[str, Callable]] = []
_saved: list[tuple[dict, Any, Any]] = []
_ABSENT = object()
TORCH_VERSION = tuple(int(n) for n in torch.__version__.split(".")[:2])


def sharding(
    *op_names: str, before: tuple[int, int] | None = None
) -> Callable[[Callable], Callable]:
    """Register placements for ops by name, e.g. 'aten.convolution.default'.

    With `before`, on versions of torch that are older than this one.
    """

    def register(function: Callable) -> Callable:
        shardings.extend((name, function, before) for name in op_names)
        return function

    return register


def handler(*op_names: str) -> Callable[[Callable], Callable]:
    """Register a function `(op, args, kwargs) -> result` for ops by name."""

    def register(function: Callable) -> Callable:
        _handlers.extend((name, function) for name in op_names)
        return function

    return register


def install() -> None:
    """Put all rules into DTensor."""
    dispatcher = DTensor._op_dispatcher
    _remember_sizes()
    for name, function, before in shardings:
        op = find(name)
        if op is not None and (before is None or before > TORCH_VERSION):
            for table in _tables():
                _save(table, op)
                table.pop(op, None)
            register_sharding(op)(function)
            dispatcher.sharding_propagator.op_to_schema_info[op] = _schema_info(op)
    for name, function in _handlers:
        op = find(name)
        if op is not None:
            _save(dispatcher._custom_op_handlers, op)
            dispatcher._custom_op_handlers[op] = function
    _clear_sharding_prop_cache()


def uninstall() -> None:
    """Give DTensor its own rules back."""
    while _saved:
        table, op, value = _saved.pop()
        if value is _ABSENT:
            table.pop(op, None)
        else:
            table[op] = value
    _clear_sharding_prop_cache()


def _tables() -> list[dict]:
    """Everywhere in torch 2.11 to 2.15 that may hold a rule for an op.

    `register_sharding` writes into one of them only, and the others would win over it.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    names = (
        "op_strategy_funcs",
        "op_to_rules",
        "op_to_schema_info",
        "op_single_dim_strategy_funcs",
        "op_to_schema_info_for_single_dim_strategy",
    )
    tables = [getattr(propagator, name) for name in names if hasattr(propagator, name)]
    return [DTensor._op_dispatcher._custom_op_handlers, *tables]


def _schema_info(op: Any) -> RuntimeSchemaInfo:
    """Which arguments a cached decision depends on: all that are not tensors.

    `register_sharding` overlooks lists, such as the strides of a convolution.
    """
    others = [a for a in op._schema.arguments if "Tensor" not in str(a.type)]
    first = min(
        (i for i, a in enumerate(op._schema.arguments) if a in others and not a.kwarg_only),
        default=100,
    )
    names = [a.name for a in others if a.kwarg_only]
    return RuntimeSchemaInfo(first, names or None, needs_pytree=True)


def _remember_sizes() -> None:
    """Make torch's own decisions depend on all whole numbers among the arguments.

    torch keeps the shape of a result with a decision, but for some ops it forgets what the shape
    depends on: `topk` of 3 after `topk` of 2 has the shape of the latter; in torch 2.11 so has
    padding.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    for names in (
        ("op_strategy_funcs", "op_to_rules", "op_to_schema_info"),
        ("op_single_dim_strategy_funcs", "op_to_schema_info_for_single_dim_strategy"),
    ):
        *ruled, infos = (getattr(propagator, name, {}) for name in names)
        for op in {op for rules in ruled for op in rules}:
            known = infos.get(op, RuntimeSchemaInfo())
            wanted = _with_sizes(op, known)
            if wanted != known:
                _save(infos, op)
                infos[op] = wanted


def _with_sizes(op: Any, info: RuntimeSchemaInfo) -> RuntimeSchemaInfo:
    """The same info, for a decision that depends on whole numbers, lists of them and dtypes too."""
    first, names = info.static_argnum, list(info.static_kwargkey or [])
    for i, argument in enumerate(op._schema.arguments):
        if re.search(r"\b(int|ScalarType)\b", str(argument.real_type)):
            if not argument.kwarg_only:
                first = min(first, i)
            elif argument.name not in names:
                names.append(argument.name)
    return dataclasses.replace(info, static_argnum=first, static_kwargkey=names or None)


def _save(table: dict, op: Any) -> None:
    _saved.append((table, op, table.get(op, _ABSENT)))


def find(name: str) -> Any:
    """The op of this name, or None where this build of torch has no such op."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found
