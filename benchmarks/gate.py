"""How often the gate is right: 1,000 gates of each scenario on the simulated engine in virtual time, whose truth is known.

    python -m benchmarks.gate [--gates 1000] [--scenario NAME] [--seed 0] [--json FILE]

Each turn is a closed-loop run of the simulated engine (chain drafter, K = 3, 16 requests at concurrency 8). One factor for each turn,
log-normal with the scenario's noise, and a drift over the whole gate multiply every time of the turn, as another start of a server or a
neighbour on the machine would; a closed loop has no clock of its own, so scaling its times is the same as running it slower. Each
metric has 0.3 % of noise of its own, and the server that a block starts first is 3 % slower. Greedy answers to equal requests repeat,
so both sides draw the same luck of acceptance; the `sampled` scenario draws it anew in each turn.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backends.simulated.virtual import SimulatedRequest, simulate
from backends.simulated.world import Draft, TargetCost, World
from harness.gate.metrics import key
from harness.gate.session import run_session
from harness.gate.statistics import Noise
from harness.gate.types import Block, Rules, Sample

BUDGET_S = 300.0
START_S, TURN_S = 3.0, 3.2  # assumed; two starts and four turns are one block, 16 blocks fit
CONCURRENCY, REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 16, 120, 48
PARTS = 6  # of the trace, sent in turn
SAMPLED_DRAWS = 200
OWN_NOISE = 0.003
FIRST_SLOWER = 0.03  # of two servers that live at once the one that started first, as seen on a machine with two cores
KNOWN_FREEDOM = 40

COST = TargetCost(fixed_s=0.004, weights_s=0.020, token_s=0.0004, prefill_token_s=0.0002)
RATES = (0.85, 0.70, 0.55)


def world(rates: tuple[float, ...] = RATES, slow: float = 1.0, slow_step: float = 1.0) -> World:
    """`slow` multiplies all times, `slow_step` those of decode steps alone."""
    cost = TargetCost(
        fixed_s=COST.fixed_s * slow * slow_step,
        weights_s=COST.weights_s * slow * slow_step,
        token_s=COST.token_s * slow * slow_step,
        prefill_token_s=COST.prefill_token_s * slow,
    )
    draft = Draft({"default": rates}, pass_s=0.001 * slow * slow_step)
    return World("gate", cost, drafts={"draft_model": draft})


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    candidate: World
    noise: float
    expect: str
    drift: float = 0.0  # times at the end of the budget ÷ at its beginning − 1
    sampled: bool = False
    late_first_token: float = 1.0  # multiplies the candidate's TTFT
    causes: frozenset[str] = frozenset()


def fallen_tau(by: float) -> World:
    """The base with its position rates lower by `by` in sum, spread evenly."""
    return world(tuple(rate - by / len(RATES) for rate in RATES))


BASE = world()
TAU_FAULT = fallen_tau(0.134)  # on these parts of the trace tau falls by 0.147: 2.973 → 2.827
SCENARIOS = (
    Scenario("A/A, 2 % noise", BASE, 0.02, "pass >= 90 %, red <= 1 %"),
    Scenario("A/A, 2 % noise, drift 20 %", BASE, 0.02, "red <= 1 %", drift=0.2),
    Scenario("A/A, 11 % noise", BASE, 0.11, "red <= 1 %"),
    Scenario("A/A, 11 % noise, drift 20 %", BASE, 0.11, "red <= 1 %", drift=0.2),
    Scenario("A/A, sampled, 2 % noise", BASE, 0.02, "red <= 1 %", sampled=True),
    Scenario("E2E +5 %, 2 % noise", world(slow=1.05), 0.02, "red >= 95 %", causes=frozenset({"step_cost"})),
    Scenario("E2E +5 %, 11 % noise", world(slow=1.05), 0.11, "never a pass", causes=frozenset({"step_cost"})),
    Scenario("tau -0.15, 2 % noise", TAU_FAULT, 0.02, "red >= 99 %", causes=frozenset({"acceptance"})),
    Scenario("tau -0.15, 11 % noise", TAU_FAULT, 0.11, "red >= 99 %", causes=frozenset({"acceptance"})),
    Scenario("step +8 %, 2 % noise", world(slow_step=1.08), 0.02, "red", causes=frozenset({"step_cost"})),
    Scenario("TTFT x 1.6, 2 % noise", BASE, 0.02, "red", late_first_token=1.6, causes=frozenset({"prefill_or_queue"})),
    Scenario(
        "step +8 % and tau -0.3, 2 % noise",
        world(tuple(r - 0.1 for r in RATES), slow_step=1.08),
        0.02,
        "red",
        causes=frozenset({"acceptance", "step_cost"}),
    ),
)


class Engine:
    """Noise-free turns of a world, each simulated once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._turns: dict[int, dict[str, float]] = {}

    def turn(self, luck: int) -> dict[str, float]:
        if luck not in self._turns:
            requests = [SimulatedRequest(0.0, INPUT_TOKENS, OUTPUT_TOKENS)] * REQUESTS
            run = simulate(self.world, requests, variant="draft_model", k=len(RATES), concurrency=CONCURRENCY, seed=luck)
            steps = int(run.decode_steps.sum())
            self._turns[luck] = {
                "tau": (int(run.output_tokens.sum()) - REQUESTS) / steps,
                **{f"position_{i + 1}": n / steps for i, n in enumerate(run.counters.accepted_per_position or ())},
                "step": float((run.last_token_s - run.first_token_s).sum()) / steps,
                "e2e_p50": float(np.median(run.e2e_s)),
                "tpot_p50": float(np.median(run.tpot_s)),
                "ttft_p50": float(np.median(run.ttft_s)),
                "throughput": run.output_tokens_per_s,
            }
        return self._turns[luck]


class NoisySource:
    """Blocks of a scenario, in virtual time."""

    def __init__(self, scenario: Scenario, baseline: Engine, candidate: Engine, rng: np.random.Generator) -> None:
        self.scenario = scenario
        self.engines = (baseline, candidate)
        self.rng = rng
        self.now_s = 0.0

    def elapsed_s(self) -> float:
        return self.now_s

    def block(self, number: int) -> Block:
        self.now_s += 2 * START_S
        order = Block.order(number)
        return Block.of(order, [self._turn(int(side == "candidate"), number, first=side == order[0]) for side in order])

    def _turn(self, side: int, number: int, *, first: bool) -> Sample:
        scenario, normal = self.scenario, self.rng.standard_normal
        self.now_s += TURN_S
        luck = int(self.rng.integers(SAMPLED_DRAWS)) if scenario.sampled else number % PARTS
        values = dict(self.engines[side].turn(luck))
        if side:
            later_s = (scenario.late_first_token - 1) * values["ttft_p50"]
            values["throughput"] *= values["e2e_p50"] / (values["e2e_p50"] + later_s)
            values["ttft_p50"] += later_s
            values["e2e_p50"] += later_s
        slow = math.exp(scenario.noise * normal()) * (1 + scenario.drift * self.now_s / BUDGET_S)
        slow *= 1 + FIRST_SLOWER * first
        for name in ("step", "e2e_p50", "tpot_p50", "ttft_p50"):
            values[name] *= slow * math.exp(OWN_NOISE * normal())
        values["throughput"] /= slow * math.exp(OWN_NOISE * normal())
        return Sample({key(name, CONCURRENCY): value for name, value in values.items()}, requests=REQUESTS)


def known_noise(scenario: Scenario) -> dict[str, Noise]:
    """What earlier gates on this machine would have found: two turns of each side in a block, so the variance of one turn."""
    own = Noise(OWN_NOISE**2, KNOWN_FREEDOM)
    times = Noise(scenario.noise**2 + OWN_NOISE**2, KNOWN_FREEDOM)
    return {key(name, CONCURRENCY): own if name == "tau" else times for name in ("tau", "step", "e2e_p50", "throughput")}


def rates_of(scenario: Scenario, gates: int, seed: int, known: Mapping[str, Noise]) -> dict[str, Any]:
    """Outcomes, causes and cost of `gates` gates."""
    outcomes: Counter[str] = Counter()
    right = 0
    pairs, seconds, needed = [], [], []
    baseline, candidate = Engine(BASE), Engine(scenario.candidate)
    for gate in range(gates):
        source = NoisySource(scenario, baseline, candidate, np.random.default_rng([seed, gate]))
        run = run_session(source, Rules(), BUDGET_S, known=known)
        outcomes[run.verdict.outcome] += 1
        right += run.verdict.outcome == "regression" and set(run.verdict.causes) == scenario.causes
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
        "cause_right": right / red if red and scenario.causes else None,
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
    parser.add_argument("--noise-known", action="store_true", help="as after a few gates on this machine")
    parser.add_argument("--scenario", help="only scenarios whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rates here too")
    options = parser.parse_args()
    rows = []
    print("| scenario | pass | red | inconclusive | cause right | pairs | seconds | more pairs asked | must |")
    print("|---|---|---|---|---|---|---|---|---|")
    for scenario in SCENARIOS:
        if options.scenario and options.scenario not in scenario.name:
            continue
        row = rates_of(scenario, options.gates, options.seed, known_noise(scenario) if options.noise_known else {})
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
