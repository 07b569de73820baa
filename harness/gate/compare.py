"""From blocks to comparisons: one row for each metric that both sides have in every block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.gate.metrics import is_position, label_of, metric_of
from harness.gate.statistics import Mean, blocks_to_decide, divergence_p, mean_of_groups
from harness.gate.types import Block, Comparison, Rules, Sample, Status

TAIL_REQUESTS = 200
"""Requests of one side, over all turns, from which on a p95 gates: ten of them lie beyond it."""

TAIL_REQUESTS_PER_TURN = 20
"""A turn's own p95 needs one request beyond it."""

STATUS_ALPHA = 0.025
"""One-sided level of the words "regressed" and "improved" in a table row; the verdict has levels of its own."""


def keys_of(blocks: Sequence[Block]) -> list[str]:
    """Metrics that every turn of every block has, in the order of the first."""
    turns = [sample for block in blocks for sample in _turns(block)]
    if not turns:
        return []
    return [key for key in turns[0].values if all(key in turn.values and _usable(key, turn) for turn in turns)]


def _turns(block: Block) -> tuple[Sample, ...]:
    return (*block.baseline, *block.candidate)


def _usable(key: str, turn: Sample) -> bool:
    return not metric_of(key).relative or turn.values[key] > 0


def gating(key: str, blocks: Sequence[Block]) -> bool:
    """Whether a metric may turn the gate red: tails only with enough requests, position rates only where both sides draft equally
    far. With a greater K steps begin elsewhere in the text, so that position 1 is accepted less often while tau rises."""
    metric = metric_of(key)
    if is_position(key):
        return len({frozenset(filter(is_position, turn.values)) for block in blocks for turn in _turns(block)}) == 1
    if not metric.tail:
        return metric.gates
    turns = [turn for block in blocks for turn in block.candidate]
    return min(t.requests for t in turns) >= TAIL_REQUESTS_PER_TURN and sum(t.requests for t in turns) >= TAIL_REQUESTS


def changes(key: str, blocks: Sequence[Block]) -> list[float]:
    """The metric's change in each block, positive where the candidate is worse."""
    metric = metric_of(key)
    sign = -1.0 if metric.higher_is_better else 1.0

    def level(samples: tuple[Sample, Sample]) -> float:
        first, second = (sample.values[key] for sample in samples)
        return (math.log(first) + math.log(second)) / 2 if metric.relative else (first + second) / 2

    return [sign * (level(block.candidate) - level(block.baseline)) for block in blocks]


def mean_change(key: str, blocks: Sequence[Block]) -> Mean:
    """Over blocks in which the baseline went first and blocks in which the candidate did, in equal parts."""
    found = changes(key, blocks)
    sides = ("baseline", "candidate")
    return mean_of_groups([[c for c, block in zip(found, blocks, strict=True) if block.first == side] for side in sides])


def band_of(key: str, rules: Rules) -> float:
    """The largest change that does not matter, on the scale of `changes`."""
    metric = metric_of(key)
    if metric.question != "acceptance":
        return math.log1p(rules.band)
    return -math.log1p(-rules.acceptance_band) if metric.relative else rules.acceptance_band


def compare(key: str, blocks: Sequence[Block], rules: Rules, *, several_loads: bool) -> Comparison:
    metric = metric_of(key)
    mean = mean_change(key, blocks)
    band = band_of(key, rules)
    return Comparison(
        key=key,
        label=label_of(key, several_loads=several_loads),
        question=metric.question,
        unit=metric.unit,
        baseline=_average([s.values[key] for block in blocks for s in block.baseline], metric.relative),
        candidate=_average([s.values[key] for block in blocks for s in block.candidate], metric.relative),
        change=mean.value,
        ci95=mean.interval(),
        noise=mean.sd,
        p_worse=mean.p_above(0.0),
        band=band,
        required=metric.required,
        relative=metric.relative,
        gates=gating(key, blocks),
        status=_status(mean, band),
        blocks_needed=None if mean.sd is None else blocks_to_decide(mean.sd, mean.value, band, rules.pass_alpha),
    )


def _average(values: Sequence[float], geometric: bool) -> float:
    if geometric:
        return math.exp(math.fsum(math.log(value) for value in values) / len(values))
    return math.fsum(values) / len(values)


def _status(mean: Mean, band: float) -> Status:
    if mean.p_above(0.0) <= STATUS_ALPHA and mean.value > band:
        return "regressed"
    if mean.p_below(0.0) <= STATUS_ALPHA and mean.value < -band:
        return "improved"
    return "equal" if mean.p_below(band) <= STATUS_ALPHA else "unclear"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Greedy answers that differ, each request counted once."""

    requests: int
    new: int  # differ between the sides, while the baseline agrees with itself
    own: int  # the baseline differs from itself, while the sides agree

    @property
    def p(self) -> float:
        return divergence_p(self.new, self.own)

    @property
    def excess(self) -> float:
        return (self.new - self.own) / self.requests if self.requests else 0.0


def divergence(blocks: Sequence[Block]) -> Divergence:
    """Baseline against candidate, next to the baseline's own two turns as the control."""
    seen: set[int] = set()
    new = own = 0
    for block in blocks:
        (first, second), candidate = block.baseline, block.candidate[0]
        for index in (first.outputs.keys() & second.outputs.keys() & candidate.outputs.keys()) - seen:
            seen.add(index)
            differs = first.outputs[index] != candidate.outputs[index]
            control = first.outputs[index] != second.outputs[index]
            new += differs and not control
            own += control and not differs
    return Divergence(len(seen), new, own)


def failing_blocks(blocks: Sequence[Block]) -> int:
    """Blocks in which a request to the candidate failed."""
    return sum(any(sample.failed for sample in block.candidate) for block in blocks)
