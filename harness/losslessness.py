"""Does speculation change what the model says? Pure comparison of answers on against off, beside a control.

Verification promises the target's own text. Rounding does not: in 16-bit arithmetic another batch shape can turn a near-tie of two
tokens, with or without speculation. So the control is off against off *at another batch shape* (the same shape repeats itself
exactly and hides rounding), and what counts is whether on differs from off more often than off from itself.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
from scipy import stats

from harness.answers import LOOPING_SHARE, NEAR_TIE_NATS, Output

Verdict = Literal["identical", "within_control", "differs"]
Answers = Mapping[int, Output]  # by index of the request

SIGNIFICANT = 0.05  # one-sided, of the share of answers that differ
ALARM = 0.001  # of a test on sampled answers, of which there are two for each configuration
PERMUTATIONS = 2000
BROKEN_TEXT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two answers to one request part."""

    index: int  # of the request
    at: int  # first token that differs; characters where the server tells no token ids
    gap: float | None  # log-probability of the reference's token there minus the runner-up's; None: not told

    @property
    def near_tie(self) -> bool:
        return self.gap is not None and self.gap <= NEAR_TIE_NATS

    @property
    def clear(self) -> bool:
        return self.gap is not None and self.gap > NEAR_TIE_NATS


@dataclass(frozen=True, slots=True)
class Match:
    """Answers compared request by request."""

    requests: int
    divergences: tuple[Divergence, ...]

    @property
    def share(self) -> float:
        """Of answers that are equal to the last token."""
        return 1 - len(self.divergences) / self.requests

    @property
    def ci95(self) -> tuple[float, float]:
        """Wilson's interval of that share."""
        found = stats.binomtest(self.requests - len(self.divergences), self.requests).proportion_ci(method="wilson")
        return float(found.low), float(found.high)

    def counted(self) -> int:
        """Divergences that a near-tie does not explain."""
        return sum(not d.near_tie for d in self.divergences)


@dataclass(frozen=True, slots=True)
class Audit:
    verdict: Verdict
    reason: str


def compare(reference: Answers, other: Answers) -> Match:
    """`other` against `reference` (whose gaps are used), over the requests that both hold.

    Raises:
        ValueError: they have no request in common.
    """
    common = sorted(reference.keys() & other.keys())
    if not common:
        raise ValueError("no request was answered on both sides")
    found = []
    for index in common:
        at = _first_difference(reference[index], other[index])
        if at is not None:
            gaps = reference[index].gaps
            found.append(Divergence(index, at, gaps[at] if at < len(gaps) else None))
    return Match(len(common), tuple(found))


def _first_difference(a: Output, b: Output) -> int | None:
    x: Sequence[Any] = a.token_ids if a.token_ids and b.token_ids else a.text
    y: Sequence[Any] = b.token_ids if a.token_ids and b.token_ids else b.text
    if x == y:
        return None
    return next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))


def audit(on: Match, control: Match, degenerate: Mapping[str, Sequence[int]] | None = None) -> Audit:
    """The verdict of greedy answers on against off, given off against itself at another batch shape.

    `degenerate`: kinds of broken answers that on gave where off's was sound (`newly_degenerate`).
    """
    broken = {kind: indices for kind, indices in (degenerate or {}).items() if indices}
    if broken:
        words = ", ".join(f"{len(indices)} {kind}" for kind, indices in broken.items())
        return Audit("differs", f"answers with speculation are broken where those without are sound: {words}")
    if not on.divergences:
        return Audit("identical", f"all {on.requests} answers are equal; at most {1 - on.ci95[0]:.1%} may differ (95 %)")
    clear, control_clear = (sum(d.clear for d in match.divergences) for match in (on, control))
    if clear and not control_clear:
        return Audit(
            "differs", f"{clear} of {on.requests} answers part where off was sure of its token; the control's never do"
        )
    table = np.array([[on.counted(), on.requests - on.counted()], [control.counted(), control.requests - control.counted()]])
    p = float(stats.fisher_exact(table, alternative="greater").pvalue)
    counts = (
        f"{len(on.divergences)} of {on.requests} answers differ from off's, "
        f"{len(control.divergences)} of {control.requests} in the control"
    )
    if p < SIGNIFICANT:
        return Audit("differs", f"{counts}: more than rounding explains (p = {p:.2g})")
    return Audit("within_control", f"{counts}: no more than another batch shape does (p = {p:.2f})")


def degenerate(answers: Answers) -> dict[str, list[int]]:
    """Requests whose answer is empty, repeats itself, or is hardly text."""
    return {
        "empty": [i for i, a in answers.items() if not a.token_ids and not a.text],
        "looping": [i for i, a in answers.items() if a.repetition > LOOPING_SHARE],
        "not text": [i for i, a in answers.items() if _broken_share(a.text) > BROKEN_TEXT_SHARE],
    }


def newly_degenerate(on: Answers, off: Answers) -> dict[str, list[int]]:
    """Degenerate answers of on to requests that off answered soundly."""
    before = degenerate(off)
    return {kind: [i for i in found if i in off and i not in before[kind]] for kind, found in degenerate(on).items()}


def _broken_share(text: str) -> float:
    """Replacement characters and control characters, as a share."""
    if not text:
        return 0.0
    return sum(c == "\ufffd" or (unicodedata.category(c) == "Cc" and c not in "\n\t\r") for c in text) / len(text)


def sampled_tests(on: Answers, off: Answers, *, seed: int = 0) -> dict[str, Any] | None:
    """Whether sampled answers come from the same distribution, as far as token frequencies and lengths show; None without tokens.

    Tokens of one answer are not independent, so both tests permute on and off within each request (paired permutation): of the
    total variation between the pooled token frequencies, and of the difference of mean lengths.
    """
    common = sorted(i for i in on.keys() & off.keys() if on[i].token_ids and off[i].token_ids)
    if not common:
        return None
    tokens = sorted({t for i in common for t in (*on[i].token_ids, *off[i].token_ids)})
    place = {token: column for column, token in enumerate(tokens)}
    counts = np.zeros((2, len(common), len(tokens)))
    for side, answers in enumerate((on, off)):
        for row, index in enumerate(common):
            for token, count in Counter(answers[index].token_ids).items():
                counts[side, row, place[token]] = count
    rng = np.random.default_rng(seed)
    swaps = rng.integers(0, 2, size=(PERMUTATIONS, len(common)))
    frequency = _total_variation(counts, np.zeros((1, len(common)), int))[0], _total_variation(counts, swaps)
    lengths = counts.sum(axis=2)
    difference = lengths[0] - lengths[1]
    drawn = np.abs((difference * (1 - 2 * swaps)).sum(axis=1))
    return {
        "requests": len(common),
        "token_frequency_p": _p_value(*frequency),
        "length_p": _p_value(abs(difference.sum()), drawn),
        "mean_tokens_on": float(lengths[0].mean()),
        "mean_tokens_off": float(lengths[1].mean()),
    }


def _total_variation(counts: np.ndarray[Any, Any], swaps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[draws] distance of the pooled token frequencies when the sides of some requests are swapped."""
    keep = 1 - swaps
    on = keep @ counts[0] + swaps @ counts[1]
    off = keep @ counts[1] + swaps @ counts[0]
    return np.asarray(np.abs(on / on.sum(axis=1, keepdims=True) - off / off.sum(axis=1, keepdims=True)).sum(axis=1) / 2)


def _p_value(observed: float, drawn: np.ndarray[Any, Any]) -> float:
    return float((1 + (drawn >= observed - 1e-12).sum()) / (1 + len(drawn)))


def entry(
    on: Answers, off: Answers, control: Answers, *, shapes: tuple[int, int], sampled: tuple[Answers, Answers] | None = None
) -> dict[str, Any]:
    """The audit as `result.json` shows it. `shapes`: requests at a time of off and of the control; `sampled`: on, off."""
    match, against = compare(off, on), compare(off, control)
    broken = newly_degenerate(on, off)
    found = audit(match, against, broken)
    tests = sampled_tests(*sampled) if sampled else None
    if tests and found.verdict != "differs" and min(tests["token_frequency_p"], tests["length_p"]) < ALARM:
        found = Audit("differs", "sampled answers come from another distribution (see the tests)")
    positions = [d.at for d in match.divergences]
    return {
        "verdict": found.verdict,
        "reason": found.reason,
        "requests": match.requests,
        "exact_match_share": match.share,
        "exact_match_ci95": list(match.ci95),
        "control": f"off at {shapes[1]} at a time against off at {shapes[0]} at a time",
        "control_exact_match_share": against.share,
        "control_exact_match_ci95": list(against.ci95),
        "first_divergence_token_p50": median(positions) if positions else None,
        "divergence_tokens": sorted(positions),
        "near_tie_divergences": sum(d.near_tie for d in match.divergences),
        "gaps_known": any(answer.gaps for answer in off.values()),
        "degenerate": {kind: len(indices) for kind, indices in broken.items()},
        "sampled": tests,
    }
