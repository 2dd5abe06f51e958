"""A plain tensor meets a DTensor.

Ranks run the same program, so a plain tensor is the same on all of them and counts as replicated.
torch has a switch for that, `implicit_replication`. It works below autograd and below
`torch.compile`, so every op is covered without being named. What it lacks is added here: it nests,
it is off again after the last distribution, and it can be checked (`KERAS_SPMD_CHECK=1`).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from keras_spmd import _layouts, _settings
from keras_spmd._notices import where


class _Switch(threading.local):
    """Who wants plain tensors promoted in this thread. torch's flag is thread-local as well."""

    def __init__(self) -> None:
        self.by_distribution = False
        self.by_scopes = 0
        self.by_user = False

    @property
    def wanted(self) -> bool:
        return self.by_distribution or self.by_scopes > 0 or self.by_user


_switch = _Switch()


def _apply() -> None:
    torch._C._set_dtensor_allow_implicit_replication(_switch.wanted)


def _get_flag(dispatcher: Any) -> bool:
    return torch._C._get_dtensor_allow_implicit_replication()


def _set_flag(dispatcher: Any, value: bool) -> None:
    # torch's own context manager ends with False, also when it is used inside of a distribution.
    _switch.by_user = value
    _apply()


torch_switch = property(_get_flag, _set_flag)


def is_promoting() -> bool:
    return _switch.wanted


@contextlib.contextmanager
def promoting() -> Iterator[None]:
    """Promote plain tensors in this block, whether or not a distribution is active."""
    _switch.by_scopes += 1
    _apply()
    try:
        yield
    finally:
        _switch.by_scopes -= 1
        _apply()


def sync_with_distribution() -> None:
    """Promote exactly while a distribution over several devices is active."""
    distribution = _layouts.active_distribution()
    wanted = distribution is not None and not _layouts.is_mesh_of_one(distribution.device_mesh)
    if wanted != _switch.by_distribution:
        _switch.by_distribution = wanted
        _apply()
        _tell_autograd_threads(wanted)


class _TellThread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wanted: bool) -> torch.Tensor:
        ctx.wanted = wanted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _switch.by_distribution = ctx.wanted
        _apply()
        return grad, None


def _tell_autograd_threads(wanted: bool) -> None:
    # The backward pass of CUDA tensors runs in a thread of its own, which has its own flag.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        with torch.enable_grad():
            x = torch.zeros((), device="cuda", requires_grad=True)
            _TellThread.apply(x, wanted).backward()


def replicated_spec_or(original: Callable) -> Callable:
    """The spec of a promoted tensor; torch asks for it at every op that mixes the two kinds."""

    def replicated_spec(
        dispatcher: Any, op: torch._ops.OpOverload, tensor: torch.Tensor, mesh: DeviceMesh
    ) -> DTensorSpec:
        if not _switch.wanted:
            return original(dispatcher, op, tensor, mesh)
        check_promoted(tensor, f"the op {op}")
        # torch's own warns of tensors of shape (1,), which are ordinary here.
        meta = TensorMeta(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype)
        return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)

    return replicated_spec


def check_promoted(tensor: torch.Tensor, user: str = "an op") -> None:
    """With `KERAS_SPMD_CHECK=1`: raise unless this plain tensor is equal on all ranks."""
    if not _settings.check() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
        return
    mine = _fingerprint(tensor)
    all_prints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_prints, mine)
    if any(other != mine for other in all_prints):
        groups: dict[Any, list[int]] = {}
        for rank, fingerprint in enumerate(all_prints):
            groups.setdefault(fingerprint, []).append(rank)
        raise RuntimeError(
            f"KERAS_SPMD_CHECK: {user} {where()} got a plain tensor of shape "
            f"{tuple(tensor.shape)} and dtype {tensor.dtype} that is not the same on all ranks: "
            f"these groups of ranks differ: {sorted(groups.values())}. A plain tensor must be the "
            "same everywhere; draw it with keras.random or a fixed seed, or lay it out with "
            "keras.distribution.distribute_tensor."
        )


def _fingerprint(tensor: torch.Tensor) -> tuple:
    values = tensor.detach().cpu().contiguous().flatten()
    data = values.view(torch.uint8) if values.numel() else values.to(torch.uint8)
    weights = torch.arange(1, data.numel() + 1, dtype=torch.int64)
    checksum = int((data.to(torch.int64) * (weights % 1000003)).sum())
    return tuple(tensor.shape), str(tensor.dtype), checksum


def is_dtensor(x: object) -> bool:
    """Whether `x` is a tensor that is laid out over a mesh.

    Example:

    >>> import torch, keras_spmd
    >>> keras_spmd.is_dtensor(torch.ones(2))
    False
    """
    return isinstance(x, DTensor)


def ensure_dtensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`tensor` as a DTensor: laid out anew if it is plain, redistributed if it must be.

    Example:

    >>> import keras, torch, keras_spmd
    >>> keras.distribution.set_distribution(keras.distribution.DataParallel())
    >>> x = keras_spmd.ensure_dtensor(torch.ones(4, 2))                  # replicated
    >>> from torch.distributed.tensor import Shard
    >>> x = keras_spmd.ensure_dtensor(x, placements=[Shard(0)])          # sharded on dim 0
    >>> x.shape, x.placements
    (torch.Size([4, 2]), (Shard(dim=0),))

    Args:
        tensor: A plain tensor that is the same on every rank, or a DTensor.
        device_mesh: A torch mesh. Defaults to the DTensor's own, or the active distribution's.
        placements: One for each axis of the mesh. Defaults to what the DTensor has, or replicated.

    Returns:
        A DTensor. Gradients flow through.
    """
    if isinstance(tensor, DTensor):
        if device_mesh is not None and device_mesh != tensor.device_mesh:
            tensor = tensor.full_tensor()
        elif placements is None or tuple(placements) == tensor.placements:
            return tensor
        else:
            return tensor.redistribute(placements=placements)
    mesh = device_mesh if device_mesh is not None else _mesh_for_helpers()
    tensor = tensor.to(mesh.device_type)
    check_promoted(tensor, "laying out a tensor")
    whole = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole if placements is None else whole.redistribute(placements=placements)


def _mesh_for_helpers() -> DeviceMesh:
    distribution = _layouts.active_distribution()
    if distribution is None:
        raise ValueError(
            "There is no active distribution to take the mesh from. Call "
            "keras.distribution.set_distribution(...) first, or pass device_mesh=."
        )
    mesh = _layouts.compute_mesh(distribution.device_mesh)
    return mesh if mesh is not None else _layouts.backend_mesh(distribution.device_mesh)


def convert_tensors_to_dtensor(
    *tensors: torch.Tensor, device_mesh: DeviceMesh | None = None
) -> tuple[DTensor, ...]:
    """All of `tensors` as DTensors on one mesh.

    Example:

    >>> import keras, torch, keras_spmd
    >>> keras.distribution.set_distribution(keras.distribution.DataParallel())
    >>> x, mask = torch.ones(4, 2), torch.tensor([True, False, True, True])
    >>> x, mask = keras_spmd.convert_tensors_to_dtensor(x, mask)
    >>> x.device_mesh == mask.device_mesh
    True

    The mesh is `device_mesh`, or that of the first DTensor among them, or the active one.
    """
    if device_mesh is None:
        device_mesh = next((t.device_mesh for t in tensors if isinstance(t, DTensor)), None)
    return tuple(ensure_dtensor(t, device_mesh) for t in tensors)


def get_dtensor_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor is returned as it is.

    Example:

    >>> import keras, torch, keras_spmd
    >>> keras.distribution.set_distribution(keras.distribution.DataParallel())
    >>> x = keras_spmd.create_replicate_dtensor(torch.ones(8))
    >>> keras_spmd.get_dtensor_local(x).shape
    torch.Size([8])
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_dtensor_spec(tensor: torch.Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """The mesh and the placements of a DTensor; None for a plain tensor.

    Example:

    >>> import keras, torch, keras_spmd
    >>> keras.distribution.set_distribution(keras.distribution.DataParallel())
    >>> x = keras_spmd.create_replicate_dtensor(torch.ones(8))
    >>> device_mesh, placements = keras_spmd.get_dtensor_spec(x)
    >>> placements
    (Replicate(),)
    >>> keras_spmd.get_dtensor_spec(torch.ones(8)) is None
    True
    """
    if not isinstance(tensor, DTensor):
        return None
    return tensor.device_mesh, tuple(tensor.placements)


def create_replicate_dtensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh | None = None
) -> DTensor:
    """`tensor` as a DTensor that every rank holds whole.

    Example:

    >>> import keras, torch, keras_spmd
    >>> keras.distribution.set_distribution(keras.distribution.DataParallel())
    >>> scale = keras_spmd.create_replicate_dtensor(torch.ones(8))
    >>> keras_spmd.is_dtensor(scale)
    True
    """
    mesh = device_mesh if device_mesh is not None else _mesh_for_helpers()
    return ensure_dtensor(tensor, mesh, [Replicate()] * mesh.ndim)
