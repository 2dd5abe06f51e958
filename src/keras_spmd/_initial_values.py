"""Initial values drawn shard by shard, with the numbers that plain Keras draws.

A random initializer of Keras ends in one call: normal, uniform or truncated_normal of the whole
shape. Here that call is only written down (a `Draw`), and then carried out in chunks, of which a
rank keeps what lies in its shard. torch's CPU generator gives the same stream in chunks as in one
piece, if a chunk of normal numbers is a multiple of 16 and the last one is at least 16 long.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from keras.src.backend.torch import random as keras_random
from keras.src.backend.torch.core import get_device, to_torch_dtype
from keras.src.initializers import constant_initializers, random_initializers

from keras_spmd import _random
from keras_spmd._layouts import local_shape_and_offset

CHUNK = 1 << 20

# Exactly these: a subclass may do more with what was drawn.
_DRAWING_CALLS = {
    random_initializers.RandomNormal.__call__,
    random_initializers.TruncatedNormal.__call__,
    random_initializers.RandomUniform.__call__,
    random_initializers.VarianceScaling.__call__,
}
_FILL_CALLS = {
    constant_initializers.Zeros.__call__,
    constant_initializers.Ones.__call__,
    constant_initializers.Constant.__call__,
}


@dataclass(frozen=True)
class Draw:
    """One call of `keras.random`, not yet carried out. `a` and `b` are its two parameters."""

    kind: str
    a: float
    b: float
    seed: Any

    def sample(self, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        options: dict[str, Any] = {
            "dtype": dtype,
            "generator": generator,
            "device": generator.device,
        }
        if self.kind == "normal":
            return torch.normal(self.a, self.b, size=(count,), **options)
        if self.kind == "uniform":
            return (self.b - self.a) * torch.rand(count, **options) + self.a
        # The first of four tries that lies within two deviations, as Keras does it.
        tries = torch.normal(0.0, 1.0, size=(count * 4,), **options).view(count, 4)
        first = ((tries > -2) & (tries < 2)).max(-1, keepdim=True)[1]
        return tries.gather(-1, first).squeeze(-1).mul_(self.b).add_(self.a)


class _Recorder(type(random_initializers)):  # type: ignore[misc]
    """Stands for the module `random` inside of Keras's initializers.

    It is that module, until `writing_down` is set: then the three calls return a `Draw`.
    """

    _here = threading.local()

    @property
    def writing_down(self) -> bool:
        return getattr(self._here, "writing_down", False)

    @writing_down.setter
    def writing_down(self, value: bool) -> None:
        self._here.writing_down = value

    def __getattr__(self, name: str) -> Any:
        return getattr(keras_random, name)

    def normal(self, shape: Any, mean: float = 0.0, stddev: float = 1.0, **kwargs: Any) -> Any:
        if self.writing_down:
            return Draw("normal", mean, stddev, kwargs.get("seed"))
        with _random.initial_values():
            return keras_random.normal(shape, mean, stddev, **kwargs)

    def uniform(self, shape: Any, minval: float = 0.0, maxval: float = 1.0, **kwargs: Any) -> Any:
        if self.writing_down:
            return Draw("uniform", minval, maxval, kwargs.get("seed"))
        with _random.initial_values():
            return keras_random.uniform(shape, minval, maxval, **kwargs)

    def truncated_normal(
        self, shape: Any, mean: float = 0.0, stddev: float = 1.0, **kwargs: Any
    ) -> Any:
        if self.writing_down:
            return Draw("truncated_normal", mean, stddev, kwargs.get("seed"))
        with _random.initial_values():
            return keras_random.truncated_normal(shape, mean, stddev, **kwargs)


recorder = _Recorder("keras_spmd_initializer_random")


@contextlib.contextmanager
def _writing_down() -> Iterator[None]:
    recorder.writing_down = True
    try:
        yield
    finally:
        recorder.writing_down = False


def draw_of(initializer: Callable, shape: tuple[int, ...], dtype: str) -> Draw | None:
    """What a standard random initializer would draw, or None for any other initializer."""
    if type(initializer).__call__ not in _DRAWING_CALLS:
        return None
    with _writing_down():
        draw = initializer(shape, dtype=dtype)
    return draw if isinstance(draw, Draw) else None


def local_values(
    initializer: Callable,
    shape: tuple[int, ...],
    dtype: str,
    mesh: Any,
    placements: Sequence[Any],
) -> torch.Tensor | None:
    """This rank's part of `initializer(shape, dtype)`, without ever making the whole.

    None if this initializer can only make the whole.
    """
    if type(initializer).__call__ in _FILL_CALLS:
        if np.ndim(getattr(initializer, "value", 0)) > 0:
            return None
        local_shape = shape if mesh is None else local_shape_and_offset(shape, mesh, placements)[0]
        return initializer(local_shape, dtype=dtype)
    draw = draw_of(initializer, shape, dtype)
    if draw is None:
        return None
    if mesh is None:
        return _draw_part(draw, shape, dtype, shape, (0,) * len(shape))
    return _draw_part(draw, shape, dtype, *local_shape_and_offset(shape, mesh, placements))


def takes_layout(initializer: Callable) -> bool:
    """Whether the initializer follows Keras's protocol for making a laid-out value itself."""
    try:
        return "layout" in inspect.signature(initializer).parameters
    except (TypeError, ValueError):
        return False


def _draw_part(
    draw: Draw,
    shape: tuple[int, ...],
    dtype: str,
    local_shape: tuple[int, ...],
    offset: tuple[int, ...],
) -> torch.Tensor:
    torch_dtype = to_torch_dtype(dtype)
    generator = keras_random.torch_seed_generator(draw.seed)
    on_cpu = generator.device.type == "cpu"
    local_flat = torch.empty(int(np.prod(local_shape)), dtype=torch_dtype, device=get_device())
    seed, filled = generator.initial_seed(), 0
    for number, (start, stop) in enumerate(_chunks(int(np.prod(shape)))):
        selected = _selection(start, stop, shape, local_shape, offset)
        if not on_cpu:
            # A GPU's generator has no stream to follow, so each chunk has a seed of its own and a
            # rank may skip the chunks that it holds nothing of.
            if selected is None:
                continue
            generator.manual_seed((seed + number * 0x9E3779B97F4A7C15) % (1 << 63))
        chunk = draw.sample(stop - start, torch_dtype, generator)
        if selected is not None:
            # Elements of a shard have the same order in the shard as in the whole.
            chunk = chunk[selected.to(chunk.device) if torch.is_tensor(selected) else selected]
            local_flat[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
    assert filled == local_flat.numel()
    return local_flat.view(local_shape)


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < count:
        stop = count if count - start < CHUNK + 16 else start + CHUNK
        yield start, stop
        start = stop


def _selection(
    start: int,
    stop: int,
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    offset: tuple[int, ...],
) -> slice | torch.Tensor | None:
    """Which of the elements `start:stop` of the flattened whole lie in the shard."""
    cut_dims = [dim for dim in range(len(shape)) if local_shape[dim] != shape[dim]]
    if not cut_dims:
        return slice(None)
    first = cut_dims[0]
    inner = int(np.prod(shape[first + 1 :]))
    if cut_dims == [0]:
        low = max(start, offset[0] * inner)
        high = min(stop, (offset[0] + local_shape[0]) * inner)
        return slice(low - start, high - start) if low < high else None
    index = torch.arange(start, stop)
    inside = torch.ones(stop - start, dtype=torch.bool)
    for dim in cut_dims:
        position = index // int(np.prod(shape[dim + 1 :])) % shape[dim]
        inside &= (position >= offset[dim]) & (position < offset[dim] + local_shape[dim])
    return inside if bool(inside.any()) else None
