"""A tensor that is sharded on one dim becomes one that is sharded on another.

Each rank has a part of every other rank's part, and sends it there: 1/N of what gathering takes.
torch gathers on CPUs, because gloo once had no all-to-all. On GPUs it calls an op that waits where
it stands and that is no functional collective, so neither the passes of a captured step nor its
report would see it.
"""

import torch
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh


def to_other_dim(
    local: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """This rank's shard of `shard_dim`, from its shard of `gather_dim`; both divide evenly."""
    parts = local.unflatten(shard_dim, (mesh.size(mesh_dim), -1)).movedim(shard_dim, 0)
    moved = all_to_all(parts, None, None, mesh, mesh_dim)
    # What follows may be a view that a whole tensor in its usual order can have.
    return moved.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()


def all_to_all(
    rows: torch.Tensor,
    received: list[int] | None,
    sent: list[int] | None,
    mesh: DeviceMesh,
    mesh_dim: int,
) -> torch.Tensor:
    """Send so many rows to each rank of an axis, and receive so many; the same of each if None."""
    if rows.is_complex():  # gloo has none
        pairs = torch.view_as_real(rows.resolve_conj())
        return torch.view_as_complex(all_to_all(pairs, received, sent, mesh, mesh_dim))
    moved = functional.all_to_all_single(rows.contiguous(), received, sent, (mesh, mesh_dim))
    return moved.wait() if isinstance(moved, functional.AsyncCollectiveTensor) else moved
