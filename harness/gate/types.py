"""What a gate compares and what it says: samples, blocks, settings, verdict. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "regression", "inconclusive"]
Question = Literal["acceptance", "step_cost", "latency", "failures", "losslessness"]
SideName = Literal["baseline", "candidate"]
Status = Literal["regressed", "equal", "improved", "unclear", "not_measured"]

EXIT_CODES: Mapping[Outcome, int] = {"pass": 0, "regression": 3, "inconclusive": 4}


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one side: all loads of the gate, sent once to one server.

    `values` maps a metric's key (`harness.gate.metrics`) to its value in this turn; what was not measured is absent.
    `outputs` maps a request's index to a digest of its answer, for requests decoded greedily.
    """

    values: Mapping[str, float]
    requests: int = 0
    failed: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)  # kind -> count
    outputs: Mapping[int, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "outputs": {str(index): digest for index, digest in self.outputs.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        return cls(**{**data, "outputs": {int(index): digest for index, digest in data["outputs"].items()}})


@dataclass(frozen=True, slots=True)
class Block:
    """Two interleaved pairs on the same requests: one side, the other twice, the one again.

    The order cancels a linear drift. A block is the unit of all statistics: where the runner owns the servers, each block has
    servers of its own, so that what differs between two starts of one server is inside the measured noise. The sides take turns in
    going first, since of two servers that live at once the one that started first may be slower (by 3 % on one machine).
    """

    baseline: tuple[Sample, Sample]
    candidate: tuple[Sample, Sample]
    first: SideName = "baseline"

    @staticmethod
    def order(number: int) -> tuple[SideName, SideName, SideName, SideName]:
        """Whose turns block `number` (from 0) consists of."""
        return (
            ("candidate", "baseline", "baseline", "candidate")
            if number % 2
            else ("baseline", "candidate", "candidate", "baseline")
        )

    @classmethod
    def of(cls, order: Sequence[SideName], turns: Sequence[Sample]) -> Block:
        """From the turns of `order`."""
        first, second, third, last = turns
        if order[0] == "candidate":
            return cls((second, third), (first, last), first="candidate")
        return cls((first, last), (second, third))


@dataclass(frozen=True, slots=True)
class Rules:
    """When a gate decides. Shares are fractions: 0.03 is 3 %.

    `suspect_alpha` is the chance that a gate of two equal sides is ever suspected, over all metrics and looks; a suspicion turns
    red only if fresh blocks confirm it at `confirm_alpha`. `pass_alpha` is the chance that a true regression of exactly the
    band is passed.
    """

    band: float = 0.03  # smaller changes of a time or a rate do not matter
    acceptance_band: float = 0.02  # of tau; of a position rate, absolute
    divergence_band: float = 0.02  # share of greedy requests
    suspect_alpha: float = 0.07
    confirm_alpha: float = 0.05
    pass_alpha: float = 0.01
    min_blocks: int = 4  # before anything is said
    min_blocks_to_pass: int = 8  # of few blocks some have, by luck, hardly any spread
    min_blocks_where_noise_is_known: int = 6  # from earlier gates
    max_blocks: int = 16
    lossless: bool = True  # greedy outputs of both sides must be equal, up to what the baseline differs from itself

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Progress:
    """What earlier looks at the data did."""

    fraction: float = 0.0  # of the budget that was used at the last look
    suspects: tuple[str, ...] = ()  # metric keys that await confirmation
    suspected_at: int | None = None  # blocks there were then
    cleared: bool = False  # a suspicion was not confirmed; there is no second one


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of both sides. `change` is positive where the candidate is worse: a log ratio, or a difference for rates."""

    key: str
    label: str
    question: Question
    unit: str
    baseline: float  # mean over all turns (of a log ratio's metric: the geometric mean)
    candidate: float
    change: float
    ci95: tuple[float, float] | None
    noise: float | None  # standard deviation of one block's change: the A/A noise of this metric here
    p_worse: float  # one-sided p-value of "not worse"
    band: float
    required: bool  # a pass needs this one shown equal
    relative: bool  # `change` is a log ratio
    gates: bool  # False: reported only
    status: Status
    blocks_needed: int | None = None  # in all, to decide; None where decided or out of reach

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the gate says to one question, in one line."""

    question: Question
    status: Status
    text: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    reasons: tuple[str, ...]  # first line: why
    causes: tuple[
        str, ...
    ]  # of a regression: acceptance, step_cost, prefill_or_queue, unexplained, failures, losslessness, server
    answers: tuple[Answer, ...]
    comparisons: tuple[Comparison, ...]
    pairs: int
    pairs_needed: int | None = None  # more pairs that would decide; None where decided or not to be had
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def to_dict(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "reasons": list(self.reasons),
            "causes": list(self.causes),
            "answers": [answer.to_dict() for answer in self.answers],
            "metrics": [comparison.to_dict() for comparison in self.comparisons],
            "pairs": self.pairs,
            "pairs_needed": self.pairs_needed,
            "warnings": list(self.warnings),
        }
