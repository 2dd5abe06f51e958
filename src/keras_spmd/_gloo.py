"""Groups of gloo that don't damage the memory of their process.

A group of torch's has two threads. Both write down the name of the op that they completed, into one
string and without a lock (ProcessGroupGloo::runLoop, torch 2.11 to 2.15). A name of more than 15
letters, such as a gather's, takes memory of its own, which one thread may free while the other
writes into it. Jobs in which gathers and sums were under way at the same time died of it, or lived
on with a damaged heap; a test shows it within seconds. One thread has nobody to race with.
Collectives of a group then run one after the other, as NCCL's do.
"""

import contextlib
import os
from typing import Any

import torch

from keras_spmd._addresses import VARIABLE


def with_one_thread(gloo: type) -> type:
    """A class that stands for torch's, and makes groups of it with one thread each."""

    class Maker(type(gloo)):  # type: ignore[misc]
        def __call__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            is_complete = any(isinstance(x, gloo._Options) for x in (*args, *kwargs.values()))  # type: ignore[attr-defined]
            if not is_complete:
                args, kwargs = (_options(gloo, *args, **kwargs),), {}
            return gloo(store, rank, size, *args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, gloo)

    return Maker(gloo.__name__, (gloo,), {})


def has_threads(group: Any) -> bool:
    """Whether it was made before these groups were switched on."""
    with contextlib.suppress(RuntimeError):  # It has no backend for CPUs.
        options = group._get_backend(torch.device("cpu")).options
        return getattr(options, "_threads", 1) > 1
    return False


def _options(gloo: Any, timeout: Any = None, **others: Any) -> Any:
    """What torch itself would choose, but for the number of threads."""
    options = gloo._Options()
    if timeout is not None:
        options._timeout = timeout
    for name, value in others.items():
        setattr(options, name, value)
    interfaces = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    devices = [gloo.create_device(interface=name) for name in interfaces]
    options._devices = devices or [gloo.create_default_device()]
    options._threads = 1
    return options
