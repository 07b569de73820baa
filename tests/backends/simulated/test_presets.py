"""Presets against the published tables they claim to reproduce, and worlds as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.simulated.presets import H100_8BIT, LLAMA_70B_8BIT, PRESETS
from backends.simulated.virtual import SimulatedRequest, simulate
from backends.simulated.world import World, dump_world, expected_tau, load_world, step_cost
from backends.types import ConfigError

# EAGLE-3 paper (arXiv 2503.01840), table 3: SGLang, H100, Llama 3.1 8B, MT-bench, chain of 3, throughput over no speculation.
BATCHES = (2, 4, 8, 16, 24, 32, 48, 56, 64)
TABLE_3 = {
    "eagle3": (1.81, 1.82, 1.62, 1.48, 1.39, 1.32, 1.38, 1.34, 1.38),
    "eagle2": (1.40, 1.38, 1.23, 1.02, 0.93, 0.94, 0.88, 0.99, 0.99),
}
# vLLM blog 2026-03-13: P-EAGLE (K = 7) over EAGLE-3 (K = 3), GPT-OSS-20B, B200.
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
P_EAGLE = {
    "mt_bench": (1.55, 1.29, 1.35, 1.28, 1.27, 1.09, 1.05),
    "humaneval": (1.55, 1.53, 1.45, 1.35, 1.31, 1.37, 1.23),
    "speed_bench": (1.69, 1.61, 1.54, 1.45, 1.40, 1.22, 1.25),
}
# The blog's acceptance lengths: P-EAGLE K = 3 and 7, EAGLE-3 K = 3 and 7.
LENGTHS = {"humaneval": (3.02, 3.94, 2.65, 3.03), "speed_bench": (2.87, 3.38, 2.24, 2.59), "mt_bench": (2.87, 3.70, 2.70, 3.27)}


def tokens_per_s(world: World, variant: str, k: int, *, batch: int, context: int, category: str = "default") -> float:
    seconds, per_context_token = step_cost(world, variant, k, batch=batch)
    tau = expected_tau(world.drafts[variant], k, category) if k else 1.0
    return batch * tau / (seconds + per_context_token * batch * context)


@pytest.mark.parametrize("variant", TABLE_3)
def test_eagle_on_an_h100_follows_the_paper(variant: str) -> None:
    world = PRESETS["h100-llama-8b"]()
    for batch, published in zip(BATCHES, TABLE_3[variant], strict=True):
        on, off = (tokens_per_s(world, v, k, batch=batch, context=600) for v, k in ((variant, 3), ("off", 0)))
        assert on / off == pytest.approx(published, rel=0.15), f"batch {batch}"


@pytest.mark.parametrize("batch", [2, 16, 64])
def test_eagle_in_a_whole_run_follows_the_paper(batch: int) -> None:
    world = PRESETS["h100-llama-8b"]()
    work = [SimulatedRequest(0.0, 200, 800)] * (4 * batch)
    off, on = (simulate(world, work, variant=v, k=k, concurrency=batch) for v, k in (("off", 0), ("eagle3", 3)))
    published = TABLE_3["eagle3"][BATCHES.index(batch)]
    assert on.output_tokens_per_s / off.output_tokens_per_s == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize("category", P_EAGLE)
def test_p_eagle_on_a_b200_follows_the_blog(category: str) -> None:
    world = PRESETS["b200-gpt-oss-20b"]()
    for batch, published in zip(CONCURRENCIES, P_EAGLE[category], strict=True):
        ratio = tokens_per_s(world, "p_eagle", 7, batch=batch, context=1000, category=category) / tokens_per_s(
            world, "eagle3", 3, batch=batch, context=1000, category=category
        )
        assert ratio == pytest.approx(published, rel=0.15), f"concurrency {batch}"


@pytest.mark.parametrize("category", LENGTHS)
def test_acceptance_lengths_are_the_blogs(category: str) -> None:
    drafts = PRESETS["b200-gpt-oss-20b"]().drafts
    got = [expected_tau(drafts[variant], k, category) for variant in ("p_eagle", "eagle3") for k in (3, 7)]
    assert got == pytest.approx(LENGTHS[category], abs=1e-6)


def test_batch_1_rate_and_weight_traffic() -> None:
    assert tokens_per_s(PRESETS["h100-llama-8b"](), "off", 0, batch=1, context=600) == pytest.approx(158.34, rel=0.01)
    assert LLAMA_70B_8BIT.weight_bytes / H100_8BIT.bandwidth_bytes_per_s == pytest.approx(0.021, rel=0.02)
    assert PRESETS["h100-llama-70b"]().target.weights_s == pytest.approx(0.021, rel=0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_where_it_comes_from_and_survives_a_file(name: str, tmp_path: Path) -> None:
    world = load_world(name)
    assert world.note
    assert world.limits.kv_capacity_tokens > 4_000
    file = tmp_path / "world.json"
    file.write_text(dump_world(world))
    assert load_world(str(file)) == world


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": {"fixed_s": "slow"}}, "target.fixed_s"),
        ({"drafts": {"eagle9": {"position_rates": {"default": [0.5]}}}}, "unknown variant 'eagle9'"),
        ({"drafts": {"eagle3": {"position_rates": {"default": [0.5, 0.6]}}}}, "must not increase"),
        ({"drafts": {"eagle3": {"position_rates": {"code": [0.5]}}}}, "needs the category 'default'"),
        ({"drafts": {"ngram": {"position_rates": {"default": [0.5]}, "draft_rate": 0.4}}}, "must lie in 0..draft_rate"),
    ],
)
def test_wrong_world_file_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "world.json"
    file.write_text(json.dumps({**json.loads(dump_world(load_world("small"))), **change}))
    with pytest.raises(ConfigError, match=message):
        load_world(str(file))


def test_unknown_world_is_named() -> None:
    with pytest.raises(ConfigError, match="no world 'nowhere': give a JSON file or one of small"):
        load_world("nowhere")
