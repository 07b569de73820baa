"""Probes of a learned drafter whose first draft token is rarely accepted: the same server under one changed condition at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from backends.findings import Finding
from backends.types import NEEDS_DRAFT, BackendError, ConfigError, Endpoint, ServingConfig
from harness.answers import NoAnswer, ask_all, counters
from harness.audits import AT_ONCE, Kept, key_of
from harness.breakdown import Group, breakdown
from harness.diagnosis import HEALTHY, AcceptanceEvidence, Rate, diagnose
from harness.evidence import RecordsOf
from harness.lab import Lab
from harness.store import RunStore, Trial
from workloads.types import Request

LEARNED = NEEDS_DRAFT | {"mtp"}
"""Variants whose drafts come from weights: n-gram and suffix find nothing to draft where the text does not repeat, which is no fault."""

REQUESTS, TOKENS = 8, 64

PROMPTS = (
    "Explain in a few sentences why the sky looks blue during the day and red in the evening.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A train travels 180 km in 2 hours and then 120 km in 1 hour. What is its average speed? Think step by step.",
    "Summarize the plot of Romeo and Juliet in five sentences.",
    "List five tips for a good night's sleep and explain each in one sentence.",
    "Write a polite email that asks a colleague to move a meeting to Thursday afternoon.",
    "What is the difference between a list and a tuple in Python? Give a short example.",
    "Describe how a bill becomes a law in the United States.",
)
"""Ordinary text that any draft for a chat model was trained on the like of."""


class AcceptanceProbes:
    """Diagnoses the finalists of a run while their servers are up."""

    def __init__(self, lab: Lab, store: RunStore, requests: Mapping[str, Sequence[Request]], trials: Sequence[Trial]) -> None:
        """`requests` by trace: those of the confirmation; `trials` grows while the run goes on."""
        self._lab, self._records_of, self._trials = lab, store.records, trials
        self._requests = {name: few[:REQUESTS] for name, few in requests.items()}
        self._kept = Kept(store, "diagnosis")
        self._keys: list[str] = []
        self.preflight: Sequence[Finding] = ()

    def on(self, config: ServingConfig) -> None:
        """To be called while the server of `config` runs, after its loads."""
        if config.variant not in LEARNED:
            return
        for name, few in self._requests.items():
            key = key_of(name, config)
            self._keys.append(key)
            deployed = _confirmed(self._trials, name, config)
            rate = first_position_of(deployed) if deployed else None
            if key in self._kept or deployed is None or rate is None or (rate.steps and rate.value >= HEALTHY):
                continue
            try:
                self._diagnose(key, name, config, deployed, few)
            except (NoAnswer, BackendError, ConfigError) as problem:
                self._lab.progress.note(f"  low acceptance of {config.label()} was not probed: {problem}")

    def result(self) -> list[dict[str, Any]]:
        """Entries of this run's configurations for `result.json`."""
        return self._kept.shown(self._keys)

    def _diagnose(self, key: str, name: str, config: ServingConfig, deployed: Trial, few: Sequence[Request]) -> None:
        self._lab.progress.note(f"  {config.label()} rarely accepts a first draft token: looking for the cause")
        probed = self._lab.look(config, partial(probe, few=few))
        evidence = evidence_of(
            deployed, probed, self._records_of, self.preflight, _unquantized(self._trials, name, config), _samples(few)
        )
        found = diagnose(evidence)
        if found:
            self._kept.add(key, {"trace": name, "config": config.to_dict(), **found.to_dict()})
            self._lab.progress.note(f"  first cause: {found.causes[0].cause} ({found.causes[0].certainty})")


def probe(endpoint: Endpoint, few: Sequence[Request]) -> dict[str, Rate | None]:
    """First-position acceptance on built-in prompts, on the trace's prompts greedily, and on these in the chat template."""
    raw = [request for request in few if request.prompt is not None]
    chat = [replace(r, prompt=None, messages=[{"role": "user", "content": r.prompt}]) for r in raw]
    return {
        "probe": _built_in(endpoint),
        "greedy": first_position(endpoint, few),
        "other_template": first_position(endpoint, chat) if chat else None,
    }


def _built_in(endpoint: Endpoint) -> Rate | None:
    """As a chat, or plain where the model has no chat template."""
    plain = [Request(index=i, arrival_s=None, prompt=text) for i, text in enumerate(PROMPTS)]
    try:
        chat = [replace(r, prompt=None, messages=[{"role": "user", "content": r.prompt}]) for r in plain]
        return first_position(endpoint, chat)
    except NoAnswer:
        return first_position(endpoint, plain)


def first_position(endpoint: Endpoint, requests: Sequence[Request]) -> Rate | None:
    """How often the first draft token was accepted while these were answered greedily; None where the server does not count it.

    Raises:
        NoAnswer: a request was not answered.
    """
    before = counters(endpoint)
    ask_all(endpoint, [replace(r, max_tokens=TOKENS) for r in requests], at_once=AT_ONCE, max_tokens=TOKENS)
    after = counters(endpoint)
    if before is None or after is None:
        return None
    try:
        increase = after - before
    except ValueError as error:
        raise NoAnswer(str(error)) from None
    if not increase.accepted_per_position or increase.drafted_steps is None:
        return None
    return Rate(increase.accepted_per_position[0], increase.drafted_steps)


def first_position_of(trial: Trial) -> Rate | None:
    """The same of a measured load, from its counters."""
    spec = trial.speculation
    if spec is None or not spec["position_rates"] or not spec["verify_steps"] or spec["drafted_steps"] is None:
        return None
    return Rate(round(spec["position_rates"][0] * spec["verify_steps"]), spec["drafted_steps"])


def evidence_of(
    deployed: Trial,
    probed: Mapping[str, Rate | None],
    records_of: RecordsOf,
    preflight: Sequence[Finding],
    unquantized: Trial | None,
    samples: bool,
) -> AcceptanceEvidence:
    """The probes with what the load itself shows: its acceptance by context, category and time."""
    trace = first_position_of(deployed)
    assert trace is not None  # the caller looked
    parts = breakdown(records_of(deployed), (deployed.speculation or {}).get("tau"), deployed.config.k)
    checks = {level: frozenset(f.check for f in preflight if f.level == level) for level in ("error", "warning")}
    coverage = [f.value for f in preflight if f.check == "draft_vocabulary" and f.value is not None]
    return AcceptanceEvidence(
        trace=trace,
        **probed,
        unquantized=first_position_of(unquantized) if unquantized else None,
        samples=samples,
        errors=checks["error"],
        warnings=checks["warning"],
        vocabulary_coverage=min(coverage, default=None),
        by_context=_rates(parts.by_context),
        by_category=_rates(parts.by_category),
        by_time=_rates(parts.by_time),
    )


def _rates(groups: Sequence[Group]) -> tuple[tuple[str, Rate], ...]:
    return tuple((group.group, Rate(group.first_accepted, group.steps)) for group in groups)


def _samples(requests: Sequence[Request]) -> bool:
    """Whether any is sampled: a request that names no temperature gets the server's default, which is not greedy."""
    return any(request.sampling.get("temperature") != 0 for request in requests)


def _confirmed(trials: Sequence[Trial], trace: str, config: ServingConfig) -> Trial | None:
    """The confirmation load with the most decode steps: its rate is the surest."""
    mine = [t for t in trials if t.measured and t.config == config and t.load.trace == trace and t.stage == "confirm"]
    return max(mine, key=lambda t: (t.speculation or {}).get("verify_steps") or 0, default=None)


def _unquantized(trials: Sequence[Trial], trace: str, config: ServingConfig) -> Trial | None:
    """Any load of the same drafter on the target without quantization."""
    if config.weight_quantization == "none":
        return None
    plain = replace(config, weight_quantization="none")
    return next((t for t in trials if t.measured and t.config == plain and t.load.trace == trace), None)
