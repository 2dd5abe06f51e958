"""A counter-based generator: each number is a function of a seed and of its own global index.

There is no stream to advance, so a rank draws its shard without drawing what comes before it, on
any mesh and in any order. The bits are SplitMix64's: a Weyl sequence over the index, started at a
point that the seed decides, through a 64-bit finalizer (constants by David Stafford). All of it is
int64 arithmetic of torch, which wraps around; `seed` is a tensor and is never read on the host.
"""

import math
from collections.abc import Sequence

import torch


def _signed(bits: int) -> int:
    return (bits & (2**64 - 1)) - (2**64 if bits & 2**63 else 0)


_STEP = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
# Where each part of the seed, and each number that one element needs, moves the start of the
# sequence. Any odd numbers far from small multiples of each other will do.
_SEED_1 = _signed(0xD6E8FEB86659FD93)
_SEED_2 = _signed(0xA0761D6478BD642F)
_LANE = 0xE7037ED1A0B428DB

# How many bits a uniform number of a dtype has, so that it never rounds up to 1.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


class Draws:
    """The random numbers of one call, for the part of a tensor that this rank holds.

    Args:
        seed: Two integers, as a tensor.
        shape: The global shape.
        local_shape: The shape of the part.
        offset: Where in the whole the part begins.
    """

    def __init__(
        self,
        seed: torch.Tensor,
        shape: Sequence[int],
        local_shape: Sequence[int] | None = None,
        offset: Sequence[int] | None = None,
    ) -> None:
        self.device = seed.device
        self.local_shape = tuple(shape if local_shape is None else local_shape)
        seed = seed.to(torch.int64)
        self._start = seed[0] * _SEED_1 + seed[1] * _SEED_2
        self._index = _global_index(
            tuple(shape), self.local_shape, tuple(offset or (0,) * len(shape)), self.device
        )
        self._lanes = 0

    def bits(self) -> torch.Tensor:
        """64 random bits for each element, new ones at each call."""
        self._lanes += 1
        # In this order: Inductor takes an index times a constant for an index, which can't wrap.
        z = self._index + (self._start + _signed(_LANE * self._lanes))
        z *= _STEP
        _xor_shifted(z, 30).mul_(_MIX_1)
        _xor_shifted(z, 27).mul_(_MIX_2)
        return _xor_shifted(z, 31).view(self.local_shape)

    def below(self, probability: float) -> torch.Tensor:
        """True with this probability."""
        return self.bits() < min(round(probability * 2**64) - 2**63, 2**63 - 1)

    def uniform(self, dtype: torch.dtype) -> torch.Tensor:
        """In [0, 1)."""
        count = _BITS[dtype]
        bits = _shifted(self.bits(), 64 - count)
        # Exact: no more bits than the type between holds.
        between = torch.float64 if dtype == torch.float64 else torch.float32
        return bits.to(between).mul_(2.0**-count).to(dtype)

    def open_uniform(self, dtype: torch.dtype) -> torch.Tensor:
        """In (0, 1), and as often above a half as below it."""
        count = _BITS[dtype] - 1
        return _shifted(self.bits(), 64 - count).to(dtype).add_(0.5).mul_(2.0**-count)

    def normal(self, dtype: torch.dtype, limit: float = math.inf) -> torch.Tensor:
        """Standard normal, within `limit` deviations."""
        between = torch.float64 if dtype == torch.float64 else torch.float32
        share = math.erf(limit / math.sqrt(2))
        z = self.open_uniform(between).mul_(2).sub_(1).mul_(share)
        return z.erfinv_().mul_(math.sqrt(2)).to(dtype)

    def integers(self, count: int | torch.Tensor) -> torch.Tensor:
        """In [0, count)."""
        # 63 bits: for a count below 2**32 the favour of small numbers is less than 2**-31.
        return _shifted(self.bits(), 1) % count

    def gamma_log(self, alpha: torch.Tensor) -> torch.Tensor:
        """The logarithm of a gamma variate, in float64: near 0 the variate itself underflows."""
        # Marsaglia and Tsang's method for alpha >= 1, which accepts at least 95 of 100 proposals.
        # A smaller alpha is raised by 1, and u**(1/alpha) undoes that.
        raised = torch.where(alpha < 1, alpha + 1, alpha)
        d = raised - 1 / 3
        c = 1 / (9 * d).sqrt()
        result = d.log()
        missing = torch.ones_like(d, dtype=torch.bool)
        for _ in range(12):
            x = self.normal(torch.float64)
            v = (1 + c * x) ** 3
            proposal = v.clamp_min(1e-300).log()
            bound = x**2 / 2 + d * (1 - v + proposal)
            good = missing & (v > 0) & (self.open_uniform(torch.float64).log() < bound)
            result = torch.where(good, d.log() + proposal, result)
            missing = missing & ~good
        lowered = self.open_uniform(torch.float64).log() / alpha
        return torch.where(alpha < 1, result + lowered, result)

    def binomial(self, counts: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """How many of `counts` tries succeed, in float64."""
        p = torch.minimum(probabilities, 1 - probabilities)
        many = counts * p >= 10
        # Each of the two methods gets harmless numbers where the other one is used.
        few = self._binomial_by_inversion(torch.where(many, 1, counts), torch.where(many, 0.5, p))
        lot = self._binomial_by_rejection(torch.where(many, counts, 100), torch.where(many, p, 0.5))
        successes = torch.where(many, lot, few)
        return torch.where(probabilities > 0.5, counts - successes, successes)

    def _binomial_by_inversion(self, counts: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """For means below 10: add up the probabilities of 0, 1, ... until they exceed a uniform."""
        u = self.open_uniform(torch.float64)
        odds = p / (1 - p)
        probability = (counts * torch.log1p(-p)).exp()
        total = probability.clone()
        successes = torch.zeros_like(total)
        # Beyond 60, 10 have a probability of less than 1e-25 and no number of 53 bits gets there.
        for k in range(60):
            successes = successes + (u > total)
            probability = probability * odds * ((counts - k).clamp_min(0) / (k + 1))
            total = total + probability
        return torch.minimum(successes, counts)

    def _binomial_by_rejection(self, counts: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Hörmann's transformed rejection (1993), for a mean of at least 10."""
        spread = (counts * p * (1 - p)).sqrt()
        b = 1.15 + 2.53 * spread
        a = -0.0873 + 0.0248 * b + 0.01 * p
        scale = (2.83 + 5.1 / b) * spread
        odds = (p / (1 - p)).log()
        mode = ((counts + 1) * p).floor()
        peak = (mode + 1).lgamma() + (counts - mode + 1).lgamma()
        result = mode
        missing = torch.ones_like(mode, dtype=torch.bool)
        for _ in range(24):
            u = self.open_uniform(torch.float64) - 0.5
            v = self.open_uniform(torch.float64)
            edge = 0.5 - u.abs()
            k = ((2 * a / edge + b) * u + counts * p + 0.5).floor()
            inside = (k >= 0) & (k <= counts)
            safe = torch.where(inside, k, mode)
            height = peak - (safe + 1).lgamma() - (counts - safe + 1).lgamma()
            height = height + (safe - mode) * odds
            good = inside & ((v * scale / (a / edge**2 + b)).log() <= height)
            result = torch.where(missing & good, k, result)
            missing = missing & ~good
        return result


def _global_index(
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    offset: tuple[int, ...],
    device: torch.device,
) -> torch.Tensor:
    """The place of each element of the part in the flattened whole."""
    cut = [dim for dim in range(len(shape)) if local_shape[dim] != shape[dim]]
    if not cut:
        return torch.arange(math.prod(shape), device=device)
    # Dims behind the last cut one are in one piece, in the whole and in the part.
    last = cut[-1]
    inner = math.prod(shape[last + 1 :])
    start = offset[last] * inner
    index = torch.arange(start, start + local_shape[last] * inner, device=device)
    stride = shape[last] * inner
    for dim in range(last - 1, -1, -1):
        rows = torch.arange(offset[dim], offset[dim] + local_shape[dim], device=device) * stride
        index = (rows.view(-1, *[1] * index.ndim) + index).flatten()
        stride *= shape[dim]
    return index


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """A logical shift to the right; torch's copies the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _xor_shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    return bits.bitwise_xor_(_shifted(bits, count))
