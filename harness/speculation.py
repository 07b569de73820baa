"""Acceptance of one load: tau from what the server counted and from what the client received.

tau counts every decode step of the window, drafted or not, and every token after each sequence's first. The emitted tau takes
its tokens from the streams (after end-of-sequence and max_tokens removed what was accepted beyond), the counter tau takes the
server's own. Counts are pooled over the window; ratios are never averaged over requests or iterations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.types import SpecCounters
from harness.replay import Replay
from harness.statistics import groups_of, ratio_estimate
from harness.types import RequestRecord, Speculation

DISAGREEMENT = 0.01


def speculation(replay: Replay, *, closed: bool) -> tuple[Speculation, list[str], str | None]:
    """Acceptance, warnings, and why the counts cannot be believed."""
    counters = replay.counters
    if counters is None:
        return Speculation(tau=None), [], None
    impossible = _impossible(counters)
    if impossible:
        return Speculation(tau=None), [], impossible
    everything = [*replay.records, *replay.lead]
    emitted = _emitted(everything)
    steps = counters.decode_steps
    tau = emitted / steps if emitted is not None and steps else counters.tau
    spec = Speculation(
        tau=tau,
        tau_ci95=_interval(replay.records, tau) if closed and tau is not None else None,
        tau_drafted=counters.tau_drafted,
        tau_counter=counters.tau,
        acceptance_rate=_share(counters.accepted_tokens, counters.draft_tokens),
        position_rates=_position_rates(counters),
        verify_steps=steps,
        drafted_steps=counters.drafted_steps,
        draft_tokens=counters.draft_tokens,
        accepted_tokens=counters.accepted_tokens,
    )
    return spec, _warnings(spec, counters, emitted), None


def _emitted(records: Sequence[RequestRecord]) -> int | None:
    """Tokens after each sequence's first over all requests; None where one of them may have tokens that were not seen."""
    total = 0
    for record in records:
        if record.status == "completed" and record.output_tokens is not None:
            total += max(0, record.output_tokens - 1)
        elif record.status != "refused" and record.failure != "connect":
            return None
    return total


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _position_rates(counters: SpecCounters) -> tuple[float, ...]:
    if not counters.accepted_per_position or not counters.decode_steps:
        return ()
    return tuple(accepted / counters.decode_steps for accepted in counters.accepted_per_position)


def _impossible(counters: SpecCounters) -> str | None:
    accepted, drafted, steps = counters.accepted_tokens, counters.draft_tokens, counters.drafted_steps
    if accepted is not None and drafted is not None and accepted > drafted:
        return f"the server counts {accepted} accepted of {drafted} draft tokens: its counters cannot be used"
    if counters.accepted_per_position and steps is not None and max(counters.accepted_per_position) > steps:
        return "the server counts more accepted drafts at a position than steps with a draft: its counters cannot be used"
    return None


def _warnings(spec: Speculation, counters: SpecCounters, emitted: int | None) -> list[str]:
    warnings = []
    if spec.tau and spec.tau_counter and abs(spec.tau_counter / spec.tau - 1) > DISAGREEMENT:
        warnings.append(
            f"tau from the streams is {spec.tau:.3f}, from the server's counters {spec.tau_counter:.3f}: more than 1 % apart"
        )
    if emitted is None and counters.decode_steps:
        warnings.append("some requests did not complete or have no token count: tau is from the server's counters alone")
    if counters.draft_tokens and counters.accepted_tokens == 0:
        warnings.append(f"none of {counters.draft_tokens} draft tokens was accepted: the draft is dead")
    return warnings


def _interval(records: Sequence[RequestRecord], tau: float) -> tuple[float, float] | None:
    """Interval of tau in closed loop: requests drawn again, each with its tokens and its steps as its chunks show them.

    A server may put two steps into one chunk, so the chunks' own ratio can be off; its relative spread is what is used.
    """
    rows = [
        (r.output_tokens - 1, len(r.chunk_s) - 1, r.session)
        for r in records
        if r.status == "completed" and r.output_tokens is not None and len(r.chunk_s) > 1
    ]
    if not rows:
        return None
    tokens, steps = (np.asarray([row[i] for row in rows], dtype=float) for i in (0, 1))
    found = ratio_estimate(tokens, steps, groups_of([row[2] for row in rows]))
    if found.ci95 is None:
        return None
    return found.ci95[0] * tau / found.value, found.ci95[1] * tau / found.value
