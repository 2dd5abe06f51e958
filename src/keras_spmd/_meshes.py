"""What changes in Keras when a mesh is made, and when a distribution is set or dropped."""

import functools
import math
from collections.abc import Callable
from typing import Any

from keras_spmd import _coverage, _layouts, _processes, _promotion


def device_mesh_init_or(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, shape: Any, axis_names: Any, devices: Any = None) -> None:
        if devices is None and shape:
            count, found = math.prod(shape), len(_processes.list_devices())
            if count > found:
                raise ValueError(
                    f"Shape does not match the number of devices: a mesh of shape {tuple(shape)} "
                    f"needs {count}, and this job has {found} (one for each process). Start it "
                    f"with\n    {_processes.launch_command(count)}"
                )
        original(self, shape, axis_names, devices)

    return __init__


def distribution_init_or(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(
        self: Any, device_mesh: Any, batch_dim_name: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        axes = tuple(getattr(device_mesh, "axis_names", None) or ())
        if axes and batch_dim_name is not None and batch_dim_name not in axes:
            raise ValueError(
                f"batch_dim_name={batch_dim_name!r} must be one of the mesh's axes, which are "
                f"{axes}: batches are divided over it."
            )
        original(self, device_mesh, batch_dim_name, *args, **kwargs)

    return __init__


def set_distribution_or(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_distribution(value: Any) -> None:
        original(value)
        _promotion.sync_with_distribution()

    return set_distribution


def clear_session_or(original: Callable) -> Callable:
    @functools.wraps(original)
    def clear_session(free_memory: bool = True) -> None:
        original(free_memory)
        _promotion.sync_with_distribution()

    return clear_session


def optimizer_build_or(original: Callable) -> Callable:
    @functools.wraps(original)
    def build(self: Any, variables: Any) -> None:
        distribution = _layouts.active_distribution()
        if distribution is not None:
            _coverage.warn_of_gaps(distribution, self, variables)
        original(self, variables)

    return build
