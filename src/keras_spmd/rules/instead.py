"""Other layouts where torch can't follow one, and other calls where versions before 2.13 are wrong.

Those take the parts of a sum for whole numbers, in indexing for instance, and look at the sizes of
a shard where those of the whole count.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

from keras_spmd.rules._registry import TORCH_VERSION
from keras_spmd.rules._specs import local_as, wrap

aten = torch.ops.aten
IS_OLD = TORCH_VERSION < (2, 13)
# They shard the source of an index_add, but not its index.
WRONG = ("index_add", "index_add_")
_SQUEEZES = tuple(getattr(aten.squeeze, name) for name in aten.squeeze.overloads())


def instead_of(op: torch._ops.OpOverload, args: tuple) -> tuple[Any, tuple] | None:
    """The op and the arguments that older versions get right; None if they do as it is."""
    if op is aten.stack.default and len(args) > 1 and args[1] < 0:
        # They count from the end of what is stacked, which has a dim less.
        return op, (args[0], args[1] + args[0][0].ndim + 1)
    if op in _SQUEEZES:
        # They drop every dim that has one element on this rank.
        dims = _dims_of_one(args[0], *args[1:])
        is_right = op is aten.squeeze.dims and list(args[1]) == dims
        return None if is_right else (aten.squeeze.dims, (args[0], dims))
    if op is aten.index.Tensor and any(map(shards_one_element, tree_leaves(args))):
        # They take the index of a rank that has none for the whole index.
        return op, tree_map(with_whole_elements, args)
    return None


def _dims_of_one(x: DTensor, dims: Any = None) -> list[int]:
    """Those of these dims that have one element."""
    asked = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    return [dim % max(x.ndim, 1) for dim in asked if x.ndim and x.shape[dim] == 1]


def divisor(op: torch._ops.OpOverload, args: tuple) -> tuple:
    """What is divided by. To older rules a quotient is a sum if its divisor is one."""
    return args[1:] if op.overloadpacket.__name__ in ("div", "div_") else ()


def shards_one_element(x: Any) -> bool:
    """Whether a dim of size 1 is sharded, so that one rank has it and the others have nothing."""
    return isinstance(x, DTensor) and any(
        isinstance(p, Shard) and x.shape[p.dim] == 1 for p in x.placements
    )


def with_whole_elements(x: Any) -> Any:
    if not shards_one_element(x):
        return x
    return _placed(
        x,
        [Replicate() if isinstance(p, Shard) and x.shape[p.dim] == 1 else p for p in x.placements],
    )


def whole_along(x: DTensor, dim: int = 0) -> DTensor:
    return _placed(x, [Replicate() if p == Shard(dim % x.ndim) else p for p in x.placements])


def shards_several(x: DTensor) -> bool:
    return len({p.dim for p in x.placements if isinstance(p, Shard)}) > 1


def without_last_shard(x: DTensor) -> DTensor:
    """Whole along the last dim that is sharded; the batch is the first."""
    return whole_along(x, max(p.dim for p in x.placements if isinstance(p, Shard)))


def _placed(x: DTensor, placements: list[Placement]) -> DTensor:
    # What was gathered has strides that can't be viewed.
    local = local_as(x, x.device_mesh, placements).contiguous()
    return wrap(local, x.device_mesh, placements, x.shape)
