"""Steps that are replayed as CUDA graphs. Needs a GPU."""

import gc

import pytest
import torch

import keras_spmd
from keras_spmd.graph._cuda_graphs import Replayed, can_be_replayed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_a_replayed_step_counts_on(monkeypatch):
    monkeypatch.setenv("KERAS_SPMD_CUDA_GRAPHS", "1")
    state = torch.zeros(4, device="cuda")

    def step(args):
        args[0].add_(args[1])
        return [args[0].sum()]

    run = Replayed(step, 1)
    results = [run([state, torch.full((4,), float(i), device="cuda")]) for i in range(10)]
    assert run.graph is not None
    assert [float(r[0]) for r in results] == [4.0 * sum(range(i + 1)) for i in range(10)]


@needs_gpu
def test_state_that_lies_elsewhere_is_recorded_again(monkeypatch):
    monkeypatch.setenv("KERAS_SPMD_CUDA_GRAPHS", "1")
    first, second = torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda")
    run = Replayed(lambda args: [args[0].add_(1.0).clone()], 1)
    for _ in range(8):
        run([first])
    run.forget()
    for _ in range(8):
        run([second])
    assert float(first[0]) == float(second[0]) == 8.0


@needs_gpu
def test_steps_that_come_after_one_that_is_gone(monkeypatch):
    """What it returned is still there, and holds a part of its memory."""
    monkeypatch.setenv("KERAS_SPMD_CUDA_GRAPHS", "1")
    kept = []
    for i in range(3):
        state = torch.zeros(1000, device="cuda")
        run = Replayed(lambda args: [args[0].add_(1.0).clone()], 1)
        for _ in range(8):
            run([state])
        assert run.graph is not None
        kept += run.outputs
        del run
        gc.collect()
        assert float(state[0]) == 8.0, i


@needs_gpu
def test_a_step_that_cannot_be_recorded(monkeypatch):
    monkeypatch.setenv("KERAS_SPMD_CUDA_GRAPHS", "1")
    state = torch.zeros(2, device="cuda")
    run = Replayed(lambda args: [args[0].add_(1.0) * float(args[0].sum())], 1)
    with pytest.warns(keras_spmd.ShardingWarning, match="launched op by op"):
        [run([state]) for _ in range(8)]
    assert float(state[0]) == 8.0
    assert torch.rand(4, device="cuda").std() > 0
    again = Replayed(lambda args: [args[0].add_(torch.rand(2, device="cuda"))], 1)
    for _ in range(8):
        again([state])
    assert again.graph is not None


def test_what_is_on_the_host_or_needs_other_ranks_is_not_replayed():
    assert not can_be_replayed([torch.zeros(2)], collectives=0)
    assert not can_be_replayed([], collectives=0)
