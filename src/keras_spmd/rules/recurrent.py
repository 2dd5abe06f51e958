"""cuDNN's recurrent layers, LSTM and GRU: sharded on the batch. torch has no rules for them.

Rows don't know of each other, so each rank runs its own. What cuDNN keeps for the backward pass has
a form of its own, and stays on the rank that made it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from keras_spmd.rules._registry import handler
from keras_spmd.rules._specs import local_as, mesh_of, replicated, without_empty_shards, wrap

# States are (layers, batch, features).
STATE_BATCH = 1


class _Placed:
    """The placements of everything that has the batch as a dim."""

    def __init__(self, x: Any, batch_first: bool, batch_sizes: Any, mesh: DeviceMesh) -> None:
        self.mesh, self.dim = mesh, 0 if batch_first else 1
        # Packed sequences have the steps of all rows in one dim.
        placements = x.placements if isinstance(x, DTensor) and not batch_sizes else ()
        rows = [p if p == Shard(self.dim) else Replicate() for p in placements]
        self.rows: list[Placement] = (
            without_empty_shards(rows, x.shape, mesh, self.dim) if rows else [*replicated(mesh)]
        )
        self.states = self._like(Shard(STATE_BATCH))
        self.shares = self._like(Shard(0))
        self.sums = self._like(Partial())

    def _like(self, placement: Placement) -> list[Placement]:
        return [placement if isinstance(p, Shard) else Replicate() for p in self.rows]

    def whole(self, x: Any) -> Any:
        return self._in_order(x, replicated(self.mesh))

    def state(self, x: Any) -> Any:
        return self._in_order(x, self.states)

    def row(self, x: Any) -> Any:
        return self._in_order(x, self.rows)

    def time_major(self, x: Any) -> Any:
        """In the order in which cuDNN writes outputs and, without looking, reads them."""
        local = local_as(x, self.mesh, self.rows)
        if self.dim == 1:
            return local.contiguous()
        return local.transpose(0, 1).contiguous().transpose(0, 1)

    def _in_order(self, x: Any, placements: Sequence[Placement]) -> Any:
        """cuDNN takes no other strides."""
        local = local_as(x, self.mesh, placements)
        return None if local is None else local.contiguous()

    def wrapped_rows(self, local: torch.Tensor, like: Any) -> DTensor:
        shape = list(local.shape)
        shape[self.dim] = like.shape[self.dim]
        return wrap(local, self.mesh, self.rows, shape)

    def wrapped_state(self, local: torch.Tensor, like: Any) -> DTensor:
        if local.ndim != like.ndim:  # A GRU has no second state; cuDNN returns an empty one.
            return wrap(local, self.mesh, replicated(self.mesh))
        shape = list(local.shape)
        shape[STATE_BATCH] = like.shape[STATE_BATCH]
        return wrap(local, self.mesh, self.states, shape)


@handler("aten._cudnn_rnn.default")
def cudnn_rnn(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, weight, stride, buffer, hx, cx, *settings, batch_sizes, dropout_state = args
    batch_first = settings[4]
    placed = _Placed(x, batch_first, batch_sizes, mesh_of(args))
    output, hy, cy, reserve, buffer = op(
        placed.row(x),
        [placed.whole(w) for w in weight],
        stride,
        placed.whole(buffer),
        placed.state(hx),
        placed.state(cx),
        *settings,
        batch_sizes,
        placed.whole(dropout_state),
    )
    return (
        placed.wrapped_rows(output, x),
        placed.wrapped_state(hy, hx),
        placed.wrapped_state(cy, hx),
        wrap(reserve, placed.mesh, placed.shares),
        wrap(buffer, placed.mesh, replicated(placed.mesh)),
    )


@handler("aten._cudnn_rnn_backward.default")
def cudnn_rnn_backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    x, weight, stride, buffer, hx, cx, output, grad, grad_hy, grad_cy, *settings = args
    *settings, batch_sizes, dropout_state, reserve, mask = settings
    batch_first = settings[4]
    # The reserve says how the forward pass went.
    mesh = reserve.device_mesh
    placed = _Placed(output, batch_first, batch_sizes, mesh)
    dx, dhx, dcx, dweights = op(
        placed.row(x),
        [placed.whole(w) for w in weight],
        stride,
        placed.whole(buffer),
        placed.state(hx),
        placed.state(cx),
        placed.time_major(output),
        placed.row(grad),
        placed.state(grad_hy),
        placed.state(grad_cy),
        *settings,
        batch_sizes,
        placed.whole(dropout_state),
        reserve._local_tensor,
        mask,
    )
    return (
        placed.wrapped_rows(dx, x) if mask[0] else None,
        placed.wrapped_state(dhx, hx) if mask[1] else None,
        placed.wrapped_state(dcx, hx) if mask[2] else None,
        [wrap(g, mesh, placed.sums) for g in dweights],
    )
