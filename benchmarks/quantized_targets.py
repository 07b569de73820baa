"""One EAGLE-3 head against its target in bf16, int8 and int4: how much of its drafts is accepted, and which K is best for each.

    python -m benchmarks.quantized_targets --out quantized.json             # acceptance: load on the machine does not matter
    python -m benchmarks.quantized_targets --timing --out quantized.json    # adds step times and the best K: a quiet machine

The demo model and the head that comes with it, greedy, real prompts of all bundled pools. The head was trained on what the target
said without quantization, and stays as it is: what changes is the target's text and the hidden states that the head reads. One prompt
gets a different text from each target, so prompts are what is paired, and what the bootstrap draws.

A step counts where it begins before `--tokens` output tokens and before a loop (as training cuts them off); requests run on for K
tokens, so that such a step always has all K drafts. The step that ends an answer is left out: how much of its draft would have been
accepted is not known. tau(K) is 1 + the first K position rates, all measured at K = 6; with a smaller K steps begin at other tokens,
so for those it is an estimate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from backends.reference.demo_heads import demo_head_dir
from backends.reference.demo_model import demo_model_dir
from backends.reference.engine import Engine
from backends.reference.options import EngineOptions
from backends.reference.training.distill import LOOP_TOKENS, loop_start, read_prompts
from backends.serving import GenerationRequest
from workloads.prompts import POOLS

POOL_FILES = Path(__file__).parents[1] / "workloads" / "pools"
TARGETS = {"bf16": "none", "int8": "int8", "int4": "int4"}
K, COMPARED_K, BATCH = 6, 4, 16
TIMED_TOKENS = 64
PROGRESS_S = 10.0

Prompt = tuple[str, list[int]]  # category, token ids
Progress = Callable[[float], None]  # called with the share that is done


@dataclass(frozen=True, slots=True)
class Answer:
    category: str
    output: list[int]
    loop: int | None  # where one begins; no step from there on is counted
    steps: int
    accepted: list[int]  # [K]: steps in which draft position i was accepted


def engine_for(target: str, k: int, batch: int) -> Engine:
    drafter: dict[str, Any] = {"variant": "eagle3", "k": k, "draft": str(demo_head_dir("eagle3"))} if k else {}
    common = {"dtype": "bfloat16", "quantization": TARGETS[target], "max_num_seqs": batch, "max_model_len": 1024}
    return Engine(EngineOptions(demo_model_dir(), **common, **drafter))


def prompts(engine: Engine, each: int) -> list[Prompt]:
    """`each` of every pool, spread evenly over it."""
    chosen = []
    for pool in POOLS:
        rows = read_prompts(POOL_FILES / f"{pool}.jsonl")
        chosen += [(pool, engine.tokenizer.encode_chat(rows[i * len(rows) // each][0])) for i in range(each)]
    return chosen


def progress(what: str) -> Progress:
    start = shown = time.monotonic()

    def show(share: float) -> None:
        nonlocal shown
        now = time.monotonic()
        if share and now - shown > PROGRESS_S:
            shown = now
            print(f"{what}: {share:.0%}, about {(now - start) * (1 / share - 1) / 60:.1f} minutes left", flush=True)

    return show


def answers(engine: Engine, asked: list[Prompt], tokens: int, show: Progress) -> list[Answer]:
    sequences = [engine.add(GenerationRequest(tuple(ids), tokens + K)) for _, ids in asked]
    steps: dict[int, list[tuple[int, int]]] = {sequence.id: [] for sequence in sequences}  # (first token, accepted)
    while engine.has_work:
        for step in engine.step():
            begin = step.sequence.output_tokens - len(step.token_ids)
            if begin and step.finish_reason != "stop":
                steps[step.sequence.id].append((begin, len(step.token_ids) - 1))
        show(sum(sequence.output_tokens for sequence in sequences) / (len(sequences) * (tokens + K)))
    pairs = zip(asked, sequences, strict=True)
    return [counted(category, s.tokens[s.prompt_tokens :][:tokens], steps[s.id]) for (category, _), s in pairs]


def counted(category: str, output: list[int], steps: list[tuple[int, int]]) -> Answer:
    ends = (*range(LOOP_TOKENS, len(output), 8), len(output))  # where training looks for loops
    loop = next((start for end in ends if (start := loop_start(output[:end])) is not None), None)
    lengths = [accepted for begin, accepted in steps if begin < (len(output) if loop is None else loop)]
    return Answer(category, output, loop, len(lengths), [sum(n > i for n in lengths) for i in range(K)])


def rates(found: list[Answer]) -> list[float]:
    """Marginal position rates, [K]: accepted at a position ÷ steps, both summed over answers."""
    steps = sum(answer.steps for answer in found)
    return [sum(answer.accepted[i] for answer in found) / steps for i in range(K)]


def tau(position_rates: list[float], k: int) -> float:
    return 1 + sum(position_rates[:k])


def difference(base: list[Answer], other: list[Answer], positions: int) -> tuple[float, float, float]:
    """Accepted at the first `positions` positions a step, `other` less `base`, with its 95 % interval (BCa, prompts drawn)."""
    columns = [
        np.array(column, float)
        for found in (base, other)
        for column in ([sum(a.accepted[:positions]) for a in found], [a.steps for a in found])
    ]

    def statistic(a: np.ndarray, n: np.ndarray, b: np.ndarray, m: np.ndarray, axis: int = -1) -> np.ndarray:
        return b.sum(axis) / m.sum(axis) - a.sum(axis) / n.sum(axis)

    interval = stats.bootstrap(columns, statistic, paired=True, rng=np.random.default_rng(0)).confidence_interval
    return float(statistic(*columns)), float(interval.low), float(interval.high)


def acceptance(each: int, tokens: int) -> dict[str, Any]:
    found: dict[str, list[Answer]] = {}
    for target in TARGETS:
        engine = engine_for(target, K, BATCH)
        found[target] = answers(engine, prompts(engine, each), tokens, progress(f"acceptance, {target}"))
    base = found["bf16"]
    print("| target | position rates | " + " | ".join(f"tau({k})" for k in range(1, K + 1)), end=" |")
    print(f" tau({COMPARED_K}) " + ", ".join(POOLS) + " | steps | answers as bf16's | loops |\n|" + "---|" * (K + 6))
    targets = {}
    for target, all_answers in found.items():
        m = rates(all_answers)
        pools = {pool: tau(rates([a for a in all_answers if a.category == pool]), COMPARED_K) for pool in POOLS}
        targets[target] = {"position_rates": m, "tau_4_by_pool": pools, "answers": [asdict(a) for a in all_answers]}
        cells = [target, " ".join(f"{rate:.3f}" for rate in m), *(f"{tau(m, k):.2f}" for k in range(1, K + 1))]
        cells += [", ".join(f"{value:.2f}" for value in pools.values()), str(sum(a.steps for a in all_answers))]
        cells.append(str(sum(a.output == b.output for a, b in zip(all_answers, base, strict=True))))
        print("| " + " | ".join([*cells, str(sum(a.loop is not None for a in all_answers))]) + " |")
    print(f"\n| less bf16, {len(base)} prompts | first position, points | tau({COMPARED_K}) |\n|---|---|---|")
    differences = {}
    for target in ("int8", "int4"):
        first = [100 * value for value in difference(base, found[target], 1)]
        of_tau = difference(base, found[target], COMPARED_K)
        differences[target] = {"first_position_points": first, "tau_4": of_tau}
        print("| {} | {:+.1f} ({:+.1f} to {:+.1f}) | {:+.3f} ({:+.3f} to {:+.3f}) |".format(target, *first, *of_tau))
    return {"k": K, "tokens": tokens, "targets": targets, "differences_value_low_high": differences}


def step_s(engine: Engine, prompt: list[int]) -> tuple[float, float]:
    """Mean seconds of a decode step at batch 1, and the drafter's part of them. The head reads the prompt in the first one,
    which is left out; a request is cancelled before K would be cut to the tokens that are left."""
    sequence = engine.add(GenerationRequest(tuple(prompt), TIMED_TOKENS + K, ignore_eos=True))
    while sequence.output_tokens < 2:
        engine.step()
    before, steps = dict(engine.clock.totals), 0
    while sequence.output_tokens < TIMED_TOKENS:
        engine.step()
        steps += 1
    engine.cancel(sequence)
    spent = {part: seconds - before[part] for part, seconds in engine.clock.totals.items()}
    return sum(spent.values()) / steps, spent["draft"] / steps


def timing(position_rates: dict[str, list[float]], rounds: int) -> dict[str, Any]:
    """Of each target: step times by K in turn, and with its tau(K) the predicted speed-up over itself without speculation."""
    rows = ["| target | off, ms a step | " + " | ".join(f"K = {k}" for k in range(1, K + 1)) + " | best K |"]
    rows.append("|---|" + "---|" * (K + 2))
    table = {}
    for target, m in position_rates.items():
        engines = {k: engine_for(target, k, 1) for k in range(K + 1)}
        asked = prompts(engines[0], 1)
        for engine in engines.values():
            engine.warm_up()
        show = progress(f"timing, {target}")
        times: dict[int, list[tuple[float, float]]] = {k: [] for k in engines}
        for n in range(rounds * len(asked)):
            for k, engine in engines.items():
                times[k].append(step_s(engine, asked[n % len(asked)][1]))
            show((n + 1) / (rounds * len(asked)))
        whole, draft = ({k: statistics.median(t[part] for t in times[k]) for k in engines} for part in (0, 1))
        speedup = {k: tau(m, k) * whole[0] / whole[k] for k in range(1, K + 1)}
        best = max(speedup, key=speedup.__getitem__)
        cells = [f"{1e3 * whole[k]:.1f} ms (draft {1e3 * draft[k]:.1f}), {speedup[k]:.2f}x" for k in speedup]
        rows.append(f"| {target} | {1e3 * whole[0]:.1f} | " + " | ".join(cells) + f" | {best} |")
        table[target] = {"step_s": whole, "draft_s": draft, "predicted_speedup": speedup, "best_k": best}
    print("\n".join(rows))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=24, help="prompts of each pool")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--timing", action="store_true", help="only step times, with the acceptance that --out holds")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.timing:
        result = json.loads(args.out.read_text())
        position_rates = {target: values["position_rates"] for target, values in result["targets"].items()}
        result["timing_batch_1"] = timing(position_rates, args.rounds)
    else:
        result = acceptance(args.each, args.tokens)
    args.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
