"""A sharded tensor becomes whole on rank 0 alone: its parts are sent there one by one."""

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from keras_spmd._layouts import local_shape_and_offset


def parts_of(x: DTensor) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """Each part of a tensor once: the first rank that has it, and where it lies."""
    mesh, seen = x.device_mesh, set()
    for coordinate in itertools.product(*map(range, mesh.shape)):
        shape, start = local_shape_and_offset(x.shape, mesh, x.placements, coordinate)
        if start not in seen and 0 not in shape:
            seen.add(start)
            part = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
            yield int(mesh.mesh[coordinate]), part


def whole_on_rank_0(x: DTensor) -> torch.Tensor | None:
    """The global tensor, in host memory; None on other ranks. Takes all ranks."""
    if any(p.is_partial() for p in x.placements):
        x = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    rank, local = dist.get_rank(), x._local_tensor
    whole = torch.empty(x.shape, dtype=x.dtype) if rank == 0 else None
    for owner, part in parts_of(x):
        if whole is None:
            if rank == owner:
                dist.send(_bytes(local), 0)
        elif owner == 0:
            whole[part] = local.cpu()
        else:
            arrived = torch.empty_like(whole[part], device=local.device).contiguous()
            dist.recv(_bytes(arrived), owner)
            whole[part] = arrived.cpu()
    return whole


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Not every backend can send every kind of number."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
