"""The reference engine on a GPU, in one command: are its kernels right, is its greedy text transformers', and what do steps cost?

    python benchmarks/engine_gpu.py --out engine_gpu.json
    python benchmarks/engine_gpu.py --device cpu --small --out engine_gpu.json     (runs the same code without a GPU, in miniature)

Written to the JSON after each part:

- `kernels`: the attention kernel's largest errors against the torch path, by dtype; rows for which another token was chosen.
- `ceilings`: read bandwidth and matmul rate that this device reaches.
- `equality`: prompts whose float32 text equals `transformers.generate`, by variant.
- `demo`: seconds a step and tokens/s by variant, K and batch size for the demo model; acceptance is real.
- `large`: the same for an 8B-shaped model of random weights, its drafters random too. Acceptance is forced: position i at rate
  `--acceptance`^i, an assumption. `ngram` is the cost of verification with a draft that costs nothing.

`roofline_s` is the least time that the target's weights and KV can be read in, or its products computed in, at the measured
ceilings; drafting comes on top. Speed-up is tokens/s over those of `off` at the same batch size; `off` is measured first and last.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from backends.reference import kernels
from backends.reference.config import ModelConfig, read_config
from backends.reference.demo_heads import demo_head_dir, shipped_variants
from backends.reference.demo_model import demo_model_dir
from backends.reference.engine import Engine
from backends.reference.kv_cache import token_bytes
from backends.reference.options import KV_CACHE_DTYPES, TREES, EngineOptions
from backends.serving import GenerationRequest
from backends.types import ConfigError
from benchmarks.engine_cpu import prompts
from benchmarks.random_checkpoints import LLAMA_1B, LLAMA_8B, SMALL_DRAFT, SMALL_TARGET, write_eagle3, write_target
from harness.environment import environment

Row = tuple[str, dict[str, Any]]
"""A name, and fields of EngineOptions."""

WARM_STEPS = 3  # of each cell, not counted: kernels are compiled in them


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("engine_gpu.json"))
    parser.add_argument("--model", type=Path, help="in place of the demo model")
    parser.add_argument("--small", action="store_true", help="miniature sizes: shows that the code runs, measures nothing")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--k", default="2,4,8")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of the 8B-shaped model")
    parser.add_argument("--steps", type=int, default=30, help="steps measured for each cell")
    parser.add_argument("--acceptance", type=float, default=0.8)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: give --device cpu, or install a CUDA build of torch")
    args.batches, args.k = ([int(n) for n in text.split(",")] for text in (args.batches, args.k))
    if args.small:
        args.batches, args.k, args.context, args.steps = [1, 3], [2], 20, 2
    model = args.model or demo_model_dir()
    heads = {} if args.model else {variant: str(demo_head_dir(variant)) for variant in shipped_variants()}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report: dict[str, Any] = {"environment": environment(), "device": _device_name(device), "settings": settings}

    def part(name: str, made: Any) -> Any:
        report[name] = made
        args.out.write_text(json.dumps(report, indent=1))
        print(f"{name}: {json.dumps(made)}" if not isinstance(made, list) else "\n".join(map(_line, made)), flush=True)
        return made

    part("kernels", kernel_errors(device))
    ceilings = part("ceilings", measure_ceilings(device, dtype, small=args.small))
    part("equality", greedy_equality(model, demo_rows(heads, [4]), device, count=2 if args.small else 32))

    def demo_prompts(engine: Engine, batch: int) -> list[list[int]]:
        return list(islice(cycle(prompts(engine, batch)), batch))

    def random_prompts(engine: Engine, batch: int) -> list[list[int]]:
        random = torch.Generator().manual_seed(batch)
        return torch.randint(3, engine.model.config.vocab_size, (batch, args.context), generator=random).tolist()

    sizes: dict[str, Any] = {
        "batches": args.batches,
        "steps": args.steps,
        "ceilings": ceilings,
        "device": device,
        "dtype": dtype,
    }
    part("demo", step_costs(model, demo_rows(heads, args.k), demo_prompts, **sizes))
    with tempfile.TemporaryDirectory() as scratch:
        target, rows = large_rows(Path(scratch), model, args.k, args.acceptance, device, small=args.small)
        part("large", step_costs(target, rows, random_prompts, **sizes))
    print(f"written to {args.out}")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def kernel_errors(device: torch.device) -> dict[str, Any]:
    if not kernels.usable(device):
        return {"not run": "the kernels need a GPU and triton"}
    from benchmarks.kernel_checks import CASES, TOLERANCE, attention_error, other_choices

    caches = [stored for stored in KV_CACHE_DTYPES if stored != "fp8" or kernels.reads_fp8(device)]
    errors = {
        str(dtype): {
            f"{name}, {stored} KV cache": attention_error(case, dtype, device, stored)
            for stored in caches
            for name, case in CASES.items()
        }
        for dtype in TOLERANCE
    }
    wrong = [(d, name) for d, limit in TOLERANCE.items() for name, error in errors[str(d)].items() if error > limit]
    return {
        "largest_error": errors,
        "tolerance": {str(d): limit for d, limit in TOLERANCE.items()},
        "wrong": list(map(str, wrong)),
        "tokens_chosen_otherwise": other_choices(device),
    }


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, small: bool) -> dict[str, float]:
    """Best of several: bytes/s of a sum over much more than the caches hold, and FLOP/s of a square matmul in `dtype`."""
    numbers = torch.ones((1 << 20) if small else (1 << 30), device=device)
    side = 128 if small else 8192
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    read = min(_timings(device, numbers.sum, 10))
    product = min(_timings(device, lambda: a @ b, 10))
    return {"read_bytes_per_s": numbers.numel() * 4 / read, "matmul_flop_per_s": 2 * side**3 / product}


def _timings(device: torch.device, run: Callable[[], object], count: int) -> Iterator[float]:
    for _ in range(count):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        yield time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def demo_rows(heads: dict[str, str], ks: list[int]) -> list[Row]:
    """Variants that need no head, and those of which `heads` gives the folder."""
    rows: list[Row] = [("off", {})]
    for k in ks:
        rows += [("ngram", {"k": k}), ("draft_model", {"k": k, "draft": "self-int4"})]
        rows += [(variant, {"k": k, "draft": draft}) for variant, draft in heads.items()]
        rows += [
            (v, {"k": k, "draft": d, "topk": 4, "num_draft_tokens": 16}) for v, d in heads.items() if v in TREES and k == 4
        ]
    return rows


def large_rows(
    scratch: Path, tokenizer: Path, ks: list[int], acceptance: float, device: torch.device, *, small: bool
) -> tuple[Path, list[Row]]:
    """The target's folder, and rows with forced acceptance."""
    shape, draft_shape = (SMALL_TARGET, SMALL_DRAFT) if small else (LLAMA_8B, LLAMA_1B)
    target = write_target(scratch / "target", shape, tokenizer=tokenizer, device=device)
    draft = write_target(scratch / "draft", draft_shape, tokenizer=tokenizer, device=device)
    head = write_eagle3(scratch / "eagle3", shape, draft_vocab=min(32000, shape.vocab), device=device)
    rows: list[Row] = [("off", {})]
    for k in ks:
        forced = {"k": k, "forced_acceptance": tuple(acceptance**i for i in range(1, k + 1))}
        rows += [
            ("ngram", forced),
            ("eagle3", forced | {"draft": str(head)}),
            ("eagle3", forced | {"draft": str(head), "topk": 4, "num_draft_tokens": 16}),
            ("draft_model", forced | {"draft": str(draft)}),
        ]
    return target, rows


def greedy_equality(model: Path, rows: list[Row], device: torch.device, count: int, tokens: int = 24) -> dict[str, Any]:
    """Prompts of `count`, decoded together in float32, whose text is `transformers.generate`'s."""
    from transformers import AutoModelForCausalLM

    made: dict[str, Any] = {}
    expected: list[list[int]] = []
    for name, fields in rows:
        options = EngineOptions(
            model, name, dtype="float32", device=str(device), max_num_seqs=count, max_model_len=256, **fields
        )
        try:
            engine = Engine(options)
        except ConfigError as error:
            made[_label(name, fields)] = {"error": str(error)}
            continue
        asked = prompts(engine, count)
        if not expected:
            reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
            for prompt in asked:
                ids = torch.tensor([prompt], device=device)
                text = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
                expected.append(text[0, len(prompt) :].tolist())
            del reference
        sequences = [engine.add(GenerationRequest(tuple(prompt), tokens)) for prompt in asked]
        while engine.has_work:
            engine.step()
        equal = sum(s.tokens[s.prompt_tokens :] == text for s, text in zip(sequences, expected, strict=True))
        made[_label(name, fields)] = {"equal": equal, "of": count}
    return made


def step_costs(
    model: Path,
    rows: list[Row],
    asked: Callable[[Engine, int], list[list[int]]],
    *,
    batches: list[int],
    steps: int,
    ceilings: dict[str, float],
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """One entry for each row and batch size; the first row, `off`, once more at the end to show what the device drifted."""
    made: list[dict[str, Any]] = []
    off: dict[int, float] = {}
    for name, fields in [*rows, rows[0]]:
        k = fields.get("k", 0)
        entry = {"variant": name, "k": k, "topk": fields.get("topk", 1), "label": _label(name, fields)}
        tokens = (WARM_STEPS + steps + 1) * (k + 1)
        try:
            engine = Engine(
                EngineOptions(
                    model,
                    name,
                    dtype=str(dtype).removeprefix("torch."),
                    device=str(device),
                    max_num_seqs=max(batches),
                    max_num_batched_tokens=max(4096, 1 + max(batches)),
                    max_model_len=min(2048, read_config(model).context_tokens),
                    kv_cache_tokens=1 << 40,  # all that the slots hold
                    chunked_prefill=False,
                    **fields,
                )
            )
            for batch in batches:
                cell = measure(engine, asked(engine, batch), tokens, steps, device)
                off.setdefault(batch, cell["tokens_per_s"])
                cell["speed_up"] = cell["tokens_per_s"] / off[batch]
                cell["roofline_s"] = roofline(
                    engine.model.config, dtype, batch, engine.options.draft_tokens, cell["context"], ceilings
                )
                made.append(entry | {"batch": batch} | cell)
            del engine
        except (ConfigError, torch.OutOfMemoryError) as error:
            made.append(entry | {"error": str(error).splitlines()[0]})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return made


def measure(engine: Engine, asked: list[list[int]], tokens: int, steps: int, device: torch.device) -> dict[str, Any]:
    """`steps` decode steps of all requests together. None of them is near its end in these, so that every draft has K tokens."""
    first = engine.counters.first_tokens
    sequences = [engine.add(GenerationRequest(tuple(p), tokens, ignore_eos=True, seed=seed)) for seed, p in enumerate(asked)]
    while engine.counters.first_tokens < first + len(asked):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    before = engine.counters.generated_tokens, engine.counters.decode_steps
    times = list(islice(_timings(device, engine.step, steps), steps))
    generated, decoded = engine.counters.generated_tokens - before[0], engine.counters.decode_steps - before[1]
    context = statistics.mean(len(sequence.tokens) for sequence in sequences)
    for sequence in sequences:
        engine.cancel(sequence)
    return {
        "step_s": statistics.median(times),
        "step_s_quartiles": statistics.quantiles(times, n=4)[::2],
        "tau": generated / decoded,
        "tokens_per_s": generated / sum(times),
        "context": context,
    }


def roofline(
    config: ModelConfig, dtype: torch.dtype, batch: int, drafted: int, context: float, ceilings: dict[str, float]
) -> float:
    """Least seconds of the target's pass over `drafted` + 1 tokens a sequence. The embedding table is not read but for its rows."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    weights = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    weights += config.vocab_size * config.hidden_size
    kv_bytes = batch * context * token_bytes(config, dtype)
    read = (weights * dtype.itemsize + kv_bytes) / ceilings["read_bytes_per_s"]
    return max(read, 2 * weights * batch * (drafted + 1) / ceilings["matmul_flop_per_s"])


def _label(name: str, fields: dict[str, Any]) -> str:
    k = f" K={fields['k']}" if "k" in fields else ""
    return f"{name}{k}" + (f" tree of {fields['num_draft_tokens']}" if "topk" in fields else "")


def _line(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return f"{entry['label']:26} {entry['error']}"
    return (
        f"{entry['label']:26} batch {entry['batch']:3}  step {entry['step_s'] * 1e3:8.2f} ms  roofline {entry['roofline_s'] * 1e3:7.2f}"
        f" ms  tau {entry['tau']:.2f}  {entry['tokens_per_s']:9.1f} tokens/s  speed-up {entry['speed_up']:.2f}"
    )


if __name__ == "__main__":
    main()
