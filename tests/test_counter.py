"""The counter-based generator is a good one: moments, uniformity, independence, rates."""

import numpy as np
import pytest
import torch

from keras_spmd._counter import Draws

COUNT = 1 << 20


def draws(first=1, second=0, shape=(COUNT,), **part):
    return Draws(torch.tensor([first, second], dtype=torch.int32), shape, **part)


def assert_within(value, expected, deviation, deviations=5):
    """An estimate lies within a few standard deviations of what it estimates."""
    assert abs(value - expected) < deviations * deviation, (value, expected, deviation)


def chi_squared(counts, expected):
    """In standard deviations from its mean."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


SEEDS = [(0, 0), (1, 0), (0, 1), (-1, 7), (2**31 - 1, 2**31 - 1), (123456, 99)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform(seed, dtype):
    u = draws(*seed).uniform(dtype)
    assert u.dtype == dtype
    assert u.min() >= 0
    assert u.max() < 1
    u = u.double()
    assert_within(u.mean().item(), 0.5, (1 / 12 / COUNT) ** 0.5)
    assert_within(u.var().item(), 1 / 12, (1 / 180 / COUNT) ** 0.5)
    counts = torch.histc(u, 1024, 0, 1).numpy()
    assert abs(chi_squared(counts, COUNT / 1024)) < 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_uniform_of_16_bits_stays_below_one(dtype):
    u = draws().uniform(dtype)
    assert u.max() < 1
    assert_within(u.double().mean().item(), 0.5, 2.0**-8)


def test_each_bit_is_fair_and_independent_of_the_others():
    bits = draws().bits()
    planes = torch.stack([(bits >> i) & 1 for i in range(64)]).double() * 2 - 1
    share = planes @ planes.T / COUNT
    assert (share - torch.eye(64)).abs().max() < 6 * COUNT**-0.5
    assert planes.mean(1).abs().max() < 5 * COUNT**-0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_normal(seed):
    z = draws(*seed).normal(torch.float32).double()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert_within((z**power).mean().item(), expected, (variance / COUNT) ** 0.5)
    below = torch.special.ndtr(z)
    counts = torch.histc(below, 256, 0, 1).numpy()
    assert abs(chi_squared(counts, COUNT / 256)) < 5
    assert z.abs().max() > 4


def test_truncated_normal():
    z = draws().normal(torch.float32, limit=2.0).double()
    assert z.abs().max() <= 2
    assert_within(z.mean().item(), 0, (0.774 / COUNT) ** 0.5)
    assert_within(z.var().item(), 0.7737, 2e-3, 1)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_bernoulli_rates(rate):
    for seed in SEEDS:
        kept = draws(*seed).below(rate).double().mean().item()
        assert_within(kept, rate, (rate * (1 - rate) / COUNT) ** 0.5)


def test_certain_and_impossible():
    assert draws().below(1.0).all()
    assert not draws().below(0.0).any()


@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_integers(count):
    numbers = draws().integers(count)
    assert numbers.min() == 0
    assert numbers.max() == count - 1
    if count > 1:
        assert abs(chi_squared(torch.bincount(numbers).numpy(), COUNT / count)) < 5


def streams():
    """Draws that must have nothing to do with each other."""
    base = draws(7, 3)
    yield "neighbours", base.uniform(torch.float64).roll(1)
    yield "rows", draws(7, 3).uniform(torch.float64).roll(1024)
    for step in (1, 2, 3, 1000):
        yield f"{step} steps later", draws(7, 3 + step).uniform(torch.float64)
    for other in (8, 6, -7, 2**20):
        yield f"seed {other}", draws(other, 3).uniform(torch.float64)
    yield "seed and step swapped", draws(3, 7).uniform(torch.float64)
    lanes = draws(7, 3)
    lanes.bits()
    yield "the next number of an element", lanes.uniform(torch.float64)


def test_streams_are_independent():
    u = draws(7, 3).uniform(torch.float64)
    for name, v in streams():
        correlation = ((u - 0.5) * (v - 0.5)).mean().item() * 12
        assert_within(correlation, 0, COUNT**-0.5)
        cells = (u * 32).long() * 32 + (v * 32).long()
        counts = torch.bincount(cells, minlength=1024).numpy()
        assert abs(chi_squared(counts, COUNT / 1024)) < 5, name
        if "neighbours" not in name:
            assert not torch.isin(u[:1000], v[:1000]).any(), name


def test_runs_of_neighbours_have_the_right_lengths():
    up = draws().uniform(torch.float64) > 0.5
    runs = torch.diff(torch.nonzero(up[1:] != up[:-1]).flatten())
    lengths = torch.bincount(runs.clamp_max(12), minlength=13)[1:].numpy().astype(float)
    expected = np.array([0.5**k for k in range(1, 12)] + [0.5**11]) * len(runs)
    assert abs(chi_squared(lengths, expected)) < 5


@pytest.mark.parametrize("alpha", [0.03, 0.5, 1.0, 2.5, 100.0])
def test_gamma(alpha):
    logs = draws().gamma_log(torch.full((COUNT,), alpha, dtype=torch.float64))
    g = logs.exp()
    assert_within(g.mean().item(), alpha, (alpha / COUNT) ** 0.5)
    fourth = 3 * alpha**2 + 6 * alpha
    assert_within(g.var().item(), alpha, ((fourth - alpha**2) / COUNT) ** 0.5)
    # Its logarithm has the digamma function for a mean, and the trigamma for a variance.
    a = torch.tensor(alpha, dtype=torch.float64)
    spread = torch.special.polygamma(1, a).item()
    assert_within(logs.mean().item(), torch.digamma(a).item(), (spread / COUNT) ** 0.5)


@pytest.mark.parametrize("p", [0.0, 0.02, 0.3, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("n", [0, 1, 8, 50, 1000, 10**7])
def test_binomial(n, p):
    shape = (1 << 17,)
    x = Draws(torch.tensor([3, 1]), shape).binomial(
        torch.full(shape, float(n), dtype=torch.float64), torch.full(shape, p, dtype=torch.float64)
    )
    assert x.min() >= 0
    assert x.max() <= n
    assert torch.equal(x, x.round())
    variance = n * p * (1 - p)
    if variance == 0:
        assert (x == n * p).all()
        return
    assert_within(x.mean().item(), n * p, (variance / shape[0]) ** 0.5)
    fourth = variance * (1 + 3 * (n - 2) * p * (1 - p))
    # For one fair coin the first term is 0: its variance misses only by the error of the mean.
    spread = (fourth - variance**2) / shape[0] + (2 * variance / shape[0]) ** 2
    assert_within(x.var().item(), variance, spread**0.5)


@pytest.mark.parametrize("shape", [(12,), (6, 10), (4, 6, 5)])
def test_a_part_is_the_part_of_the_whole(shape):
    whole = draws(shape=shape).bits()
    for dim in range(len(shape)):
        for start, size in ((0, 2), (1, 3), (shape[dim] - 1, 1)):
            local_shape = [*shape[:dim], size, *shape[dim + 1 :]]
            offset = [0] * len(shape)
            offset[dim] = start
            part = draws(shape=shape, local_shape=local_shape, offset=offset).bits()
            assert torch.equal(part, whole.narrow(dim, start, size))
    if len(shape) == 3:
        part = draws(shape=shape, local_shape=(2, 3, 2), offset=(1, 3, 2)).bits()
        assert torch.equal(part, whole[1:3, 3:6, 2:4])
