"""`keras.random` under a distribution: numbers that don't depend on the mesh.

Every number comes from `_counter`: from the Keras seed state and the element's global index. So a
result may be laid out in any way, and a rank draws its own part only. Which layout to take is a
guess that costs or saves time but never changes a number: dropout takes its input's, and other
draws that of the tensor at hand (an input of the layer that draws, or the step's batch) with dims
of the same size.

Without a distribution Keras's own functions run, but in a captured step, where a generator's state
would be frozen. Initial values of variables don't come from here
(see `_initial_values`).
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from keras.src import backend, tree
from keras.src.backend.torch import core as keras_torch
from keras.src.random.seed_generator import draw_seed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from keras_spmd import _layouts
from keras_spmd._capturing import is_capturing
from keras_spmd._counter import Draws


class _AtHand(threading.local):
    """DTensors whose layouts new numbers may take: those of the innermost call last."""

    def __init__(self) -> None:
        self.tensors: list[DTensor] = []
        self.initial_values = False


_at_hand = _AtHand()


@contextlib.contextmanager
def initial_values() -> Iterator[None]:
    """In this block Keras's own functions draw: initial values are those of plain Keras."""
    before = _at_hand.initial_values
    _at_hand.initial_values = True
    try:
        yield
    finally:
        _at_hand.initial_values = before


@contextlib.contextmanager
def layouts_at_hand(values: Any) -> Iterator[None]:
    """Numbers drawn in this block may be laid out like the DTensors among `values`."""
    before = _at_hand.tensors
    found = [x for x in tree.flatten(values) if isinstance(x, DTensor)]
    if found:
        _at_hand.tensors = [*before, *reversed(found)]
    try:
        yield
    finally:
        _at_hand.tensors = before


def instead_of(ours: Callable) -> Callable[[Callable], Callable]:
    """Replace a function of `keras.random` while a distribution is active."""

    def wrap(original: Callable) -> Callable:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if _is_ours():
                return ours(*args, **kwargs)
            return original(*args, **kwargs)

        draw.__name__, draw.__doc__ = original.__name__, original.__doc__
        return draw

    return wrap


def _is_ours() -> bool:
    return (
        (_layouts.active_distribution() is not None or is_capturing())
        and not _at_hand.initial_values
        and keras_torch.get_device() != "meta"
    )


class _Laid(NamedTuple):
    """How a tensor that is about to be drawn lies on the mesh; plain without a mesh."""

    shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]

    def draws(self, seed: Any) -> Draws:
        state = draw_seed(seed)
        if isinstance(state, DTensor):
            state = state.to_local()
        state = state.detach()
        if self.mesh is None:
            return Draws(state, self.shape)
        return Draws(
            state,
            self.shape,
            *_layouts.local_shape_and_offset(self.shape, self.mesh, self.placements),
        )

    def part_of(self, value: Any, dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of `value`, broadcast to the shape."""
        value = keras_torch.convert_to_tensor(value).detach().to(dtype)
        if self.mesh is None:
            return torch.broadcast_to(value, self.shape)
        if isinstance(value, DTensor):
            value = torch.broadcast_to(value, self.shape)
            return value.redistribute(self.mesh, self.placements).to_local()
        return _layouts.local_slice(
            torch.broadcast_to(value, self.shape), self.mesh, self.placements
        )

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return local
        return _layouts.wrap_local(local, self.mesh, self.placements, self.shape)


def _lay(shape: Sequence[int]) -> _Laid:
    """The layout of the tensor at hand that fits the shape, or none."""
    shape = tuple(int(size) for size in shape)
    mesh = _layouts.active_mesh()
    if mesh is not None:
        for tensor in reversed(_at_hand.tensors):
            laid = _lay_like(tensor, shape)
            if tensor.device_mesh == mesh and any(map(_layouts.divides, laid.placements)):
                return laid
    return _Laid(shape, None, ())


def _lay_like(x: torch.Tensor, shape: Sequence[int]) -> _Laid:
    """Laid out like `x` in the dims that have the size of `x`'s."""
    shape = tuple(int(size) for size in shape)
    if not isinstance(x, DTensor):
        return _Laid(shape, None, ())
    placements = tuple(
        Shard(p.dim) if type(p) is Shard and _is_same_dim(p.dim, shape, x.shape) else Replicate()
        for p in x.placements
    )
    return _Laid(shape, x.device_mesh, placements)


def _is_same_dim(dim: int, shape: Sequence[int], other: Sequence[int]) -> bool:
    # The first dim is the batch, also of tensors with fewer or more dims.
    alike = dim == 0 or len(shape) == len(other)
    return alike and len(shape) > dim and shape[dim] == other[dim]


def _float_dtype(dtype: Any) -> torch.dtype:
    return keras_torch.to_torch_dtype(dtype or backend.floatx())


def normal(
    shape: Sequence[int],
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
) -> torch.Tensor:
    return _normal(shape, mean, stddev, dtype, seed, limit=math.inf)


def truncated_normal(
    shape: Sequence[int],
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
) -> torch.Tensor:
    return _normal(shape, mean, stddev, dtype, seed, limit=2.0)


def _normal(
    shape: Sequence[int], mean: Any, stddev: Any, dtype: Any, seed: Any, limit: float
) -> torch.Tensor:
    laid = _lay(shape)
    numbers = laid.wrap(laid.draws(seed).normal(_float_dtype(dtype), limit))
    return _moved(numbers, stddev, mean)


def uniform(
    shape: Sequence[int],
    minval: Any = 0.0,
    maxval: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
) -> torch.Tensor:
    laid = _lay(shape)
    numbers = laid.wrap(laid.draws(seed).uniform(_float_dtype(dtype)))
    return _moved(numbers, maxval - minval, minval)


def _moved(numbers: torch.Tensor, scale: Any, shift: Any) -> torch.Tensor:
    dtype = numbers.dtype
    if not (isinstance(scale, (int, float)) and scale == 1):
        numbers = numbers * scale
    if not (isinstance(shift, (int, float)) and shift == 0):
        numbers = numbers + shift
    return numbers.to(dtype)


def randint(
    shape: Sequence[int], minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None
) -> torch.Tensor:
    laid = _lay(shape)
    numbers = laid.draws(seed).integers(maxval - minval)
    return (laid.wrap(numbers) + minval).to(keras_torch.to_torch_dtype(dtype))


def dropout(
    inputs: torch.Tensor, rate: float, noise_shape: Any = None, seed: Any = None
) -> torch.Tensor:
    if rate == 0:
        return inputs
    if rate == 1:
        return torch.zeros_like(inputs)
    if noise_shape is None:
        noise_shape = inputs.shape
    shape = [n if size is None else size for n, size in zip(inputs.shape, noise_shape, strict=True)]
    laid = _lay_like(inputs, shape)
    keep = laid.wrap(laid.draws(seed).below(1 - rate))
    return torch.where(keep, inputs / (1 - rate), 0.0)


def categorical(
    logits: Any, num_samples: int, dtype: Any = "int32", seed: Any = None
) -> torch.Tensor:
    logits = keras_torch.convert_to_tensor(logits)
    laid = _lay_like(logits, (*logits.shape[:-1], num_samples))
    if laid.mesh is not None:
        # The classes must be in one place: a sample looks at all of them.
        rows_only = [Replicate() if p.is_shard(logits.ndim - 1) else p for p in laid.placements]
        laid = laid._replace(placements=tuple(rows_only))
        logits = logits.redistribute(laid.mesh, laid.placements).to_local()
    heights = torch.softmax(logits.detach().to(torch.float32), dim=-1).cumsum(-1)
    where = laid.draws(seed).uniform(torch.float32) * heights[..., -1:]
    samples = torch.searchsorted(heights, where, right=True).clamp_max_(heights.shape[-1] - 1)
    return laid.wrap(samples.to(keras_torch.to_torch_dtype(dtype)))


def shuffle(x: Any, axis: int = 0, seed: Any = None) -> torch.Tensor:
    x = keras_torch.convert_to_tensor(x)
    dim = axis % x.ndim
    # Like Keras on torch: rows of the dims before are shuffled each on its own.
    laid = _lay_like(x, x.shape[: dim + 1])
    laid = laid._replace(
        placements=tuple(Replicate() if p.is_shard(dim) else p for p in laid.placements)
    )
    order = laid.wrap(laid.draws(seed).uniform(torch.float64).argsort(dim=dim, stable=True))
    if dim == 0:
        return torch.index_select(x, 0, order)
    order = order.reshape(*order.shape, *[1] * (x.ndim - dim - 1))
    return torch.gather(x, dim, torch.broadcast_to(order, x.shape))


def gamma(shape: Sequence[int], alpha: Any, dtype: Any = None, seed: Any = None) -> torch.Tensor:
    laid = _lay(shape)
    logs = laid.draws(seed).gamma_log(laid.part_of(alpha, torch.float64))
    return laid.wrap(logs.exp().to(_float_dtype(dtype)))


def beta(
    shape: Sequence[int], alpha: Any, beta: Any, dtype: Any = None, seed: Any = None
) -> torch.Tensor:
    laid = _lay(shape)
    draws = laid.draws(seed)
    first = draws.gamma_log(laid.part_of(alpha, torch.float64))
    second = draws.gamma_log(laid.part_of(beta, torch.float64))
    return laid.wrap(torch.sigmoid(first - second).to(_float_dtype(dtype)))


def binomial(
    shape: Sequence[int], counts: Any, probabilities: Any, dtype: Any = None, seed: Any = None
) -> torch.Tensor:
    laid = _lay(shape)
    counts = laid.part_of(counts, torch.float64)
    probabilities = laid.part_of(probabilities, torch.float64)
    numbers = laid.draws(seed).binomial(counts, probabilities)
    return laid.wrap(numbers.to(_float_dtype(dtype)))


FUNCTIONS: tuple[Callable, ...] = (
    normal,
    truncated_normal,
    uniform,
    randint,
    dropout,
    categorical,
    shuffle,
    gamma,
    beta,
    binomial,
)
