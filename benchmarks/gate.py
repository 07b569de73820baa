"""How often the gate is right: 1,000 gates of each scenario on a noise model whose truth is known.

    python -m benchmarks.gate [--gates 1000] [--scenario NAME] [--seed 0] [--json FILE]

The model of one turn: tokens come at `tau` per step, so E2E = TTFT + (tokens − 1) ÷ tau × step. One factor for each turn, log-normal
with the scenario's noise, and a drift over the whole gate multiply every time of the turn, as another start of a server or a
neighbour on the machine would; each metric has 0.3 % of noise of its own. Acceptance of greedy answers on equal requests repeats
exactly; the `sampled` scenarios draw it anew in each turn.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.gate.metrics import key
from harness.gate.session import run_session
from harness.gate.types import Block, Rules, Sample

BUDGET_S = 300.0
START_S, TURN_S = 3.0, 3.2  # of the reference engine with the demo model; two starts and four turns are one block
CONCURRENCY = 8
OUTPUT_TOKENS = 48
OWN_NOISE = 0.003


@dataclass(frozen=True, slots=True)
class Truth:
    """One side without noise."""

    position_rates: tuple[float, ...] = (0.85, 0.7, 0.55)
    step_s: float = 0.040
    ttft_s: float = 0.120

    @property
    def tau(self) -> float:
        return 1.0 + math.fsum(self.position_rates)


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    candidate: Truth
    noise: float
    expect: str
    drift: float = 0.0  # times at the end of the budget ÷ at its beginning − 1
    tau_noise: float = 0.0  # sampled answers: acceptance differs from turn to turn
    cause: str | None = None


BASE = Truth()
SLOW = replace(BASE, step_s=BASE.step_s * 1.0575)  # with the TTFT unchanged this is 5 % of E2E
FAULT = replace(BASE, position_rates=(0.80, 0.65, 0.50))  # tau 3.10 → 2.95

SCENARIOS = (
    Scenario("A/A, 2 % noise", BASE, 0.02, "pass >= 90 %, red <= 1 %"),
    Scenario("A/A, 2 % noise, drift 20 %", BASE, 0.02, "red <= 1 %", drift=0.2),
    Scenario("A/A, 11 % noise", BASE, 0.11, "red <= 1 %"),
    Scenario("A/A, 11 % noise, drift 20 %", BASE, 0.11, "red <= 1 %", drift=0.2),
    Scenario("A/A, sampled, 2 % noise", BASE, 0.02, "red <= 1 %", tau_noise=0.02),
    Scenario("E2E +5 %, 2 % noise", SLOW, 0.02, "red >= 95 %", cause="step_cost"),
    Scenario("E2E +5 %, 11 % noise", SLOW, 0.11, "never a pass", cause="step_cost"),
    Scenario("tau -0.15, 2 % noise", FAULT, 0.02, "red >= 99 %", cause="acceptance"),
    Scenario("tau -0.15, 11 % noise", FAULT, 0.11, "red >= 99 %", cause="acceptance"),
    Scenario("tau -0.15, sampled, 2 % noise", FAULT, 0.02, "red >= 99 %", tau_noise=0.01, cause="acceptance"),
    Scenario("TTFT x 1.6, 2 % noise", replace(BASE, ttft_s=BASE.ttft_s * 1.6), 0.02, "red", cause="prefill_or_queue"),
    Scenario(
        "step +8 % and tau -0.3", replace(BASE, step_s=0.0432, position_rates=(0.75, 0.6, 0.45)), 0.02, "red", cause="both"
    ),
)


class NoisySource:
    """Blocks of a scenario, in virtual time."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self.scenario = scenario
        self.rng = rng
        self.now_s = 0.0

    def elapsed_s(self) -> float:
        return self.now_s

    def block(self, number: int) -> Block:
        self.now_s += 2 * START_S
        a1, b1, b2, a2 = (self._turn(truth) for truth in (BASE, self.scenario.candidate, self.scenario.candidate, BASE))
        return Block((a1, a2), (b1, b2))

    def _turn(self, truth: Truth) -> Sample:
        scenario, normal = self.scenario, self.rng.standard_normal
        self.now_s += TURN_S
        slow = math.exp(scenario.noise * normal()) * (1 + scenario.drift * self.now_s / BUDGET_S)
        lucky = math.exp(scenario.tau_noise * normal())
        rates = [min(1.0, rate * lucky) for rate in truth.position_rates]
        tau = 1 + math.fsum(rates)
        step, ttft = truth.step_s * slow, truth.ttft_s * slow
        e2e = ttft + (OUTPUT_TOKENS - 1) / tau * step
        values = {
            "tau": tau,
            **{f"position_{i + 1}": rate for i, rate in enumerate(rates)},
            "step": step * math.exp(OWN_NOISE * normal()),
            "e2e_p50": e2e * math.exp(OWN_NOISE * normal()),
            "tpot_p50": step / tau * math.exp(OWN_NOISE * normal()),
            "ttft_p50": ttft * math.exp(OWN_NOISE * normal()),
            "throughput": CONCURRENCY * OUTPUT_TOKENS / e2e * math.exp(OWN_NOISE * normal()),
        }
        return Sample({key(name, CONCURRENCY): value for name, value in values.items()}, requests=16)


def rates_of(scenario: Scenario, gates: int, seed: int) -> dict[str, Any]:
    """Outcomes, causes and cost of `gates` gates."""
    outcomes: Counter[str] = Counter()
    right = 0
    pairs, seconds, needed = [], [], []
    wanted = {"both": {"acceptance", "step_cost"}}.get(scenario.cause or "", {scenario.cause})
    for gate in range(gates):
        source = NoisySource(scenario, np.random.default_rng([seed, gate]))
        run = run_session(source, Rules(), BUDGET_S)
        outcomes[run.verdict.outcome] += 1
        right += run.verdict.outcome == "regression" and set(run.verdict.causes) == wanted
        pairs.append(run.verdict.pairs)
        seconds.append(run.elapsed_s)
        if run.verdict.pairs_needed is not None:
            needed.append(run.verdict.pairs_needed)
    red = outcomes["regression"]
    return {
        "scenario": scenario.name,
        "gates": gates,
        "pass": outcomes["pass"] / gates,
        "regression": red / gates,
        "inconclusive": outcomes["inconclusive"] / gates,
        "cause_right": right / red if red and scenario.cause else None,
        "median_pairs": float(np.median(pairs)),
        "median_s": float(np.median(seconds)),
        "longest_s": max(seconds),
        "median_pairs_needed": float(np.median(needed)) if needed else None,
        "expect": scenario.expect,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gates", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenario", help="only scenarios whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rates here too")
    options = parser.parse_args()
    rows = []
    print("| scenario | pass | red | inconclusive | cause right | pairs | seconds | more pairs asked | must |")
    print("|---|---|---|---|---|---|---|---|---|")
    for scenario in SCENARIOS:
        if options.scenario and options.scenario not in scenario.name:
            continue
        row = rates_of(scenario, options.gates, options.seed)
        rows.append(row)
        cause = "" if row["cause_right"] is None else f"{row['cause_right']:.1%}"
        needed = "" if row["median_pairs_needed"] is None else f"{row['median_pairs_needed']:.0f}"
        shares = " | ".join(f"{row[name]:.1%}" for name in ("pass", "regression", "inconclusive"))
        print(
            f"| {row['scenario']} | {shares} | {cause} | {row['median_pairs']:.0f} | {row['median_s']:.0f} | {needed} "
            f"| {row['expect']} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
