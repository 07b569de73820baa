"""Real gates on the reference engine and the demo model: equal sides must not turn red, injected faults must.

    python -m benchmarks.gate_real [--equal 20] [--faults slow,draft] [--profile pr] [--budget 5m] [--out runs/gates]

Exit code 1 where a gate of equal sides is red, or a fault is not red for its reason. Each gate is one folder below --out, so that
`tune.py report --history runs/gates` draws them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.gate.cli import gate

ENGINE = "--variant ngram --k 4"
FAULTY = f"{ENGINE} --engine '{sys.executable} {Path(__file__).with_name('faulty_engine.py')} {{}}'"


@dataclass(frozen=True, slots=True)
class Case:
    """A candidate against the unchanged engine. `cause` is what a red gate must name; None: it must not be red."""

    name: str
    candidate: str
    cause: str | None


FAULTS = {
    "slow": Case("step 8 % slower", FAULTY.format("--slow-step 0.08"), "step_cost"),
    "draft": Case("60 % of drafts spoiled", FAULTY.format("--spoil-drafts 0.6"), "acceptance"),
}


def run(case: Case, number: int, profile: str, budget: str | None, out: Path) -> tuple[str, bool]:
    """One gate; its row of the table, and whether it is as it must be."""
    folder = out / f"{number:03d}"
    gate(baseline=ENGINE, candidate=case.candidate, profile=profile, budget=budget, out=str(folder))
    found = json.loads((folder / "gate.json").read_text())
    red = found["outcome"] == "regression"
    right = red and case.cause in found["causes"] if case.cause else not red
    row = f"| {case.name} | {found['outcome']} | {found['reasons'][0]} | {found['pairs']} | {found['elapsed_s']:.0f} |"
    return row, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--equal", type=int, default=20, help="gates of the engine against itself")
    parser.add_argument("--faults", default="slow,draft", help=f"comma-separated: {', '.join(FAULTS)}; empty for none")
    parser.add_argument("--profile", default="pr")
    parser.add_argument("--budget", help="of each gate (default: the profile's)")
    parser.add_argument("--out", type=Path, default=Path("runs/gates"))
    given = parser.parse_args()
    cases = [Case("against itself", ENGINE, None)] * given.equal
    cases += [FAULTS[name] for name in given.faults.split(",") if name]
    rows = [run(case, number, given.profile, given.budget, given.out) for number, case in enumerate(cases)]
    print("\n| candidate | outcome | why | pairs | seconds |\n|---|---|---|---|---|")
    print("\n".join(row for row, _ in rows))
    return int(not all(right for _, right in rows))


if __name__ == "__main__":
    sys.exit(main())
