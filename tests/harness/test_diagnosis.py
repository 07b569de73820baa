"""Diagnosis of low acceptance in worlds whose cause is known.

Each probe of a world is a run of the simulated engine with the acceptance that the world gives that condition, counted as a server
counts it, so that the diagnosis sees rates with their sampling noise and not the truth.
"""

from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import pytest

from backends.preflight import preflight
from backends.simulated.virtual import SimulatedRequest, simulate
from backends.simulated.world import Draft, TargetCost, World
from backends.types import ServingConfig, WorkloadFacts
from harness.diagnosis import RULES, AcceptanceEvidence, Rate, diagnose, differs

K = 3


def counted(first_position: float, seed: int, requests: int = 16) -> Rate:
    """What a server counts over `requests` answers of 48 tokens when the first draft token is accepted with this probability."""
    rates = tuple(first_position * 0.8**i for i in range(K))
    world = World(
        "probe", TargetCost(0.001, 0.01, 0.0001, 0.0001), drafts={"eagle3": Draft({"default": rates}, dispersion=0.05)}
    )
    asked = [SimulatedRequest(0.0, 100, 48)] * requests
    counters = simulate(world, asked, variant="eagle3", k=K, concurrency=4, seed=seed).counters
    assert counters.accepted_per_position is not None
    assert counters.drafted_steps is not None
    return Rate(counters.accepted_per_position[0], counters.drafted_steps)


@dataclass(frozen=True)
class Case:
    """First-position acceptance under each condition, and the cause that a world with it has."""

    name: str
    cause: str
    trace: float
    probe: float | None = None
    greedy: float | None = None
    other_template: float | None = None
    unquantized: float | None = None
    samples: bool = True
    errors: frozenset[str] = frozenset()
    warnings: frozenset[str] = frozenset()
    coverage: float | None = None
    context: tuple[float, ...] = ()
    category: dict[str, float] = field(default_factory=dict)
    time: tuple[float, ...] = ()

    def evidence(self, seed: int) -> AcceptanceEvidence:
        def rate(value: float | None, salt: str) -> Rate | None:
            return None if value is None else counted(value, seed + crc32(f"{self.name}/{salt}".encode()) % 10_000)

        def rates(values: dict[str, float], salt: str) -> list[tuple[str, Rate]]:
            return [(name, found) for name, v in values.items() if (found := rate(v, f"{salt}/{name}"))]

        trace = rate(self.trace, "trace")
        assert trace is not None
        return AcceptanceEvidence(
            trace=trace,
            probe=rate(self.probe, "probe"),
            greedy=rate(self.greedy, "greedy"),
            other_template=rate(self.other_template, "template"),
            unquantized=rate(self.unquantized, "unquantized"),
            samples=self.samples,
            errors=self.errors,
            warnings=self.warnings,
            vocabulary_coverage=self.coverage,
            by_context=rates({f"bucket {i}": v for i, v in enumerate(self.context)}, "context"),
            by_category=rates(self.category, "category"),
            by_time=rates({f"part {i}": v for i, v in enumerate(self.time)}, "time"),
        )


TOKENIZER, FOREIGN, LAYERS = "tokenizer differs", "draft trained for another target", "wrong feature layers"
MISMATCH, TEMPLATE, PART = "workload mismatch", "chat template missing", "part of the workload"

CASES = (
    Case("tokenizer of other content", TOKENIZER, 0.02, probe=0.02, greedy=0.03, errors=frozenset({"tokenizer"})),
    Case("tokenizer, greedy trace", TOKENIZER, 0.05, probe=0.04, samples=False, errors=frozenset({"tokenizer"})),
    Case("foreign checkpoint", FOREIGN, 0.12, probe=0.15, greedy=0.14),
    Case("foreign checkpoint, greedy trace", FOREIGN, 0.10, probe=0.10, samples=False),
    Case(
        "foreign checkpoint that names another base", FOREIGN, 0.15, probe=0.2, greedy=0.17, warnings=frozenset({"base_model"})
    ),
    Case("foreign checkpoint on a quantized target", FOREIGN, 0.1, probe=0.12, greedy=0.1, unquantized=0.12),
    Case("wrong feature layers", LAYERS, 0.2, probe=0.22, greedy=0.21, errors=frozenset({"layer_ids"})),
    Case("wrong feature layers, only a warning", LAYERS, 0.2, probe=0.22, greedy=0.21, warnings=frozenset({"layer_ids"})),
    Case("temperature", "temperature", 0.35, probe=0.75, greedy=0.7),
    Case("high temperature", "temperature", 0.2, probe=0.75, greedy=0.65),
    Case("temperature despite a layer warning", "temperature", 0.3, probe=0.7, greedy=0.68, warnings=frozenset({"layer_ids"})),
    Case("quantized target", "quantization", 0.4, probe=0.42, greedy=0.42, unquantized=0.72),
    Case("quantized target, greedy trace", "quantization", 0.38, probe=0.45, unquantized=0.7, samples=False),
    Case("template missing", TEMPLATE, 0.3, probe=0.75, greedy=0.32, other_template=0.72),
    Case("template missing, greedy trace", TEMPLATE, 0.25, probe=0.7, other_template=0.68, samples=False),
    Case("other domain", MISMATCH, 0.35, probe=0.75, greedy=0.37),
    Case("other domain, greedy trace", MISMATCH, 0.3, probe=0.72, samples=False),
    Case("other domain, template does not help", MISMATCH, 0.33, probe=0.74, greedy=0.35, other_template=0.36),
    Case("draft vocabulary", "draft vocabulary", 0.4, probe=0.75, greedy=0.42, coverage=0.55),
    Case("long contexts", "long context", 0.4, probe=0.75, greedy=0.42, context=(0.74, 0.4, 0.25)),
    Case("one category", PART, 0.45, probe=0.75, greedy=0.46, category={"code": 0.2, "chat": 0.72}),
    Case("drifting traffic", "workload drift", 0.45, probe=0.75, greedy=0.46, time=(0.75, 0.6, 0.3, 0.2)),
    Case("a weak draft", "unknown", 0.42, probe=0.44, greedy=0.43),
    Case("nothing probed", "unknown", 0.3),
)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_right_cause_is_first_and_no_wrong_one_is_certain(case: Case) -> None:
    for seed in range(3):
        found = diagnose(case.evidence(seed))
        assert found is not None
        assert found.causes[0].cause == case.cause
        assert [c.cause for c in found.causes if c.certainty == "certain" and c.cause != case.cause] == []


def test_there_are_twenty_worlds_and_every_cause_has_one() -> None:
    assert len(CASES) >= 20
    assert len({case.cause for case in CASES}) == len(RULES)  # two rules share a cause; "unknown" has no rule


def test_a_changed_condition_that_makes_a_draft_good_is_certain_and_names_its_figures() -> None:
    found = diagnose(AcceptanceEvidence(Rate(300, 1000), probe=Rate(750, 1000), greedy=Rate(700, 1000)))
    assert found is not None
    (cause,) = found.causes
    assert (cause.cause, cause.certainty) == ("temperature", "certain")
    assert "0.70 greedily and at 0.30" in cause.evidence


def test_a_healthy_first_position_is_not_diagnosed_whatever_the_total_acceptance() -> None:
    assert diagnose(AcceptanceEvidence(Rate(600, 1000), probe=Rate(900, 1000))) is None


def test_too_few_steps_say_nothing() -> None:
    found = diagnose(AcceptanceEvidence(Rate(1, 20), probe=Rate(18, 20)))
    assert found is not None
    assert [c.cause for c in found.causes] == ["unknown"]
    assert "20 drafted steps are too few" in found.causes[0].evidence
    assert diagnose(AcceptanceEvidence(Rate(0, 0))) is not None


def test_a_gap_must_matter_and_be_more_than_chance() -> None:
    assert differs(Rate(600, 1000), Rate(400, 1000))
    assert not differs(Rate(500, 1000), Rate(400, 1000))  # 0.10 is under what matters
    assert not differs(Rate(33, 55), Rate(24, 55))  # 0.16, 1.7 standard errors
    assert not differs(None, Rate(1, 100))


def test_a_warning_alone_is_never_certain() -> None:
    low = Rate(100, 1000)
    found = diagnose(AcceptanceEvidence(low, probe=low, greedy=low, warnings=frozenset({"layer_ids", "base_model"})))
    assert found is not None
    assert {c.certainty for c in found.causes} == {"likely"}


def test_a_real_tokenizer_swap_is_found_by_the_file_check_and_named_first(
    tiny_model: Path, other_tokenizer_model: Path
) -> None:
    config = ServingConfig("reference", str(tiny_model), "draft_model", k=2, draft=str(other_tokenizer_model))
    failed = frozenset(f.check for f in preflight(config, WorkloadFacts()) if f.level == "error")
    found = diagnose(AcceptanceEvidence(counted(0.01, 1), probe=counted(0.02, 2), greedy=counted(0.01, 3), errors=failed))
    assert found is not None
    assert (found.causes[0].cause, found.causes[0].certainty) == (TOKENIZER, "certain")
