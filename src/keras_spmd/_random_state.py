"""One random state for all processes: they draw the same initial values and the same shuffles."""

import pickle
import random
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from keras.src.backend.torch import core as keras_torch
from keras.src.utils import rng_utils

from keras_spmd._groups import OncePerGroup
from keras_spmd._notices import warn_once

_agreed = OncePerGroup()


def _random_states() -> tuple:
    cuda_state = (
        torch.cuda.get_rng_state()
        if torch.device(keras_torch.DEFAULT_DEVICE).type == "cuda"
        else None
    )
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda_state


def _set_random_states(states: tuple) -> None:
    python_state, numpy_state, torch_state, cuda_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state)


def agree() -> None:
    """Give every process the random state of process 0.

    Ranks run the same program, so with the same state they draw the same initial values and the
    same shuffles. Process 0 keeps its own: it behaves as it would alone.
    """
    if dist.get_world_size() == 1 or not _agreed.is_new():
        return
    seed = rng_utils.get_random_seed()
    states: list[tuple] = [(seed, _random_states())]
    dist.broadcast_object_list(states, src=0)
    seed_of_0, states_of_0 = states[0]
    if seed is not None and seed != seed_of_0:
        raise ValueError(
            f"keras.utils.set_random_seed({seed}) was called on process {dist.get_rank()}, but "
            f"process 0 has {'no seed' if seed_of_0 is None else f'the seed {seed_of_0}'}. Call "
            "it with the same seed on all processes, or not at all."
        )
    if seed is None and seed_of_0 is not None:
        rng_utils.set_random_seed(seed_of_0)
    _set_random_states(states_of_0)


def keep_equal(*, warn: bool) -> None:
    """Give every process the random state of process 0 again, if they drifted apart.

    Shuffles are drawn from it, and they must be the same on all ranks. What makes states drift is
    code that draws on some ranks only, or in threads, in any order.
    """
    mine = zlib.crc32(pickle.dumps([_as_bytes(state) for state in _random_states()]))
    prints = [torch.tensor([0]) for _ in range(dist.get_world_size())]
    dist.all_gather(prints, torch.tensor([mine]))
    if all(bool(other == prints[0]) for other in prints):
        return
    states = [_random_states()]
    dist.broadcast_object_list(states, src=0)
    _set_random_states(states[0])
    if warn:
        different = [rank for rank, other in enumerate(prints) if bool(other != prints[0])]
        warn_once(
            "random states",
            f"The random states of the ranks {different} were not that of rank 0 any more, and "
            "were set to it: shuffles are drawn from them. Something draws random numbers on some "
            "ranks only, or in threads; use keras.random with a seed, or a generator of your own.",
        )


def _as_bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return pickle.dumps(state)
