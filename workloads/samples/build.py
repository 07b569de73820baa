"""Builds the bundled prompt pools and the sample trace from the public files named in SOURCE.md.

    python -m workloads.samples.build MT_BENCH.jsonl HUMANEVAL.jsonl GSM8K.jsonl AZURE_CONV.csv

The same inputs give the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from workloads.load import load_trace

REQUESTS = 104
RATE_PER_S = 0.35
FIRST_ROW = 5_000  # of the Azure file
MAX_PROMPT_CHARS = 900  # about 300 tokens
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 16, 64
SEED = 0
ROOT = Path(__file__).parent.parent

Prompt = dict[str, Any]


def records(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def user(text: str, category: str) -> Prompt:
    return {"messages": [{"role": "user", "content": text}], "category": category}


def grounded(human_eval: list[dict[str, Any]], mt_bench: list[dict[str, Any]], gsm8k: list[dict[str, Any]]) -> list[Prompt]:
    """Tasks whose answers largely repeat their input: edit code, extract from text, rewrite with a change."""
    tasks = []
    for i, item in enumerate(human_eval[:60]):
        code, name = item["prompt"] + item["canonical_solution"].rstrip("\n"), item["entry_point"]
        ask = (
            f"Rename the function `{name}` to `{name}_v2` everywhere. Reply with the complete code and nothing else.",
            "Add a comment line above every return statement. Reply with the complete code and nothing else.",
            "Remove the examples from the docstring, change nothing else, and reply with the complete code.",
        )[i % 3]
        tasks.append(user(f"{ask}\n\n```python\n{code}\n```", "grounded"))
    for i, item in enumerate(gsm8k[:30]):
        text = item["turns"][0]
        ask = (
            "Copy the text below word for word, but write every number in digits.",
            "Extract from the text below every sentence that contains a number, word for word, one a line.",
            "Rewrite the text below in the past tense and change nothing else.",
        )[i % 3]
        tasks.append(user(f"{ask}\n\n{text}", "grounded"))
    for item in mt_bench:
        if item["category"] in ("extraction", "stem", "humanities", "roleplay"):
            ask = "Correct the grammar of the text below and reply with the whole text; keep every word that is right."
            tasks.append(user(f"{ask}\n\n{item['turns'][0]}", "grounded"))
    return tasks


def pools(mt_bench: str, human_eval: str, gsm8k: str) -> dict[str, list[Prompt]]:
    mt, he, gsm = records(mt_bench), records(human_eval), records(gsm8k)
    complete = "Complete this Python function. Reply with the whole function.\n\n```python\n{}```"
    return {
        "chat": [user(item["turns"][0], "chat") for item in mt],
        "code": [user(complete.format(item["prompt"]), "code") for item in he],
        "reasoning": [user(item["turns"][0], "reasoning") for item in gsm],
        "grounded": grounded(he, mt, gsm),
    }


def sample(pool: dict[str, list[Prompt]], azure: str) -> list[dict[str, Any]]:
    """Equal shares of the pools on consecutive arrivals of the Azure trace, slowed down to `RATE_PER_S`."""
    rng = random.Random(SEED)
    prompts = []
    for items in pool.values():
        short = [item for item in items if len(item["messages"][0]["content"]) <= MAX_PROMPT_CHARS]
        prompts += rng.sample(short, REQUESTS // len(pool))
    rng.shuffle(prompts)
    trace = load_trace(azure).select(range(FIRST_ROW, FIRST_ROW + REQUESTS))
    seconds = trace.arrivals_s - trace.arrivals_s[0]
    scale = (REQUESTS - 1) / RATE_PER_S / seconds[-1]
    lengths = np.clip(trace.numbers("output_tokens"), MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)
    print(f"rows {FIRST_ROW + 1}-{FIRST_ROW + REQUESTS}, {seconds[-1]:.3f} s, time scale {scale:.4f}")
    rows = []
    for i, (prompt, at, length) in enumerate(zip(prompts, seconds * scale, lengths, strict=True)):
        sampling = {"temperature": 0.7, "seed": i} if i % 8 == 7 else {"temperature": 0}
        rows.append({"arrival_s": round(float(at), 3), **prompt, "max_tokens": int(length), **sampling, "content_grade": "B"})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def main(mt_bench: str, human_eval: str, gsm8k: str, azure: str) -> None:
    pool = pools(mt_bench, human_eval, gsm8k)
    for name, prompts in pool.items():
        write(ROOT / "pools" / f"{name}.jsonl", prompts)
    write(ROOT / "samples" / "demo.jsonl", sample(pool, azure))


if __name__ == "__main__":
    main(*sys.argv[1:])
