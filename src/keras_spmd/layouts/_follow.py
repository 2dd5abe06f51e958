"""How the dims of an op's results come from those of its inputs, op by op.

An op that is not here keeps all dims of its inputs whole, so a layout never relies on a guess.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_spmd.layouts._dims import Dim, Sum, Tensors, merged, tensors_in

Dims = list[Dim]


class Call:
    """One op that has run."""

    def __init__(
        self, op: Any, args: Sequence[Any], kwargs: dict, results: Any, tensors: Tensors, layer: str
    ) -> None:
        self.name = op._schema.name.removeprefix("aten::").removesuffix("_")
        names = [argument.name for argument in op._schema.arguments]
        self.values = dict(zip(names, args, strict=False)) | kwargs
        self.defaults = {a.name: a.default_value for a in op._schema.arguments}
        self.inputs, self.results = tensors_in([args, kwargs]), tensors_in(results)
        self.tensors, self.layer = tensors, layer

    def arg(self, name: str) -> Any:
        return self.values.get(name, self.defaults.get(name))

    def dims(self, x: torch.Tensor) -> Dims:
        return self.tensors.dims(x)

    def result(self, dims: Dims) -> None:
        """The first result has these dims; others are not followed."""
        self._put(self.results[0], dims)
        for x in self.results[1:]:
            self._put(x, self.whole(x))

    def every_result(self, dims_of: Callable[[torch.Tensor], Dims]) -> None:
        for x in self.results:
            self._put(x, dims_of(x))

    def _put(self, x: torch.Tensor, dims: Dims) -> None:
        if any(x is y for y in self.inputs):
            # An op that writes into its input, which is still that tensor.
            for a, b in zip(self.dims(x), dims, strict=True):
                a.join(b)
        maker = self.tensors.maker(self.inputs[0]) if self.name in _MOVES else self.layer
        is_data = any(self.tensors.is_data(y) for y in self.inputs)
        self.tensors.put(x, dims, is_data=is_data, maker=maker)

    def whole(self, x: torch.Tensor) -> Dims:
        dims = [Dim(size) for size in x.shape]
        self.keep_whole(*dims)
        return dims

    def keep_whole(self, *dims: Dim) -> None:
        for dim in dims:
            dim.keep_whole(self.name)

    def contract(self, a: torch.Tensor, dim_a: Dim, b: torch.Tensor, dim_b: Dim) -> None:
        """Products are summed over this dim: free of communication but for the sum at the end."""
        dim_a.join(dim_b)
        if self.tensors.is_data(a) == self.tensors.is_data(b):
            # Scores of queries and keys, say: a sum of them would be as large as they are many.
            self.keep_whole(dim_a)
        dim_a.note_sum(Sum(self.layer, is_lookup=False))


Rule = Callable[[Call], None]
_RULES: dict[str, Rule] = {}
# These change how a tensor is looked at, and not what is in it.
_MOVES = frozenset(
    """view _unsafe_view reshape permute transpose t unsqueeze squeeze expand clone detach alias
    _to_copy contiguous""".split()  # noqa: SIM905
)


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


def follow(op: Any, call: Call) -> None:
    """Note the dims of the op's results."""
    if not call.results:
        return
    if call.name in _RULES:
        _RULES[call.name](call)
    elif torch.Tag.pointwise in op.tags:
        elementwise(call)
    else:
        for x in call.inputs:
            call.keep_whole(*call.dims(x))
        call.every_result(call.whole if call.inputs else call.dims)


@rule("clone", "detach", "alias", "_to_copy", "contiguous", "lift_fresh", "copy", "native_dropout")
@rule("zeros_like", "ones_like", "full_like", "empty_like", "expand")
def elementwise(call: Call) -> None:
    call.every_result(lambda x: broadcast(call, x.shape, call.inputs))


def broadcast(call: Call, shape: Sequence[int], inputs: Sequence[torch.Tensor]) -> Dims:
    """The dims of a result of this shape whose elements come from those at the same place."""
    dims = [Dim(size) for size in shape]
    for x in inputs:
        for i, dim in enumerate(reversed(call.dims(x)), start=1):
            if i <= len(dims) and x.shape[-i] == shape[-i] > 1:
                dims[-i].join(dim)
    return dims


@rule("view", "_unsafe_view", "reshape")
def view(call: Call) -> None:
    x, y = call.inputs[0], call.results[0]
    waiting = [atom for dim in call.dims(x) for atom in dim.atoms() if atom.size > 1]
    dims = []
    for size in y.shape:
        taken = _take(waiting, size)
        if taken is None:
            call.keep_whole(*call.dims(x))
            dims = call.whole(y)
            break
        dims.append(merged(taken) if taken else Dim(size))
    call.result(dims)


def _take(waiting: Dims, size: int) -> Dims | None:
    """The first dims, of this size together; None if no dim ends there."""
    taken: Dims = []
    while size > 1:
        if not waiting:
            return None
        first = waiting[0].find()
        if first.size > size and first.size % size == 0:
            first.split(size)
            waiting[:1] = first.atoms()
            first = waiting[0]
        if size % first.size:
            return None
        taken.append(waiting.pop(0))
        size //= first.size
    return taken


@rule("permute")
def permute(call: Call) -> None:
    have = call.dims(call.inputs[0])
    call.result([have[i] for i in call.arg("dims")])


@rule("transpose", "t")
def transpose(call: Call) -> None:
    dims = call.dims(call.inputs[0])
    if len(dims) > 1:
        a, b = (call.arg("dim0"), call.arg("dim1")) if call.name == "transpose" else (0, 1)
        dims[a], dims[b] = dims[b], dims[a]
    call.result(dims)


@rule("unsqueeze")
def unsqueeze(call: Call) -> None:
    dims = call.dims(call.inputs[0])
    dims.insert(call.arg("dim") % (len(dims) + 1), Dim(1))
    call.result(dims)


@rule("squeeze")
def squeeze(call: Call) -> None:
    x = call.inputs[0]
    places = set(range(x.ndim))
    if call.arg("dim") is not None:
        places = {place % max(x.ndim, 1) for place in _as_list(call.arg("dim"))}
    call.result([d for i, d in enumerate(call.dims(x)) if i not in places or x.shape[i] != 1])


@rule("select", "unbind", "split", "split_with_sizes", "slice", "cumsum", "sort", "topk")
def along_one_dim(call: Call) -> None:
    """One dim is needed whole; the others stay what they are."""
    x = call.inputs[0]
    dims = call.dims(x)
    if call.name == "slice" and call.results[0].shape == x.shape:
        call.result(dims)
        return
    place = call.arg("dim") % x.ndim
    call.keep_whole(dims[place])

    def dims_of(y: torch.Tensor) -> Dims:
        if y.ndim < x.ndim:
            return [d for i, d in enumerate(dims) if i != place]
        return [call.whole(y)[i] if i == place else d for i, d in enumerate(dims)]

    call.every_result(dims_of)


@rule("_softmax", "_log_softmax", "_safe_softmax")
def softmax(call: Call) -> None:
    dims = call.dims(call.inputs[0])
    call.keep_whole(dims[call.arg("dim")])
    call.result(dims)


@rule("tril", "triu", "flip")
def by_place(call: Call) -> None:
    """Depends on the place in some dims."""
    dims = call.dims(call.inputs[0])
    call.keep_whole(*(dims[i] for i in call.arg("dims") or (-1, -2)))
    call.result(dims)


@rule("cat", "stack")
def join_tensors(call: Call) -> None:
    y = call.results[0]
    place = call.arg("dim") % y.ndim
    dims = [Dim(size) for size in y.shape]
    call.keep_whole(dims[place])
    for x in call.inputs:
        have = call.dims(x)
        if call.name == "stack":
            have.insert(place, Dim(1))
        for i, dim in enumerate(have):
            if i == place:
                call.keep_whole(dim)
            else:
                dims[i].join(dim)
    call.result(dims)


@rule("sum", "mean", "amax", "amin", "var", "std", "prod", "any", "all", "logsumexp", "max", "min")
def reduce(call: Call) -> None:
    x = call.inputs[0]
    dims = call.dims(x)
    given = call.arg("dim")
    places = set(range(x.ndim))
    if given not in (None, [], ()):
        places = {place % x.ndim for place in _as_list(given)}
    call.keep_whole(*(dims[i] for i in places))

    def dims_of(y: torch.Tensor) -> Dims:
        if y.ndim == x.ndim:
            return [Dim(1) if i in places else d for i, d in enumerate(dims)]
        return [d for i, d in enumerate(dims) if i not in places]

    call.every_result(dims_of)


def _as_list(x: Any) -> list[int]:
    return list(x) if isinstance(x, (list, tuple)) else [x]
