"""Local tensors and placements, for code that runs inside of DTensor's dispatch.

Autograd is above this level, so nothing here is differentiable, and nothing needs to be.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.utils._pytree import tree_leaves

from keras_spmd import _promotion

Placements = tuple[Placement, ...]

# torch remembers its own decisions, but not what is done instead. Outside of a graph that must be
# worth the time.
MANY_BYTES = 2**16


def mesh_of(*structures: Any) -> DeviceMesh:
    """The mesh of the first DTensor among these arguments."""
    return next(x.device_mesh for x in tree_leaves(structures) if isinstance(x, DTensor))


def replicated(mesh: DeviceMesh) -> Placements:
    return (Replicate(),) * mesh.ndim


def is_replicated(tensor: DTensor) -> bool:
    return all(p.is_replicate() for p in tensor.placements)


def is_pending(tensor: DTensor) -> bool:
    """Whether it is a sum (or another reduction) that is still to be made."""
    return any(p.is_partial() for p in tensor.placements)


def without_partial(placements: Sequence[Placement]) -> Placements:
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)


def local_as(tensor: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    """This rank's part of `tensor` when it has these placements. None stays None.

    A plain tensor is the same on every rank, so it counts as replicated.
    """
    if tensor is None:
        return None
    if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
        tensor = to_replicated(tensor)
    placements = tuple(placements)
    if isinstance(tensor, DTensor):
        if is_pending(tensor) and placements == without_partial(tensor.placements):
            settle(tensor)
        local_tensor, source = tensor._local_tensor, tensor._spec
    else:
        _promotion.check_promoted(tensor)
        local_tensor, source = tensor, _spec(tensor, mesh, replicated(mesh))
    if source.placements != placements:
        target = DTensorSpec(mesh, placements, tensor_meta=source.tensor_meta)
        local_tensor = redistribute_local_tensor(local_tensor, source, target)
    if isinstance(local_tensor, AsyncCollectiveTensor):
        local_tensor = local_tensor.wait()
    return local_tensor


def settle(tensor: DTensor) -> None:
    """Take a pending sum once, for all that will ask for it.

    The value is the same afterwards. A view would no longer share the memory of what it views, so
    its sum is taken anew by each who asks.
    """
    if tensor._base is not None:
        return
    placements = without_partial(tensor.placements)
    target = DTensorSpec(tensor.device_mesh, placements, tensor_meta=tensor._spec.tensor_meta)
    local_tensor = redistribute_local_tensor(tensor._local_tensor, tensor._spec, target)
    if isinstance(local_tensor, AsyncCollectiveTensor):
        local_tensor = local_tensor.wait()
    tensor._local_tensor, tensor._spec = local_tensor.detach(), target


def to_replicated(tensor: DTensor) -> torch.Tensor:
    """The global tensor."""
    return local_as(tensor, tensor.device_mesh, replicated(tensor.device_mesh))


def _spec(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensorSpec:
    meta = TensorMeta(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def wrap(
    local_tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor from this rank's part.

    `shape` is the global one, if it is another, and `stride` how the whole lies in memory, if that
    is not as its part does.
    """
    if isinstance(local_tensor, AsyncCollectiveTensor):
        local_tensor = local_tensor.wait()
    local_tensor = local_tensor.detach()
    spec = _spec(local_tensor, mesh, tuple(placements))
    if shape is not None and tuple(shape) != tuple(local_tensor.shape):
        stride = _stride_like(local_tensor, shape) if stride is None else tuple(stride)
        meta = TensorMeta(shape=torch.Size(shape), stride=stride, dtype=local_tensor.dtype)
        spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local_tensor, spec, requires_grad=False)


def _stride_like(local_tensor: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Of a whole tensor without gaps, whose dims lie in memory in the order of a shard's."""
    steps: tuple[int, ...] = local_tensor.stride()
    order = sorted(range(len(shape)), key=lambda dim: (-steps[dim], dim))
    stride, step = [1] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def stack_over(local_tensor: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """The tensors of all ranks along a mesh axis, stacked. Other axes are left alone."""
    one_of_many = [Shard(0) if a == axis else Replicate() for a in range(mesh.ndim)]
    shape = (mesh.size(axis), *local_tensor.shape)
    return local_as(wrap(local_tensor[None], mesh, one_of_many, shape), mesh, replicated(mesh))


def reduce_over(local_tensor: torch.Tensor, mesh: DeviceMesh, axis: int, how: str) -> torch.Tensor:
    """The sum or maximum of the tensors of all ranks along an axis. Other axes are left alone."""
    pending = [Partial(how) if a == axis else Replicate() for a in range(mesh.ndim)]
    return local_as(wrap(local_tensor, mesh, pending), mesh, replicated(mesh))


def overwrite(target: DTensor, value: torch.Tensor) -> None:
    """Write a global value, that every rank has, into the shards of `target`."""
    part = local_as(value, target.device_mesh, without_partial(target.placements))
    target._local_tensor.copy_(only_if(counts_here(target), part))


def counts_here(target: DTensor) -> bool:
    """Whether a value that is written into `target` belongs on this rank.

    Of a pending sum one rank has it and the others zeros. torch would divide it, but integers
    can't be divided.
    """
    coordinate = target.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(p == Partial() and coordinate[i] for i, p in enumerate(target.placements))


def only_if(is_mine: bool, value: torch.Tensor, otherwise: float = 0) -> torch.Tensor:
    """`value` on the ranks it belongs on, by the same ops on all: they run one graph."""
    condition = torch.full((), is_mine, dtype=torch.bool, device=value.device)
    return torch.where(condition, value, otherwise).to(value.dtype)


def nbytes(tensor: DTensor) -> int:
    """Bytes of the global tensor."""
    return tensor.numel() * tensor._local_tensor.element_size()


def without_empty_shards(
    placements: Sequence[Placement], shape: Sequence[int], mesh: DeviceMesh, dim: int
) -> list[Placement]:
    """`placements`, but without shards of `dim` of which some rank would have none."""
    result: list[Placement] = []
    sizes = {shape[dim]} if shape else set()
    for axis, p in enumerate(placements):
        parts = parts_of(sizes, mesh.size(axis))
        if p == Shard(dim) and 0 in parts:
            result.append(Replicate())
            continue
        if p == Shard(dim):
            sizes = parts
        result.append(p)
    return result


def parts_of(sizes: Iterable[int], count: int) -> set[int]:
    """The sizes of the parts when each of `sizes` is divided among so many ranks."""
    parts: set[int] = set()
    for size in sizes:
        full = -(-size // count)
        parts |= {full, max(0, size - full * (count - 1))}
    return parts


def is_shardable(size: int, mesh: DeviceMesh) -> bool:
    """Whether every rank has a part, on whichever axes. torch divides no dim into more parts than
    it has elements, so all axes together count only if there are that many."""
    parts = {size}
    for count in mesh.shape:
        if 0 in parts_of({size}, count):
            return False
        parts = parts_of(parts, count)
    return 0 not in parts or size < mesh.size()


def only_wanted(items: Iterable[Any], mask: Iterable[bool]) -> list[Any]:
    """None for what nobody asked for."""
    return [x if is_wanted else None for x, is_wanted in zip(items, mask, strict=True)]
