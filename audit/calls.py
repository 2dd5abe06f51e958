"""One call of the audit: its values and gradients, eager or captured, and what they cost."""

import collections
import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import optree
import torch
from cases import Case
from keras.src import tree
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from keras_spmd import _random
from keras_spmd.graph._capture import Batch, capture, slots_of
from keras_spmd.graph._passes import improved
from keras_spmd.rules import fallback

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
COLLECTIVES += ("broadcast", "all_reduce_coalesced", "all_gather_into_tensor_coalesced")
TOLERANCES = (1e-4, 1e-5)
POLICIES = collections.defaultdict(lambda: "float32", bfloat16="mixed_bfloat16")


class Cost(TorchDispatchMode):
    """Counts collectives and the bytes that this rank puts into them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # Its own dispatch first, so that this sees what it calls.
        if func.namespace == "_c10d_functional" and func._opname in COLLECTIVES:
            self.count += 1
            self.bytes += sum(
                x.numel() * x.element_size() for x in tree.flatten(args) if torch.is_tensor(x)
            )
        return func(*args, **(kwargs or {}))


class Subject:
    """A case, and the layer that it calls, if it calls one, with variables of a distribution."""

    def __init__(self, case: Case, distribution: Any = None, like: "Subject | None" = None) -> None:
        self.case, self.layer = case, None
        if case.make is None:
            return
        keras.utils.set_random_seed(7)
        with laid_out_by(distribution), own_numbers():
            with policy(POLICIES[case.dtype]):
                self.layer = case.make()
            case.call(self.layer, *case.tensors())
        if like is not None:
            self.start = like.start
            return
        rng = np.random.default_rng(1)
        self.start = [v.numpy() for v in self.layer.variables]
        for i, v in enumerate(self.layer.variables):
            # Many variables start as zeros or ones, which would hide what is done to them.
            if v.trainable:
                noise = rng.uniform(-0.2, 0.2, v.shape)
                self.start[i] = (self.start[i] + noise).astype(self.start[i].dtype)

    def reset(self) -> None:
        """Give the variables the values that they have before every call."""
        # Some layers draw with Python's generator or with torch's, whatever their own seed is.
        keras.utils.set_random_seed(7)
        if self.layer is not None:
            for variable, value in zip(self.layer.variables, self.start, strict=True):
                variable.assign(value)

    def results(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of the call; gradients of a weighted sum of them; and the state that it left."""
        with torch.set_grad_enabled(self.case.has_gradient):
            return [r.detach() for r in self._results(inputs)]

    def _results(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        wanted = [x for x in inputs if self.case.has_gradient and x.is_floating_point()]
        for x in wanted:
            x.requires_grad_()
        arguments = inputs if self.layer is None else [self.layer, *inputs]
        results = leaves(self.case.call(*arguments))
        if self.layer is not None:
            wanted += [v.value for v in self.layer.trainable_variables]
        floats = [r for r in results if r.requires_grad]
        if floats and wanted:
            total = sum((r.float() * weights_like(r)).sum() for r in floats)
            grads = torch.autograd.grad(total, wanted, allow_unused=True)  # type: ignore[arg-type]
            absent = torch.zeros((), device=total.device)  # type: ignore[union-attr]
            results += [absent if g is None else g for g in grads]
        if self.layer is not None:
            results += [v.value for v in self.layer.non_trainable_variables]
        return results


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@contextlib.contextmanager
def laid_out_by(distribution: Any) -> Iterator[None]:
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


@contextlib.contextmanager
def own_numbers() -> Iterator[None]:
    """One device draws the random numbers of a mesh, which plain Keras doesn't."""
    before = _random._is_ours
    _random._is_ours = lambda: not _random._at_hand.initial_values
    try:
        yield
    finally:
        _random._is_ours = before


def leaves(result: Any) -> list[torch.Tensor]:
    return [x for x in tree.flatten(result) if torch.is_tensor(x)]


def weights_like(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, x.numel(), device=x.device).reshape(x.shape)


def eager(subject: Subject, inputs: list[torch.Tensor], cost: Cost) -> list[torch.Tensor]:
    with cost:
        return subject.results(inputs)


def captured(subject: Subject, inputs: list[torch.Tensor], cost: Cost) -> list[torch.Tensor]:
    """As a graph of local tensors, made as that of a captured step is."""
    flat, structure = optree.tree_flatten(inputs, namespace="keras")
    batch = Batch(flat, structure)
    layer = subject.layer
    result = capture(
        lambda data: subject.results([x.detach() for x in data]),
        [] if layer is None else slots_of(layer, layer.variables),
        batch,
        gather_results=False,
        with_grad=subject.case.has_gradient,
    )
    values = [node.meta.get("val") for node in result.module.graph.nodes]
    if any(isinstance(n, torch.SymInt) for v in values for n in getattr(v, "shape", ())):
        raise RuntimeError("its shapes depend on values")
    module = improved(result.module)
    with cost, torch.no_grad():
        return result.results(module(*result.state(), *batch.locals()))


def full(x: torch.Tensor) -> np.ndarray:
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return (whole.float() if whole.dtype == torch.bfloat16 else whole.resolve_conj()).cpu().numpy()


class Expected(NamedTuple):
    """What one device gives, and in how far another result may differ from it."""

    results: list[torch.Tensor]
    # For bfloat16: what it gives if it computes in float32.
    exact: list[torch.Tensor] | None = None

    def is_close(self, i: int, got: np.ndarray) -> np.ndarray:
        """For each number of result i.

        Sums in another order round otherwise, in bfloat16 by much, and more so if their terms
        nearly cancel. So there a result has to be as near to the exact one as that of one device,
        up to a factor and some units in the last place.
        """
        mine = full(self.results[i])
        if self.exact is None or self.results[i].dtype not in (torch.bfloat16, torch.float32):
            return np.isclose(got, mine, *TOLERANCES, equal_nan=True)
        exact = full(self.exact[i]).astype("float64")
        finite = np.isfinite(exact) & np.isfinite(mine)
        error = np.abs(mine - exact)[finite].max(initial=0.0)
        units = 2**-6 * np.abs(exact[finite]).max(initial=0.0)
        return np.isclose(got, exact, 2**-7, 4 * error + units, equal_nan=True)

    def differs(self, got: list[torch.Tensor]) -> str | None:
        """The first thing that does, in words."""
        if len(got) != len(self.results):
            return f"{len(got)} results instead of {len(self.results)}"
        # All of them before any is compared: every rank has to take part in gathering.
        arrays = [full(g) for g in got]
        for i, (a, mine) in enumerate(zip(arrays, self.results, strict=True)):
            if a.shape != tuple(mine.shape) or got[i].dtype != mine.dtype:
                return f"result {i}: {got[i].dtype}{a.shape} instead of {mine.dtype}{mine.shape}"
            is_close = self.is_close(i, a)
            if not is_close.all():
                first = np.argmin(is_close)
                b = full(mine)
                return f"result {i}: {a.ravel()[first:][:4]} instead of {b.ravel()[first:][:4]}"
        return None


@contextlib.contextmanager
def noting_fallbacks() -> Iterator[list[str]]:
    """The ops that were run replicated although an input was sharded."""
    noted: list[str] = []
    original = fallback.run_replicated

    def noting(op: Any, args: tuple, kwargs: dict, *rest: Any) -> Any:
        sharded = [
            x
            for x in tree.flatten((args, kwargs))
            if isinstance(x, DTensor) and not all(p.is_replicate() for p in x.placements)
        ]
        if sharded:
            noted.append(str(op))
        return original(op, args, kwargs, *rest)

    rules = [m for name, m in sys.modules.items() if name.startswith("keras_spmd.rules.")]
    users = [m for m in rules if hasattr(m, "run_replicated")]
    for module in users:
        module.run_replicated = noting  # type: ignore[attr-defined]
    try:
        yield noted
    finally:
        for module in users:
            module.run_replicated = original  # type: ignore[attr-defined]
