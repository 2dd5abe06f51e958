"""Keras meshes and layouts as torch meshes and placements: validated, and made once.

"Axis" is always a mesh axis and "dim" always a tensor dim.

Mesh axes of size 1 cost nothing because they don't exist below this file: a Keras mesh of (1, 4)
becomes a torch mesh of 4, and on a mesh of one device tensors stay plain tensors.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from keras.src.backend.common import global_state
from keras.src.distribution import distribution_lib as keras_distribution
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import _disable_current_modes

from keras_spmd import _gloo, _processes
from keras_spmd._groups import OncePerGroup
from keras_spmd._notices import warn_once


class BackendLayout(NamedTuple):
    """What a Keras `TensorLayout` is to torch."""

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]


class _Meshes(NamedTuple):
    full: DeviceMesh
    compute: DeviceMesh


_meshes: dict[tuple, _Meshes] = {}
_group = OncePerGroup()


def active_distribution() -> Any:
    """The Keras distribution in effect, or None."""
    return global_state.get_global_attribute("distribution")


def active_mesh() -> DeviceMesh | None:
    """The torch mesh that tensors live on now; None without a distribution or on a mesh of one."""
    distribution = active_distribution()
    return None if distribution is None else compute_mesh(distribution.device_mesh)


def is_mesh_of_one(keras_mesh: Any) -> bool:
    return math.prod(keras_mesh.shape) == 1


def backend_mesh(keras_mesh: Any) -> DeviceMesh:
    """The torch mesh with all axes of the Keras mesh, those of size 1 too."""
    return _torch_meshes(keras_mesh).full


def compute_mesh(keras_mesh: Any) -> DeviceMesh | None:
    """The torch mesh without the axes of size 1; None on a mesh of one."""
    if is_mesh_of_one(keras_mesh):
        if _processes.num_processes() > 1:
            check_covers_world(keras_mesh.shape, [0])
        return None
    return _torch_meshes(keras_mesh).compute


def _torch_meshes(keras_mesh: Any) -> _Meshes:
    _processes.ensure_group()
    if _group.is_new():
        _meshes.clear()
    key = (tuple(keras_mesh.shape), tuple(keras_mesh.axis_names), tuple(keras_mesh.devices.flat))
    if key not in _meshes:
        full = _make_torch_mesh(keras_mesh)
        wide = tuple(
            name
            for name, size in zip(keras_mesh.axis_names, keras_mesh.shape, strict=True)
            if size > 1
        )
        # Slices of a mesh are new objects each time: keep ours.
        compute = full if not wide or len(wide) == full.ndim else full[wide]
        _meshes[key] = _Meshes(full, compute)
    return _meshes[key]


def _make_torch_mesh(keras_mesh: Any) -> DeviceMesh:
    kinds, ranks = [], []
    for name in keras_mesh.devices.flat:
        kind, _, number = str(name).partition(":")
        kinds.append("cuda" if kind in ("gpu", "cuda") else kind)
        ranks.append(int(number or 0))
    if len(set(kinds)) > 1:
        raise ValueError(f"{keras_mesh} mixes devices of the kinds {sorted(set(kinds))}.")
    check_covers_world(keras_mesh.shape, ranks)
    grid, names = np.reshape(ranks, keras_mesh.shape), tuple(keras_mesh.axis_names)
    if all((np.diff(grid, axis=axis) > 0).all() for axis in range(grid.ndim)):
        if grid.ndim == 1 and _gloo.has_threads(dist.group.WORLD):
            # torch would take the group of all ranks.
            return DeviceMesh.from_group(
                dist.new_group(),
                kinds[0],
                torch.tensor(grid, dtype=torch.int),
                mesh_dim_names=names,
            )
        return DeviceMesh(kinds[0], torch.tensor(grid), mesh_dim_names=names)
    return _make_mesh_in_given_order(kinds[0], grid, names)


def _make_mesh_in_given_order(kind: str, grid: np.ndarray, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh whose devices are not in ascending order along every axis.

    DTensor takes a rank's place in a process group for its place on the mesh axis, and torch sorts
    the ranks of a group, unless it is told not to.
    """
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        warn_once(
            "device order",
            f"torch {torch.__version__} can't keep the given order of devices on a mesh, so they "
            "are in ascending order. Results are the same; which device holds which shard is not.",
        )
        return DeviceMesh(
            kind, torch.tensor(np.sort(grid, axis=None).reshape(grid.shape)), mesh_dim_names=names
        )
    groups = []
    for axis in range(grid.ndim):
        # Every process takes part in making every group.
        for line in np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]):
            group = dist.new_group([int(rank) for rank in line], sort_ranks=False)
            if _processes.process_id() in line:
                groups.append(group)
    mesh = torch.tensor(grid, dtype=torch.int)
    return DeviceMesh.from_group(
        groups if grid.ndim > 1 else groups[0], kind, mesh, mesh_dim_names=names
    )


def check_covers_world(shape: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise unless the mesh holds every process of the job exactly once."""
    world_size = _processes.num_processes()
    if len(ranks) > world_size or (len(set(ranks)) == len(ranks) and max(ranks) >= world_size):
        raise ValueError(
            f"A mesh of shape {tuple(shape)} needs {len(ranks)} devices, and this job has "
            f"{world_size} (one for each process). Start it with\n    "
            + _processes.launch_command(max(len(ranks), max(ranks) + 1))
        )
    if sorted(ranks) != list(range(world_size)):
        raise ValueError(
            f"A mesh of shape {tuple(shape)} holds the devices {sorted(ranks)}, but this job has "
            f"the devices {list(range(world_size))}: a mesh must cover each of them exactly once. "
            f"Use a mesh of {world_size} devices, or start as many processes as the mesh has."
        )


def backend_layout(layout: Any) -> BackendLayout:
    """The torch mesh and placements of a `TensorLayout`, for a tensor of at least its dims."""
    if layout.device_mesh is None:
        raise ValueError(
            "Cannot create sharding when device mesh is not set for TensorLayout. "
            f"Received: layout={layout}"
        )
    placements = placements_of(layout)
    mesh = compute_mesh(layout.device_mesh)
    if mesh is None:
        mesh = backend_mesh(layout.device_mesh)
        placements = (Replicate(),) * mesh.ndim
    return BackendLayout(mesh, placements)


def placements_of(
    layout: Any, shape: Sequence[int] | None = None, *, what: str = "a tensor"
) -> tuple[Placement, ...]:
    """One placement for each axis of the compute mesh.

    Dims that the layout doesn't name are not sharded. `what` names the tensor in errors.
    """
    axes = tuple(layout.axes)
    if shape is not None and len(axes) > len(shape):
        raise ValueError(
            f"The layout {axes} names {len(axes)} dims, but {what} has shape {tuple(shape)}: "
            f"{len(shape)} dims. Give it at most {len(shape)}, e.g. {axes[: len(shape)]}."
        )
    twice = [axis for axis in set(axes) if axis is not None and axes.count(axis) > 1]
    if twice:
        raise ValueError(
            f"The layout {axes} for {what} uses the mesh axis {twice[0]!r} for more than one dim. "
            "An axis can shard one dim only; put None at the others."
        )
    mesh = layout.device_mesh
    placements: list[Placement] = []
    for name, count in zip(mesh.axis_names, mesh.shape, strict=True):
        if count == 1:
            continue
        dim = axes.index(name) if name in axes else None
        if dim is None or (shape is not None and leaves_a_rank_empty(shape[dim], count)):
            placements.append(Replicate())
        else:
            placements.append(Shard(dim))
    return tuple(placements)


def leaves_a_rank_empty(size: int, count: int) -> bool:
    """Whether a dim of this size, sharded over `count` ranks, is too small for all of them.

    Such a dim is not sharded: it is tiny, and many ops fail on the rank that would have nothing.
    """
    return -(-size // count) * (count - 1) >= size


def divides(placement: Placement) -> bool:
    """Whether it shards a dim. torch's strided shards don't say so of themselves."""
    return not (placement.is_replicate() or placement.is_partial())


def local_shape_and_offset(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    coordinate: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which part of a tensor of this global shape this rank holds, or the one at `coordinate`."""
    if any(type(p) is not Shard and divides(p) for p in placements):
        # Shards in an order of torch's own; it computes with tensors, which a trace would follow.
        with _disable_current_modes():
            local_shape, offset = compute_local_shape_and_global_offset(
                tuple(shape), mesh, placements
            )
        return tuple(local_shape), tuple(offset)
    local, start = list(shape), [0] * len(shape)
    coordinate = mesh.get_coordinate() if coordinate is None else coordinate
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = placement.dim
            full = -(-local[dim] // mesh.size(axis))
            first = min(full * coordinate[axis], local[dim])
            start[dim] += first
            local[dim] = min(full, local[dim] - first)
    return tuple(local), tuple(start)


def local_slice(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """This rank's part of a global tensor that every rank holds whole."""
    shape, offset = local_shape_and_offset(tensor.shape, mesh, placements)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        if size != tensor.shape[dim]:
            # An empty shard's offset may lie behind the end.
            tensor = tensor.narrow(dim, min(start, tensor.shape[dim] - size), size)
    return tensor


def wrap_local(
    local_tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> DTensor:
    """A DTensor of this global shape from this rank's part. Not differentiable."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local_tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def replicated_layout(keras_mesh: Any, ndim: int) -> Any:
    return keras_distribution.TensorLayout([None] * ndim, keras_mesh)
