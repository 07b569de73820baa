"""Offline acceptance equals, to the token, what the engine counts when it decodes the same greedy outputs with that variant."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from tiny_models import generate, request, save, shape
from transformers import LlamaConfig

from backends.reference.engine import Engine
from backends.reference.options import EngineOptions
from harness.offline import Acceptance, Recorded, ngram_acceptance, pool, suffix_acceptance


def prompts(count: int = 40) -> list[list[int]]:
    """Prompts that repeat parts of themselves."""
    rng = Random(0)
    parts = [[rng.randrange(97, 123) for _ in range(6)] for _ in range(8)]
    return [[token for _ in range(rng.randrange(2, 6)) for token in rng.choice(parts)] for _ in range(count)]


@pytest.fixture(scope="module")
def ending_dir(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    """The tiny model, with its most frequent output token as the one that ends an answer."""
    common = Counter(
        token for out in generate(Engine(EngineOptions(tiny_dir)), [request(p) for p in prompts()]) for token in out
    )
    folder = tmp_path_factory.mktemp("ending")
    save(LlamaConfig(**shape(eos_token_id=common.most_common(1)[0][0])), folder)
    return folder


def decoded(folder: Path, *, ignore_eos: bool, **fields: object) -> tuple[Engine, list[Recorded]]:
    engine = Engine(EngineOptions(folder, max_num_seqs=8, **fields))  # type: ignore[arg-type]
    asked = prompts()
    outputs = generate(engine, [request(p, 10 + i, ignore_eos=ignore_eos) for i, p in enumerate(asked)])
    return engine, [Recorded(p, out) for p, out in zip(asked, outputs, strict=True)]


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("sizes", [(1, 4), (2, 3)])
def test_ngram_counts_equal_the_engine_s(ending_dir: Path, k: int, sizes: tuple[int, int]) -> None:
    _, recorded = decoded(ending_dir, ignore_eos=True)
    engine, again = decoded(ending_dir, ignore_eos=True, variant="ngram", k=k, ngram_min=sizes[0], ngram_max=sizes[1])
    assert again == recorded
    (part,) = [p for p in pool(ngram_acceptance(recorded)) if (p.k, p.min_n, p.max_n) == (k, *sizes)]
    assert (part.drafted_steps, part.draft_tokens) == (engine.counters.drafted_steps, engine.counters.draft_tokens)
    assert_same_tau(part, engine)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_suffix_counts_equal_the_engine_s(ending_dir: Path, k: int) -> None:
    _, recorded = decoded(ending_dir, ignore_eos=True)
    engine, again = decoded(ending_dir, ignore_eos=True, variant="suffix", k=k)
    assert again == recorded
    (part,) = [p for p in pool(suffix_acceptance(recorded)) if p.k == k]
    assert (part.drafted_steps, part.draft_tokens) == (engine.counters.drafted_steps, engine.counters.draft_tokens)
    assert_same_tau(part, engine)


def test_answers_that_end_themselves_have_the_engine_s_tau_too(ending_dir: Path) -> None:
    """The engine may draft past an end that nobody knows of yet, so only steps and tokens are compared."""
    for variant in ("ngram", "suffix"):
        engine, recorded = decoded(ending_dir, ignore_eos=False, variant=variant, k=4)
        lengths = [len(item.output_ids) for item in recorded]
        assert sum(n < 10 + i for i, n in enumerate(lengths)) >= 10
        parts = pool([*ngram_acceptance(recorded), *suffix_acceptance(recorded)])
        wanted = (variant, 4, 2, 4) if variant == "ngram" else (variant, 4, None, None)
        (part,) = [p for p in parts if (p.variant, p.k, p.min_n, p.max_n) == wanted]
        assert_same_tau(part, engine)


def assert_same_tau(part: Acceptance, engine: Engine) -> None:
    counters = engine.counters
    assert (part.steps, part.emitted_tokens) == (counters.decode_steps, counters.generated_tokens - counters.first_tokens)
    assert part.tau is not None
    assert part.tau > 1
