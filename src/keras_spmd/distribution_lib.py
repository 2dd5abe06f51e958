"""The backend side of `keras.distribution`, for torch.

Keras finds this module as `keras.src.backend.torch.distribution_lib`. Its functions have the names
and the arguments of those that Keras has for JAX.
"""

from typing import Any

import torch
import torch.distributed as dist
from keras.src import tree
from keras.src.backend.common.keras_tensor import KerasTensor
from keras.src.backend.torch import core as keras_torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from keras_spmd import _layouts, _processes, _promotion
from keras_spmd._layouts import BackendLayout
from keras_spmd._processes import initialize as initialize
from keras_spmd._processes import list_devices as list_devices
from keras_spmd._processes import num_processes as num_processes
from keras_spmd._processes import process_id as process_id


def get_device_count(device_type: str | None = None) -> int:
    """How many devices the job has, over all processes."""
    return len(list_devices(device_type))


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Lay a tensor out, or change its layout. Gradients flow through.

    Example:

    >>> y = keras.distribution.distribute_tensor(y, TensorLayout(("batch", None), mesh))

    Args:
        tensor: A plain tensor (or array) that is the same on every rank, a DTensor of any
            placement, or a structure of them.
        layout: A `TensorLayout`, or what `_to_backend_layout` makes of one.
    """
    if tree.is_nested(tensor):
        return tree.map_structure(lambda t: distribute_tensor(t, layout), tensor)
    if tensor is None or isinstance(tensor, KerasTensor):
        return tensor
    tensor = keras_torch.convert_to_tensor(tensor)
    if tensor.is_meta:
        return tensor
    mesh, placements = _mesh_and_placements(layout, tuple(tensor.shape))
    if mesh is None:
        return tensor
    _promotion.sync_with_distribution()
    if isinstance(tensor, DTensor) and tensor.device_mesh == mesh:
        return tensor if tensor.placements == placements else tensor.redistribute(mesh, placements)
    return _promotion.ensure_dtensor(tensor, mesh, placements)


def distribute_variable(value: Any, layout: Any) -> Any:
    """Lay the value of a variable out; the result is a leaf without a gradient history."""
    return distribute_tensor(keras_torch.convert_to_tensor(value).detach(), layout)


def distribute_data_input(per_process_batch: Any, layout: Any, batch_dim_name: str) -> Any:
    """The global batch, from the rows that this process has.

    Example:

    >>> x = distribute_data_input(my_rows, distribution.get_data_layout(my_rows.shape), "batch")

    Args:
        per_process_batch: This process's rows. Processes that share a data shard pass the same.
        layout: The layout of the global batch.
        batch_dim_name: The mesh axis that the rows are sharded over.
    """
    if tree.is_nested(per_process_batch):
        return tree.map_structure(
            lambda t: distribute_data_input(t, layout, batch_dim_name), per_process_batch
        )
    if per_process_batch is None:
        return None
    rows = keras_torch.convert_to_tensor(per_process_batch)
    if isinstance(rows, DTensor):
        return distribute_tensor(rows, layout)
    mesh, _ = _mesh_and_placements(layout, tuple(rows.shape))
    if mesh is None or batch_dim_name not in mesh.mesh_dim_names:
        return distribute_tensor(rows, layout)
    axis = mesh.mesh_dim_names.index(batch_dim_name)
    counts = _row_counts(rows, mesh, axis)
    shape = (sum(counts), *rows.shape[1:])
    _, placements = _mesh_and_placements(layout, shape)
    by_rows = tuple(Shard(0) if i == axis else Replicate() for i in range(mesh.ndim))
    if counts == _even_counts(shape[0], len(counts)):
        batch = _layouts.wrap_local(rows.contiguous(), mesh, by_rows, shape)
    else:
        batch = _promotion.ensure_dtensor(_gather_rows(rows, mesh, axis, counts), mesh)
    return batch.redistribute(mesh, placements)


def _row_counts(rows: torch.Tensor, mesh: DeviceMesh, axis: int) -> list[int]:
    mine = torch.tensor([rows.shape[0]], device=rows.device)
    counts = [torch.empty_like(mine) for _ in range(mesh.size(axis))]
    dist.all_gather(counts, mine, group=mesh.get_group(axis))
    return [int(count) for count in counts]


def _even_counts(total: int, shards: int) -> list[int]:
    """How many rows each shard has in DTensor's (and `torch.chunk`'s) way of dividing them."""
    full = -(-total // shards)
    return [max(0, min(full, total - full * i)) for i in range(shards)]


def _gather_rows(
    rows: torch.Tensor, mesh: DeviceMesh, axis: int, counts: list[int]
) -> torch.Tensor:
    longest = rows.new_zeros((max(counts), *rows.shape[1:]))
    longest[: rows.shape[0]] = rows
    parts = [torch.empty_like(longest) for _ in counts]
    dist.all_gather(parts, longest, group=mesh.get_group(axis))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _mesh_and_placements(layout: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    if isinstance(layout, BackendLayout):
        mesh, placements = layout
        return (None if mesh.size() == 1 else mesh), tuple(
            Replicate()
            if isinstance(p, Shard) and _layouts.leaves_a_rank_empty(shape[p.dim], mesh.size(axis))
            else p
            for axis, p in enumerate(placements)
        )
    if layout.device_mesh is None:
        raise ValueError(f"The layout {layout} has no device mesh. Pass device_mesh= to it.")
    placements = _layouts.placements_of(layout, shape, what="the tensor")
    return _layouts.compute_mesh(layout.device_mesh), placements


def _to_backend_device(device_name: Any) -> torch.device:
    """The torch device of a name like 'gpu:3', as this process's host sees it."""
    if isinstance(device_name, torch.device):
        return device_name
    kind, _, number = str(device_name).partition(":")
    kind = {"gpu": "cuda"}.get(kind, kind)
    rank = int(number or 0)
    if f"{kind.replace('cuda', 'gpu')}:{rank}" not in list_devices(kind):
        raise ValueError(f"Device not found: {device_name}. This job has {list_devices(kind)}.")
    if kind != "cuda":
        return torch.device(kind)
    if rank == _processes.process_id():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", rank % torch.cuda.device_count())


def _to_backend_mesh(device_mesh: Any) -> DeviceMesh:
    """The torch `DeviceMesh` of a Keras one; the same object for equal Keras meshes."""
    return _layouts.backend_mesh(device_mesh)


def _to_backend_layout(tensor_layout: Any) -> BackendLayout:
    """The torch mesh (without axes of size 1) and placements of a `TensorLayout`."""
    return _layouts.backend_layout(tensor_layout)
