"""The rules of thumb people decide by, each with this deployment's value and whether the measurement agrees. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Side = Literal["on", "off"]

LARGE_MODEL = 30e9
SMALL_BATCH, LARGE_BATCH = 16, 32
FULL_CACHE = 0.9
GROUNDED, OPEN_ENDED = 0.3, 0.1


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the rules ask about. None: not known, and the rule says nothing."""

    mean_batch: float | None  # of the trace at its own load, without speculation
    objective: str  # what decides: e2e_p50, throughput, ...
    parameters: float | None  # of the target
    published_heads: int  # known heads for the target
    peak_kv_share: float | None  # of the KV cache that the trace's busiest moment needs, without speculation
    preemptions: int | None  # without speculation, at the trace's own load
    grounded_share: float | None  # of three-word sequences of the recorded outputs that stand in their prompts
    draft_free: bool  # the candidate drafts from the text (n-gram, suffix)


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    rule: str
    here: str  # this deployment's value
    says: Side | None  # None: the rule does not decide here
    agrees: bool | None  # with the measured verdict; None where either says nothing

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rules_of_thumb(deployment: Deployment, measured: Side | None) -> list[RuleOfThumb]:
    """All rules. `measured`: what the measurement says at the trace's own load; None where it found no winner."""
    checks = (_batch, _objective, _size, _heads, _memory, _kind)
    rules = []
    for check in checks:
        rule, here, says = check(deployment)
        rules.append(RuleOfThumb(rule, here, says, None if says is None or measured is None else says == measured))
    return rules


def _batch(d: Deployment) -> tuple[str, str, Side | None]:
    rule = "It pays where the average batch size is under 16 to 32."
    if d.mean_batch is None:
        return rule, "not known: the trace has no arrival times", None
    says: Side | None = "on" if d.mean_batch < SMALL_BATCH else "off" if d.mean_batch > LARGE_BATCH else None
    return rule, f"average batch size {d.mean_batch:.1f}", says


def _objective(d: Deployment) -> tuple[str, str, Side | None]:
    rule = "It pays where latency comes before throughput."
    latency = d.objective in ("e2e_p50", "e2e_p95", "tpot_p50")
    return rule, f"decided by {d.objective.replace('_', ' ')}", "on" if latency else "off"


def _size(d: Deployment) -> tuple[str, str, Side | None]:
    rule = "It pays for targets of 30 billion parameters or more."
    if d.parameters is None:
        return rule, "not known: the target's weights are not on this machine", None
    size = f"{d.parameters / 1e9:.1f} billion" if d.parameters >= 1e9 else f"{d.parameters / 1e6:.0f} million"
    return rule, f"{size} parameters", "on" if d.parameters >= LARGE_MODEL else "off"


def _heads(d: Deployment) -> tuple[str, str, Side | None]:
    rule = "It pays where a head trained for this target is published."
    if d.draft_free:
        return rule, f"{d.published_heads} known; the candidate drafts from the text and needs none", None
    return rule, f"{d.published_heads} known", "on" if d.published_heads else "off"


def _memory(d: Deployment) -> tuple[str, str, Side | None]:
    rule = "It pays where memory is not already the limit."
    if d.preemptions:
        return rule, f"{d.preemptions} preemptions without speculation at the trace's own load", "off"
    if d.peak_kv_share is None:
        return rule, "not known: the engine does not say how much its KV cache holds", None
    share = "under 1%" if d.peak_kv_share < 0.01 else f"{d.peak_kv_share:.0%}"
    here = f"the trace's busiest moment needs {share} of the KV cache"
    return rule, here, "off" if d.peak_kv_share > FULL_CACHE else "on"


def _kind(d: Deployment) -> tuple[str, str, Side | None]:
    rule = (
        "Drafting from the text pays where answers repeat their prompts (editing, extraction, code), not for open-ended text."
    )
    if d.grounded_share is None:
        return rule, "not known: the trace has no recorded answers", None
    here = f"{d.grounded_share:.0%} of the answers' three-word sequences stand in their prompts"
    if not d.draft_free:
        return rule, f"{here}; the candidate drafts with a model", None
    return rule, here, "on" if d.grounded_share >= GROUNDED else "off" if d.grounded_share < OPEN_ENDED else None


def grounded_share(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Share of the three-word sequences of all outputs that occur in their own prompts; None without any. `pairs`: prompt, output."""
    total = found = 0
    for prompt, output in pairs:
        known = set(_trigrams(prompt))
        grams = _trigrams(output)
        total += len(grams)
        found += sum(gram in known for gram in grams)
    return found / total if total else None


def _trigrams(text: str) -> list[tuple[str, ...]]:
    words = text.lower().split()
    return list(zip(words, words[1:], words[2:], strict=False))
