"""Choosing a token from logits: greedy, or sampled with noise that is a function of (seed, position, token id).

Sampling takes argmin over tokens of E / p with E exponential: the exponential race, which is Gumbel-max, argmax(log p + G), in
another spelling. As the noise depends on nothing but the key, the same logits give the same token whatever was drafted and
whoever else is in the batch (drafter-invariant sampling: Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.reference import kernels
from backends.reference.batch import upload

TARGET, DRAFT, ACCEPT, RESIDUAL, FORCED = range(5)
"""Independent noise streams of one request."""

_MASK64 = (1 << 64) - 1
_TOP = 256  # tokens looked at first when a nucleus is cut; most nuclei end within


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request samples. Temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def choose(logits: Tensor, rows: Sequence[tuple[Sampling, int]], stream: int = TARGET) -> list[int]:
    """One token for each row of float32 `logits` [n, vocab]; `rows` gives its sampling and the position it is chosen for."""
    if all(sampling.greedy for sampling, _ in rows):
        return logits.argmax(dim=-1).tolist()
    if kernels.usable(logits.device):
        return _choose_on_device(logits, rows, stream).tolist()
    picks = [
        row.argmax() if sampling.greedy else race(scores(row, sampling), sampling.seed, position, stream)
        for row, (sampling, position) in zip(logits, rows, strict=True)
    ]
    return torch.stack(picks).tolist()


def _choose_on_device(logits: Tensor, rows: Sequence[tuple[Sampling, int]], stream: int) -> Tensor:
    """All rows in one launch, but for those with a top-k or top-p. Which way a row goes depends on nothing but its own sampling."""
    from backends.reference.kernels.choose import choose_rows  # needs triton

    keys = [noise_key(sampling.seed, position, stream) for sampling, position in rows]
    halves = [(_int32(key & 0xFFFFFFFF), _int32(key >> 32)) for key in keys]
    temperatures = upload([sampling.temperature for sampling, _ in rows], logits.device, torch.float32)
    tokens = choose_rows(logits, temperatures, upload(halves, logits.device, torch.int32))
    for index, (sampling, position) in enumerate(rows):
        if not sampling.greedy and (sampling.top_k > 0 or sampling.top_p < 1.0):
            tokens[index] = race(scores(logits[index], sampling), sampling.seed, position, stream)
    return tokens


def scores(row: Tensor, sampling: Sampling) -> Tensor:
    """Logits [vocab] ÷ temperature, with what top-k and then top-p exclude at -inf. Ties at the edge stay in."""
    row = row / sampling.temperature
    if 0 < sampling.top_k < row.numel():
        row = row.masked_fill(row < row.topk(sampling.top_k).values[-1], -math.inf)
    if sampling.top_p < 1.0:
        row = row.masked_fill(row < _nucleus_floor(row, sampling.top_p), -math.inf)
    return row


def probabilities(row: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [vocab] that `choose` draws from, in float64."""
    return torch.softmax(scores(row, sampling).double(), dim=-1)


def race(log_weights: Tensor, seed: int, position: int, stream: int) -> Tensor:
    """Index drawn from softmax(`log_weights`) [vocab], as a 0-d tensor."""
    return (log_weights - log_exponential(log_weights.numel(), seed, position, stream, log_weights.device)).argmax()


def log_exponential(ids: int | Tensor, seed: int, position: int, stream: int, device: torch.device | str = "cpu") -> Tensor:
    """log of exponential(1) noise for token ids 0..ids-1, or for those in `ids`, float32; the integer part of the work is the same
    on any device."""
    key = noise_key(seed, position, stream)
    bits = torch.arange(ids, dtype=torch.int32, device=device) if isinstance(ids, int) else ids.to(torch.int32, copy=True)
    for half in (key & 0xFFFFFFFF, key >> 32):
        bits = _mix32(bits.bitwise_xor_(_int32(half)))
    # 31 bits -> u in (0, 1), finest near 0, where -log(1 - u) is small and such tokens win the race
    u = bits.bitwise_and_(0x7FFFFFFF).float().mul_(2.0**-31).add_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_()


def uniform(seed: int, position: int, stream: int) -> float:
    """A float64 in [0, 1)."""
    return (noise_key(seed, position, stream) >> 11) * 2.0**-53


def noise_key(seed: int, position: int, stream: int) -> int:
    """64 bits, of which all noise at a position is made."""
    return mix64(mix64(mix64(seed) ^ position) ^ stream)


def mix64(x: int) -> int:
    """splitmix64's step: a bijection of 64-bit integers that mixes every bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix32(x: Tensor) -> Tensor:
    """Two multiply-xorshift rounds on int32, in place (constants: "lowbias32", C. Wellons). Masks make shifts logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= _int32(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= _int32(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def _int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _nucleus_floor(row: Tensor, top_p: float) -> Tensor:
    """Smallest score kept: the most likely tokens whose probabilities first reach `top_p`."""
    total = row.logsumexp(0)
    for count in (min(_TOP, row.numel()), row.numel()):
        top = row.topk(count).values
        mass = (top - total).exp().cumsum(0)
        if count == row.numel() or mass[-1] >= top_p:
            break
    last = int((mass < top_p).sum().clamp_(max=count - 1))
    return top[last]
