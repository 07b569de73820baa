"""The decision, from measured intervals only: pure functions over what the trials of one trace hold.

What decides (unless objectives are named): E2E p50 at the trace's own load must be better, p95 must not be worse, and throughput,
weighted by the trace's own batch sizes, must not be worse. With too few replays for an open-loop interval, closed loop at the batch
size nearest to the trace's mean decides p50; a p95 without an interval is "not tested" and does not block.

A step with speculation is no cheaper than one without, so throughput rises by tau at most. Where hardly a draft token is accepted this
decides, whatever the times say: they can show no more than what the machine did meanwhile. And where throughput rose by more than tau,
the machine was slower while off was measured, nobody knows by how much, and nothing is decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from backends.types import ServingConfig
from harness.funnel.prune import DEAD_TAU
from harness.statistics import Estimate

Verdict = Literal["enable", "skip", "enable_below_batch", "no_clear_winner", "not_measurable"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speed-up, off ÷ on (for throughput on ÷ off): above 1 speculation is better. `ci95` is None where the sample is too small."""

    value: float
    ci95: tuple[float, float] | None
    note: str | None = None  # why there is no interval, or how many runs would decide

    @staticmethod
    def of(found: Estimate) -> Ratio:
        return Ratio(found.value, found.ci95, found.note)

    @property
    def better(self) -> bool:
        return self.ci95 is not None and self.ci95[0] > 1.0

    @property
    def worse(self) -> bool:
        return self.ci95 is not None and self.ci95[1] < 1.0

    def text(self) -> str:
        if self.ci95 is None:
            return f"{self.value:.2f}x ({self.note or 'too few requests for an interval'})"
        note = f"; {self.note}" if self.note else ""
        return f"{self.value:.2f}x (95 % interval {self.ci95[0]:.2f} to {self.ci95[1]:.2f}{note})"

    def widened(self, drift: float) -> Ratio:
        """With both ends of the interval moved out by the factor `drift` >= 1; the value stays."""
        return self if self.ci95 is None else replace(self, ci95=(self.ci95[0] / drift, self.ci95[1] * drift))

    def to_dict(self, metric: str) -> dict[str, Any]:
        return {"metric": metric, "value": self.value, "ci95": list(self.ci95) if self.ci95 else None}


@dataclass(frozen=True, slots=True)
class BatchEvidence:
    """Speculation against off in closed loop at one batch size, on the same requests."""

    batch_size: int
    speedup: Ratio  # of the metric that decides: E2E p50 unless the user named an objective
    e2e_p95: Ratio | None
    throughput: Ratio
    tau: float | None
    tpot_off_s: float | None = None
    tpot_on_s: float | None = None
    drafted_share: float | None = None  # of decode steps; n-gram and suffix often find nothing to draft
    tau_drafted: float | None = None  # tokens per step that had a draft

    @property
    def step_cost_ratio(self) -> float | None:
        """Time of a decode step with speculation over one without: tau × TPOT on ÷ TPOT off."""
        if self.tau is None or not self.tpot_off_s or self.tpot_on_s is None:
            return None
        return self.tau * self.tpot_on_s / self.tpot_off_s

    @property
    def beyond_tau(self) -> float:
        """Least factor by which throughput rose more than tau allows; 1 or less where it did not, or not beyond its interval."""
        return self.throughput.ci95[0] / self.tau if self.throughput.ci95 and self.tau else 1.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of the finalist of one group (engine and quantization) on one trace."""

    config: ServingConfig
    by_batch: tuple[BatchEvidence, ...]  # ascending batch size
    weights: Mapping[int, float]  # measured batch size -> share of the trace's decode time near it; sums to 1
    mean_batch: float | None  # of the trace at its own load with off; None without an open-loop replay
    open_e2e_p50: Ratio | None  # at the trace's own load
    open_e2e_p95: Ratio | None
    schedule: tuple[tuple[int, int], ...] = ()  # (measured batch size, best K there, 0 for off)
    metric: str = "e2e_p50"  # what `BatchEvidence.speedup` compares
    drift: float = 1.0  # >= 1: factor between off's first and last measurement; what the machine does by itself proves nothing

    @property
    def largest_tau(self) -> float | None:
        """Over the batch sizes; None where one is unknown."""
        taus = [row.tau for row in self.by_batch if row.tau is not None]
        return max(taus) if taus and len(taus) == len(self.by_batch) else None

    def with_drift_in_intervals(self) -> Evidence:
        """The same evidence with every latency interval widened by the drift, so that a change of that size is no result.

        Throughput is widened after its batch sizes are combined: the drift is common to all of them.
        """

        def wide(ratio: Ratio | None) -> Ratio | None:
            return ratio.widened(self.drift) if ratio else None

        rows = (replace(row, speedup=row.speedup.widened(self.drift), e2e_p95=wide(row.e2e_p95)) for row in self.by_batch)
        return replace(self, by_batch=tuple(rows), open_e2e_p50=wide(self.open_e2e_p50), open_e2e_p95=wide(self.open_e2e_p95))

    def deciding(self) -> BatchEvidence | None:
        """The evidence at the measured batch size nearest, on a log scale, to the trace's mean."""
        if not self.by_batch:
            return None
        if self.mean_batch is None:
            return max(self.by_batch, key=lambda e: self.weights.get(e.batch_size, 0.0))
        mean = max(self.mean_batch, 1.0)
        return min(self.by_batch, key=lambda e: abs(math.log(e.batch_size / mean)))

    def throughput(self) -> Ratio | None:
        """Throughput on ÷ off over the trace's batch sizes: the weighted geometric mean, intervals combined as independent."""
        parts = [(e.throughput, self.weights.get(e.batch_size, 0.0)) for e in self.by_batch]
        parts = [(ratio, weight) for ratio, weight in parts if weight > 0]
        if not parts:
            return None
        total = sum(weight for _, weight in parts)
        log_value = sum(weight * math.log(ratio.value) for ratio, weight in parts) / total
        if any(ratio.ci95 is None for ratio, _ in parts):
            return Ratio(math.exp(log_value), None)
        halves = [weight / total * math.log(r.ci95[1] / r.ci95[0]) / 2 for r, weight in parts if r.ci95]
        half = math.sqrt(sum(h * h for h in halves))
        return Ratio(math.exp(log_value), (math.exp(log_value - half), math.exp(log_value + half))).widened(self.drift)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict for one group, with its reasons in words."""

    verdict: Verdict
    speedup: Ratio | None
    reasons: tuple[str, ...]
    below_batch: int | None
    break_even: Mapping[str, Any]
    k_by_batch_size: tuple[tuple[int, int, int], ...]
    warnings: tuple[str, ...] = ()


METRIC_NAMES = {
    "e2e_p50": "E2E p50",
    "e2e_p95": "E2E p95",
    "tpot_p50": "TPOT p50",
    "throughput": "throughput",
    "goodput": "goodput",
    "cost": "cost per token",
}
IMPOSSIBLE = 1.05
"""`BatchEvidence.beyond_tau` from which on the times are not believed: an interval knows nothing of a machine that changes."""
SAID_DRIFT = 1.005
"""Drift from which on the reasons mention it; a smaller one is in the intervals all the same."""

NO_BREAK_EVEN: Mapping[str, Any] = {"value": None, "ci95": None}


def judge(evidence: Evidence) -> Judgement:
    """Verdict of one group from its finalist's evidence, with off's own drift in every interval."""
    evidence = evidence.with_drift_in_intervals()
    deciding = evidence.deciding()
    if deciding is None:
        reason = "no batch size was measured both with and without speculation"
        return Judgement("not_measurable", None, (reason,), None, NO_BREAK_EVEN, ())
    open_loop = evidence.open_e2e_p50 if evidence.metric == "e2e_p50" else None
    speedup = open_loop if open_loop is not None and open_loop.ci95 is not None else deciding.speedup
    p95 = evidence.open_e2e_p95 if evidence.open_e2e_p95 and evidence.open_e2e_p95.ci95 else deciding.e2e_p95
    throughput = evidence.throughput()
    break_even = break_even_batch(evidence.by_batch)
    wins = [e.batch_size for e in evidence.by_batch if e.speedup.better]
    losses = [e.batch_size for e in evidence.by_batch if e.speedup.worse]
    blocked = (p95 is not None and p95.worse) or (throughput is not None and throughput.worse)

    below: int | None = None
    verdict: Verdict
    if _is_dead(evidence):
        verdict = "skip"
    elif _impossible(evidence):
        verdict = "no_clear_winner"
    elif wins and losses and max(wins) < min(losses):
        verdict = "enable_below_batch"
        below = math.ceil(break_even["value"]) if break_even["value"] else min(losses)
    elif speedup.better and not blocked:
        verdict = "enable"
    elif wins and deciding.batch_size > max(wins):
        verdict = "enable_below_batch"
        below = max(wins) + 1
    elif speedup.worse or blocked:
        verdict = "skip"
    elif speedup.ci95 is None and not wins and not losses:
        verdict = "not_measurable"
    else:
        verdict = "no_clear_winner"
    return Judgement(
        verdict,
        speedup,
        (*_reasons(evidence, deciding, speedup, p95, throughput, break_even), *_drift_reason(evidence.drift)),
        below,
        break_even,
        schedule(evidence.schedule, wins, below) if verdict in ("enable", "enable_below_batch") else (),
        tuple(_warnings(evidence, deciding, speedup)),
    )


def break_even_batch(by_batch: Sequence[BatchEvidence]) -> dict[str, Any]:
    """The batch size at which the E2E speed-up crosses 1, between measured neighbours; None where it does not cross there.

    Interpolated linearly in (log batch size, log speed-up). The interval is where the interval's two ends cross.
    """

    def crossing(values: Sequence[float]) -> float | None:
        points = [(math.log(e.batch_size), math.log(v)) for e, v in zip(by_batch, values, strict=True)]
        for (x0, y0), (x1, y1) in pairwise(points):
            if y0 > 0 >= y1:
                return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
        return None

    value = crossing([e.speedup.value for e in by_batch])
    if value is None or any(e.speedup.ci95 is None for e in by_batch):
        return {"value": value, "ci95": None}
    low = crossing([e.speedup.ci95[0] for e in by_batch if e.speedup.ci95])
    high = crossing([e.speedup.ci95[1] for e in by_batch if e.speedup.ci95])
    return {"value": value, "ci95": [low, high] if low is not None and high is not None else None}


def schedule(best_k: Sequence[tuple[int, int]], wins: Sequence[int], below: int | None) -> tuple[tuple[int, int, int], ...]:
    """K for each range of batch sizes, (first, last, K), up to the largest measured batch size.

    A measured batch size stands for those down to the one before it. A K is given only where speculation won; ranges that share
    a K are one range.
    """
    rows: list[tuple[int, int, int]] = []
    first = 1
    for batch, k in best_k:
        wanted = k if batch in wins and (below is None or batch < below) else 0
        if rows and rows[-1][2] == wanted:
            rows[-1] = (rows[-1][0], batch, wanted)
        else:
            rows.append((first, batch, wanted))
        first = batch + 1
    return tuple(rows)


def _reasons(
    evidence: Evidence,
    deciding: BatchEvidence,
    speedup: Ratio,
    p95: Ratio | None,
    throughput: Ratio | None,
    break_even: Mapping[str, Any],
) -> list[str]:
    where = f"closed loop at batch size {deciding.batch_size}"
    if evidence.mean_batch is not None:
        where += f" (the trace's own mean batch size is {evidence.mean_batch:.1f})"
    if evidence.open_e2e_p50 is not None and speedup is evidence.open_e2e_p50:
        where = "the trace's own load"
    name = METRIC_NAMES[evidence.metric]
    lines = [f"{name} with {evidence.config.label()} against off: {speedup.text()}, at {where}."]
    if _is_dead(evidence):
        lines.insert(
            0,
            f"Hardly a draft token is accepted: at most {evidence.largest_tau:.3f} tokens per step. A step with speculation is no "
            "cheaper than one without, so nothing can be gained; what the times below differ by is the machine or a loss.",
        )
    if row := _impossible(evidence):
        lines.insert(
            0,
            f"Throughput rose {row.throughput.text()} at batch size {row.batch_size}, with tau at {row.tau:.2f}: more than the "
            f"accepted tokens allow. So the machine was slower while off was measured, by a factor of {row.beyond_tau:.2f} at least; "
            "measure again on a machine that does nothing else.",
        )
    if deciding.tau is not None:
        line = f"Acceptance length tau is {deciding.tau:.2f} tokens per step"
        if deciding.drafted_share is not None and deciding.drafted_share < 0.99 and deciding.tau_drafted is not None:
            line += f" ({deciding.drafted_share:.0%} of steps had a draft: {deciding.tau_drafted:.2f} over those)"
        ratio = deciding.step_cost_ratio
        if ratio is not None:
            line += f"; a step costs {ratio:.2f}x one without speculation, so each token costs {ratio / deciding.tau:.2f}x"
        lines.append(line + ".")
    if throughput is not None:
        lines.append(f"Throughput in closed loop over the trace's batch sizes, on against off: {throughput.text()}.")
    lines.append("E2E p95: not tested (too few requests)." if p95 is None or p95.ci95 is None else f"E2E p95: {p95.text()}.")
    if len(evidence.by_batch) > 1:
        curve = ", ".join(f"{e.speedup.value:.2f}x at {e.batch_size}" for e in evidence.by_batch)
        lines.append(f"Speed-up of {name} by batch size: {curve}.")
    if break_even["value"]:
        lines.append(f"The speed-up falls to 1 at a batch size of about {break_even['value']:.0f}.")
    return lines


def _is_dead(evidence: Evidence) -> bool:
    return evidence.largest_tau is not None and evidence.largest_tau < DEAD_TAU


def _impossible(evidence: Evidence) -> BatchEvidence | None:
    """The batch size at which times and acceptance contradict each other most, if any."""
    worst = max(evidence.by_batch, key=lambda row: row.beyond_tau)
    return worst if worst.beyond_tau > IMPOSSIBLE else None


def _drift_reason(drift: float) -> tuple[str, ...]:
    if drift < SAID_DRIFT:
        return ()
    return (
        f"Off itself changed by {(drift - 1) * 100:.1f} % between its first and its last measurement; "
        "every interval above is wider by that factor at both ends.",
    )


def _warnings(evidence: Evidence, deciding: BatchEvidence, speedup: Ratio) -> list[str]:
    lines = []
    if deciding.tau is not None and deciding.tau < 1.05:
        lines.append(f"tau is {deciding.tau:.2f}: hardly a draft token is accepted; look at the draft before the timing.")
    own = evidence.open_e2e_p50
    if own is not None and own is not speedup and ((speedup.better and own.value < 1) or (speedup.worse and own.value > 1)):
        lines.append(
            f"One replay of each at the trace's own load points the other way ({own.value:.2f}x): a single pair has no interval, "
            "so it does not decide; replay more often before believing either."
        )
    return lines
