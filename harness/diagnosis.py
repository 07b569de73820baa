"""Why a learned drafter's first draft token is rarely accepted: a differential test over probes, as a pure function.

Each probe changes one thing (the text, the sampling, the precision, the template) and leaves the rest. A cause is *certain* only
where changing that one thing alone made a bad drafter good, or where a check of the files and the probes agree. What the evidence
does not separate stays *unknown*. The first position is what is looked at: accepted ÷ proposed falls with K by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

HEALTHY = 0.5  # first-position acceptance from which on nothing is wrong
FOREIGN = 0.3  # below it on every text: the draft does not know this target
GAP = 0.15  # difference of two rates that matters
Z = 2.58  # and how many standard errors it must be (two-sided 1 %)
LOW_COVERAGE = 0.8
MIN_STEPS = 50

Certainty = Literal["certain", "likely", "possible"]
_ORDER: Mapping[Certainty, int] = {"certain": 0, "likely": 1, "possible": 2}


@dataclass(frozen=True, slots=True)
class Rate:
    """`accepted` of `steps` drafted steps accepted their first draft token."""

    accepted: int
    steps: int

    @property
    def value(self) -> float:
        return self.accepted / self.steps

    def text(self) -> str:
        return f"{self.value:.2f}"


@dataclass(frozen=True, slots=True)
class AcceptanceEvidence:
    """First-position acceptance of one drafter under different conditions. None: not probed."""

    trace: Rate  # the trace's own prompts, sampling, precision and template: what is deployed
    probe: Rate | None = None  # built-in prompts of ordinary chat, code and reasoning, greedy
    greedy: Rate | None = None  # the trace's prompts at temperature 0
    other_template: Rate | None = None  # the trace's prompts, greedy, with the chat template that they go without now
    unquantized: Rate | None = None  # the trace as deployed, target not quantized
    samples: bool = True  # whether the trace asks for a temperature above 0
    errors: frozenset[str] = frozenset()  # names of the file checks (`backends.preflight`) that failed
    warnings: frozenset[str] = frozenset()  # and of those that only warned: a hint, never a proof
    vocabulary_coverage: float | None = None  # share of output tokens that the draft's own vocabulary holds
    by_context: Sequence[tuple[str, Rate]] = field(default=())  # ascending context
    by_category: Sequence[tuple[str, Rate]] = field(default=())
    by_time: Sequence[tuple[str, Rate]] = field(default=())  # in order


@dataclass(frozen=True, slots=True)
class Cause:
    cause: str
    certainty: Certainty
    evidence: str
    next: str  # what to try


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Ranked causes; the last is `unknown` where nothing certain or likely was found."""

    first_position_acceptance: float
    causes: tuple[Cause, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "first_position_acceptance": self.first_position_acceptance,
            "causes": [asdict(cause) for cause in self.causes],
        }


def diagnose(evidence: AcceptanceEvidence) -> Diagnosis | None:
    """Ranked causes of low acceptance; None where the first position is healthy."""
    rate = evidence.trace
    if rate.steps and rate.value >= HEALTHY:
        return None
    if rate.steps < MIN_STEPS:
        few = f"{rate.steps} drafted steps are too few to tell a cause"
        return Diagnosis(rate.value if rate.steps else 0.0, (Cause("unknown", "possible", few, "send more requests"),))
    found = [cause for rule in RULES if (cause := rule(evidence))]
    found.sort(key=lambda cause: _ORDER[cause.certainty])  # stable: rules stand in order of how strong their test is
    if not any(cause.certainty in ("certain", "likely") for cause in found):
        found.append(_unknown(evidence))
    return Diagnosis(rate.value, tuple(found))


def differs(high: Rate | None, low: Rate | None) -> bool:
    """Whether `high` is above `low` by more than matters and more than chance gives (two-proportion z-test)."""
    if high is None or low is None or min(high.steps, low.steps) < MIN_STEPS:
        return False
    pooled = (high.accepted + low.accepted) / (high.steps + low.steps)
    error = math.sqrt(pooled * (1 - pooled) * (1 / high.steps + 1 / low.steps))
    gap = high.value - low.value
    return gap >= GAP and gap > Z * error


def _healthy(rate: Rate | None) -> bool:
    return rate is not None and rate.steps >= MIN_STEPS and rate.value >= HEALTHY


def _foreign_everywhere(e: AcceptanceEvidence) -> bool:
    """Bad on every text that was tried, also on ordinary text without sampling."""
    tried = [r for r in (e.probe, e.greedy, e.unquantized, e.other_template) if r is not None]
    return e.probe is not None and all(r.value < FOREIGN for r in (e.trace, *tried))


def _files(e: AcceptanceEvidence, check: str, cause: str, evidence: str, step: str) -> Cause | None:
    """A file check that failed, believed where the probes are bad too and dropped where ordinary text is accepted well."""
    if check not in e.errors | e.warnings or _healthy(e.probe):
        return None
    everywhere = _foreign_everywhere(e)
    if everywhere and check in e.errors:
        return Cause(cause, "certain", f"{evidence}, and acceptance is low on every text ({_tried(e)})", step)
    certainty: Certainty = "likely" if everywhere or check in e.errors else "possible"
    return Cause(cause, certainty, f"{evidence}; the probes do not contradict it ({_tried(e)})", step)


def _tokenizer(e: AcceptanceEvidence) -> Cause | None:
    return _files(
        e,
        "tokenizer",
        "tokenizer differs",
        "draft and target map tokens to other ids",
        "use a draft with the target's own tokenizer",
    )


def _layers(e: AcceptanceEvidence) -> Cause | None:
    return _files(
        e,
        "layer_ids",
        "wrong feature layers",
        "the draft expects other hidden states than the target gives",
        "set the layer ids that the draft was trained on",
    )


def _base(e: AcceptanceEvidence) -> Cause | None:
    return _files(
        e,
        "base_model",
        "draft trained for another target",
        "the draft names another model as the one it was trained for",
        "use a draft that was trained for this very checkpoint",
    )


def _foreign(e: AcceptanceEvidence) -> Cause | None:
    if not _foreign_everywhere(e) or (e.errors | e.warnings) & {"tokenizer", "layer_ids", "base_model"}:
        return None
    return Cause(
        "draft trained for another target",
        "likely",
        f"ordinary text is accepted as badly as the trace ({_tried(e)}): a foreign checkpoint or version, or a wrong feature layer",
        "check the draft's card for the exact target and version, and the layer ids it was trained on",
    )


def _temperature(e: AcceptanceEvidence) -> Cause | None:
    if not e.samples or not differs(e.greedy, e.trace):
        return None
    assert e.greedy is not None  # or it would not differ
    evidence = (
        f"the same prompts are accepted at {e.greedy.text()} greedily and at {e.trace.text()} with the trace's temperature"
    )
    step = "lower the temperature where the product allows it, or use a drafter that samples (probabilistic drafts)"
    return Cause("temperature", "certain" if _healthy(e.greedy) else "likely", evidence, step)


def _quantization(e: AcceptanceEvidence) -> Cause | None:
    if not differs(e.unquantized, e.trace):
        return None
    assert e.unquantized is not None
    evidence = (
        f"without quantization of the target the trace is accepted at {e.unquantized.text()}, with it at {e.trace.text()}"
    )
    step = "use a draft trained on the quantized target, or a milder quantization"
    return Cause("quantization", "certain" if _healthy(e.unquantized) else "likely", evidence, step)


def _template(e: AcceptanceEvidence) -> Cause | None:
    base = e.greedy if e.samples else (e.greedy or e.trace)  # the template's probe is greedy, so is what it is held against
    if not differs(e.other_template, base):
        return None
    assert e.other_template is not None
    assert base is not None
    evidence = f"the same prompts are accepted at {e.other_template.text()} in the chat template and at {base.text()} without"
    return Cause(
        "chat template missing",
        "certain" if _healthy(e.other_template) else "likely",
        evidence,
        "send chat messages, or apply the model's chat template to the prompts",
    )


def _vocabulary(e: AcceptanceEvidence) -> Cause | None:
    coverage = e.vocabulary_coverage
    if coverage is None or coverage >= LOW_COVERAGE:
        return None
    within = e.trace.value / coverage
    evidence = (
        f"the draft's vocabulary holds {coverage:.0%} of the tokens of the answers, so no more than {coverage:.2f} can be "
        f"accepted; of those it can draft, {within:.2f} are"
    )
    step = "use a draft whose vocabulary was chosen on such text (other languages and code suffer most)"
    return Cause("draft vocabulary", "likely" if within >= HEALTHY else "possible", evidence, step)


def _context(e: AcceptanceEvidence) -> Cause | None:
    known = [(name, rate) for name, rate in e.by_context if rate.steps >= MIN_STEPS]
    if len(known) < 2 or not _healthy(known[0][1]) or not differs(known[0][1], known[-1][1]):
        return None
    (short, high), (long, low) = known[0], known[-1]
    evidence = f"accepted at {high.text()} in contexts of {short}, at {low.text()} in contexts of {long}"
    return Cause("long context", "likely", evidence, "use a draft trained on longer contexts, or speculate on short ones only")


def _category(e: AcceptanceEvidence) -> Cause | None:
    known = sorted(((n, r) for n, r in e.by_category if r.steps >= MIN_STEPS), key=lambda pair: pair[1].value)
    if len(known) < 2 or not _healthy(known[-1][1]) or not differs(known[-1][1], known[0][1]):
        return None
    (bad, low), (good, high) = known[0], known[-1]
    evidence = f"'{good}' is accepted at {high.text()}, '{bad}' at {low.text()}"
    step = f"train or choose a draft for '{bad}', or speculate on the other categories only"
    return Cause("part of the workload", "likely", evidence, step)


def _drift(e: AcceptanceEvidence) -> Cause | None:
    known = [(n, r) for n, r in e.by_time if r.steps >= MIN_STEPS]
    if len(known) < 2 or not _healthy(known[0][1]) or not differs(known[0][1], known[-1][1]):
        return None
    evidence = f"accepted at {known[0][1].text()} in the first part of the load, at {known[-1][1].text()} in the last"
    return Cause(
        "workload drift",
        "likely",
        evidence,
        "look at what changed in the traffic; measure again on the newest part of the trace",
    )


def _workload(e: AcceptanceEvidence) -> Cause | None:
    """Ordinary text is accepted well and the trace is not, also without sampling."""
    own = e.greedy if e.greedy is not None else (None if e.samples else e.trace)
    if not _healthy(e.probe) or own is None or not differs(e.probe, own):
        return None
    if _healthy(own):  # without sampling the trace is fine: its text is not the cause
        return None
    assert e.probe is not None
    explained = differs(e.other_template, own) or differs(e.unquantized, e.trace)
    evidence = f"ordinary text is accepted at {e.probe.text()}, the trace's prompts at {own.text()}, both greedily"
    step = "train a head on this workload, or try n-gram or suffix drafting"
    return Cause("workload mismatch", "possible" if explained else "likely", evidence, step)


def _unknown(e: AcceptanceEvidence) -> Cause:
    missing = [
        name
        for name, rate in (("built-in prompts", e.probe), ("temperature 0", e.greedy if e.samples else e.trace))
        if rate is None
    ]
    evidence = f"the probes do not separate the causes ({_tried(e)})"
    if missing:
        return Cause("unknown", "possible", f"{evidence}; not probed: {', '.join(missing)}", "probe what was not probed")
    return Cause("unknown", "possible", evidence, "try another draft for this target, or one drafting from the text")


def _tried(e: AcceptanceEvidence) -> str:
    names = (
        ("trace", e.trace),
        ("built-in prompts", e.probe),
        ("greedy", e.greedy),
        ("chat template", e.other_template),
        ("unquantized", e.unquantized),
    )
    return ", ".join(f"{name} {rate.text()}" for name, rate in names if rate is not None)


RULES: tuple[Callable[[AcceptanceEvidence], Cause | None], ...] = (
    _tokenizer,
    _layers,
    _base,
    _foreign,
    _temperature,
    _quantization,
    _template,
    _vocabulary,
    _context,
    _category,
    _drift,
    _workload,
)
