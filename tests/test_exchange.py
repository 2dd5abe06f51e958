"""From shards of one dim to shards of another, without gathering: every dtype and size."""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from bench import on_ranks
from keras_spmd.distribution_lib import _to_backend_mesh, num_processes
from keras_spmd.graph._capture import local_of
from meshes import grid, line

DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
DTYPES += ["complex64", "complex128"]
EVEN = (12, 24, 12)


def numbers(shape, dtype):
    count = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    return (count % 2 if dtype == "bool" else count % 100).to(getattr(torch, dtype))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dim_to_each_other(dtype):
    mesh = _to_backend_mesh(line())
    for shape in [EVEN, (5, 7, 2), (1, 9, 3)]:
        x = numbers(shape, dtype)
        for before, after in itertools.permutations(range(3), 2):
            sharded = distribute_tensor(x, mesh, [Shard(before)])
            with CommDebugMode() as mode:
                moved = sharded.redistribute(placements=[Shard(after)])
            assert torch.equal(moved.full_tensor(), x), (shape, before, after)
            if shape == EVEN:  # of others torch cuts off what it has padded
                assert local_of(moved).is_contiguous(), (before, after)
            names = {str(op).split(".")[-1] for op in mode.get_comm_counts()}
            assert names == {"all_to_all_single"}, names


@on_ranks(2)
def test_conjugated_numbers_and_views_of_uneven_ones():
    mesh = _to_backend_mesh(line())
    x = torch.complex(torch.rand(4, 6), torch.rand(4, 6))
    moved = distribute_tensor(x, mesh, [Shard(0)]).conj().redistribute(placements=[Shard(1)])
    assert torch.equal(moved.full_tensor(), x.conj().resolve_conj())
    uneven = torch.complex(torch.rand(5, 4, 3), torch.rand(5, 4, 3))
    view = distribute_tensor(uneven, mesh, [Shard(0)]).view(20, 3)
    assert tuple(view.placements) == (Shard(0),)
    assert torch.equal(view.full_tensor(), uneven.view(20, 3))


@on_ranks(4)
def test_on_one_axis_of_two():
    mesh = _to_backend_mesh(grid())
    x = numbers((8, 6, 10), "float32")
    for rows in range(3):
        sharded = distribute_tensor(x, mesh, [Shard(rows), Shard((rows + 1) % 3)])
        for axis in (0, 1):
            placements = list(sharded.placements)
            placements[axis] = Shard((rows + 2) % 3)
            moved = sharded.redistribute(placements=placements)
            assert tuple(moved.placements) == tuple(placements)
            assert torch.equal(moved.full_tensor(), x)


@on_ranks(2)
def test_gradients_come_back():
    mesh = _to_backend_mesh(line())
    x = distribute_tensor(torch.rand(4, 6), mesh, [Shard(0)]).requires_grad_()
    weights = torch.arange(24.0).reshape(4, 6)
    moved = x.redistribute(placements=[Shard(1)])
    (moved * distribute_tensor(weights, mesh, [Shard(1)])).sum().backward()
    assert isinstance(x.grad, DTensor)
    assert tuple(x.grad.placements) == (Shard(0),)
    assert torch.equal(local_of(x.grad), weights.chunk(num_processes())[mesh.get_rank()])
