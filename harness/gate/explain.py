"""The words of a verdict: one answer to each question, the causes of a regression, and the reason on one line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.gate.compare import Divergence
from harness.gate.types import Answer, Block, Comparison, Outcome, Progress, Question, Rules, Status

FAILURES = "failures"
DIVERGENCE = "divergence"

CAUSE_P = 0.01
"""One-sided level at which a metric is named as a cause of a regression that is already established."""

CAUSE_WORDS: Mapping[str, str] = {
    "acceptance": "fewer draft tokens are accepted",
    "step_cost": "a decode step takes longer",
    "prefill_or_queue": "the first token comes later: prefill or queueing",
    "unexplained": "neither acceptance, step time nor the first token explains it",
    FAILURES: "requests fail",
    "losslessness": "greedy answers differ",
    "server": "the server does not start",
}

_WORST_FIRST: tuple[Status, ...] = ("regressed", "unclear", "improved", "equal", "not_measured")


def causes_of(comparisons: Sequence[Comparison], confirmed: Sequence[str]) -> tuple[str, ...]:
    """What explains a regression: acceptance and step cost first, as they are what latency is made of."""
    found = []
    if FAILURES in confirmed:
        found.append(FAILURES)
    if DIVERGENCE in confirmed:
        found.append("losslessness")
    if _named(comparisons, "acceptance", confirmed):
        found.append("acceptance")
    if _named(comparisons, "step_cost", confirmed):
        found.append("step_cost")
    if not found:
        first_token = any(c.key.startswith("ttft_p50") and _worse(c) for c in comparisons)
        found.append("prefill_or_queue" if first_token else "unexplained")
    return tuple(found)


def _named(comparisons: Sequence[Comparison], question: Question, confirmed: Sequence[str]) -> bool:
    return any(c.question == question and c.gates and (c.key in confirmed or _worse(c)) for c in comparisons)


def _worse(comparison: Comparison) -> bool:
    return comparison.p_worse <= CAUSE_P and comparison.change > comparison.band / 2


def answers_of(
    comparisons: Sequence[Comparison], blocks: Sequence[Block], compared: Divergence, rules: Rules
) -> tuple[Answer, ...]:
    rows: dict[Question, list[Comparison]] = {"acceptance": [], "step_cost": [], "latency": []}
    for comparison in comparisons:
        rows[comparison.question].append(comparison)
    return (
        *(_answer(question, found) for question, found in rows.items()),
        _failures(blocks),
        _losslessness(compared, rules),
    )


def _answer(question: Question, comparisons: Sequence[Comparison]) -> Answer:
    """The required metrics speak for the question, and any other that regressed."""
    shown = [c for c in comparisons if c.required or (c.gates and c.status == "regressed")]
    if not shown:
        return Answer(question, "not_measured", "not measured")
    status = min((c.status for c in shown), key=_WORST_FIRST.index)
    batches = {c.key.partition("@")[2]: c.candidate for c in comparisons if c.key.startswith("batch@")}
    return Answer(question, status, "; ".join(change_text(c) + _at_batch(c, batches) for c in shown))


def _at_batch(comparison: Comparison, batches: Mapping[str, float]) -> str:
    batch = batches.get(comparison.key.partition("@")[2])
    return "" if batch is None else f" at batch {batch:.0f}"


def _failures(blocks: Sequence[Block]) -> Answer:
    turns = [turn for block in blocks for turn in block.candidate]
    failed, sent = sum(turn.failed for turn in turns), sum(turn.requests for turn in turns)
    kinds: dict[str, int] = {}
    for turn in turns:
        for kind, count in turn.failures.items():
            kinds[kind] = kinds.get(kind, 0) + count
    if not failed:
        return Answer("failures", "equal", f"none of {sent} requests failed")
    listed = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) or "no kind given"
    return Answer(
        "failures", "regressed", f"{failed} of {sent} requests to the candidate failed ({listed}), none to the baseline"
    )


def _losslessness(compared: Divergence, rules: Rules) -> Answer:
    if not rules.lossless:
        return Answer("losslessness", "not_measured", "not compared (answers may differ)")
    if not compared.requests:
        return Answer("losslessness", "not_measured", "not tested: no request is decoded greedily")
    text = (
        f"{compared.new} of {compared.requests} greedy answers differ where the baseline agrees with itself; "
        f"{compared.own} where it differs from itself"
    )
    if compared.p > CAUSE_P or compared.excess <= rules.divergence_band:
        return Answer("losslessness", "equal" if compared.new <= compared.own else "unclear", text)
    return Answer("losslessness", "regressed", text)


def reasons_of(
    outcome: Outcome,
    comparisons: Sequence[Comparison],
    answers: Sequence[Answer],
    blocks: int,
    progress: Progress | None,
    confirmed: Sequence[str],
    needed: int | None,
) -> tuple[str, ...]:
    """First the reason in one line, then what else a reader must know."""
    if outcome == "regression":
        causes = causes_of(comparisons, confirmed)
        why = " and ".join(CAUSE_WORDS[cause] for cause in causes)
        return (
            f"regression: {why}",
            *(a.text for a in answers if a.status == "regressed" or a.question in ("acceptance", "step_cost")),
        )
    if outcome == "pass":
        return (f"no regression: {', '.join(c.label for c in comparisons if c.required)} equal within the band",)
    lines = [_inconclusive(comparisons, blocks, progress, answers)]
    if needed is not None:
        lines.append(f"about {needed} more pairs would decide at this noise ({blocks * 2} were measured)")
    return tuple(lines)


def _inconclusive(comparisons: Sequence[Comparison], blocks: int, progress: Progress | None, answers: Sequence[Answer]) -> str:
    failures = next(a for a in answers if a.question == "failures")
    if failures.status == "regressed":
        return f"inconclusive: {failures.text}; it did not happen in a second block"
    if progress and progress.suspects and not progress.cleared:
        return f"inconclusive: {_labels(progress.suspects, comparisons)} looked worse, and the budget ended before fresh pairs confirmed it"
    if progress and progress.cleared:
        return f"inconclusive: {_labels(progress.suspects, comparisons)} looked worse, and fresh pairs did not confirm it"
    open_rows = [c for c in comparisons if c.required and c.status != "equal"]
    if not open_rows:
        return f"inconclusive: too few pairs ({2 * blocks}) within the budget"
    widest = max(open_rows, key=lambda c: c.noise or 0.0)
    noise = "" if widest.noise is None else f"; its noise is {percent(widest.noise)} per two pairs"
    return f"inconclusive: {change_text(widest)}{noise}"


def _labels(keys: Sequence[str], comparisons: Sequence[Comparison]) -> str:
    labels = {c.key: c.label for c in comparisons}
    return ", ".join(labels.get(key, "greedy answers") for key in keys)


def change_text(comparison: Comparison) -> str:
    """``tau fell 3.10 → 2.60 (-16.1 %)``, ``step time equal (+0.2 %)``."""
    before, after = number(comparison.baseline, comparison.unit), number(comparison.candidate, comparison.unit)
    moved = comparison.candidate - comparison.baseline
    size = relative_change(comparison)
    if comparison.status == "equal":
        return f"{comparison.label} equal ({size})"
    if comparison.status == "unclear":
        return f"{comparison.label} {before} → {after} ({size}, not told from noise or from the band)"
    return f"{comparison.label} {'rose' if moved > 0 else 'fell'} {before} → {after} ({size})"


def relative_change(comparison: Comparison) -> str:
    """Candidate against baseline, signed as the value moved."""
    if not comparison.relative:
        return f"{(comparison.candidate - comparison.baseline) * 100:+.1f} points"
    return percent(math.log(comparison.candidate / comparison.baseline), sign=True)


def percent(log_change: float, *, sign: bool = False) -> str:
    value = math.expm1(log_change) * 100
    return f"{value:+.1f} %" if sign else f"{value:.1f} %"


def number(value: float, unit: str) -> str:
    """A value as people read it, seconds below 10 in milliseconds."""
    if unit == "s":
        return f"{value:.2f} s" if value >= 10 else f"{value * 1e3:.1f} ms"
    if unit == "share":
        return f"{value * 100:.1f} %"
    return f"{value:.2f}" if unit == "tokens" else f"{value:.1f} {unit}"
