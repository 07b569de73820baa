"""Worlds by name: published machines and models, from bandwidth, FLOP/s and bytes.

Nothing here was measured by this project: these are predictions for machines, calibrated on published tables. Costs are nominal
(peak bandwidth and peak dense FLOP/s); what nominal figures leave out is in constants, each with its source, and in at most two
fitted ones for each family (`FITTED_...`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from backends.simulated.world import Draft, Limits, TargetCost, World


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    bandwidth_bytes_per_s: float
    flops: float  # dense, at the precision that the presets below multiply in
    memory_bytes: float


# NVIDIA data sheets: H100 SXM5 80 GB, H200 SXM, A100 SXM4 80 GB, B200 (HGX); dense BF16, and FP8 (A100: INT8) for 8-bit weights.
H100 = Machine("H100", 3.35e12, 989e12, 80e9)
H100_8BIT = Machine("H100", 3.35e12, 1979e12, 80e9)
H200 = Machine("H200", 4.8e12, 989e12, 141e9)
H200_8BIT = Machine("H200", 4.8e12, 1979e12, 141e9)
A100 = Machine("A100", 2.039e12, 312e12, 80e9)
A100_8BIT = Machine("A100", 2.039e12, 624e12, 80e9)
B200 = Machine("B200", 8.0e12, 2250e12, 180e9)


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder; `weight_bytes` is what every step reads (all weights but the input embedding)."""

    name: str
    weight_bytes: float
    parameters: float  # that multiply each token
    kv_bytes_per_token: float


# From the models' config.json. Llama 3.1 8B: 8.03e9 parameters, 0.53e9 of them input embedding; 32 layers × 8 KV heads × 128 × 2
# × 2 bytes. Llama 3.3 70B: 70.6e9, 1.05e9 of them input embedding; the output head (another 1.05e9) stays 16-bit in 8-bit
# checkpoints; 80 layers.
LLAMA_8B = Model("Llama-3.1-8B", 15.01e9, 7.50e9, 131_072)
LLAMA_70B_8BIT = Model("Llama-3.3-70B (8-bit weights)", 70.6e9, 69.5e9, 327_680)

# EAGLE heads for Llama 3.1 8B, from their shapes (hidden H = 4096, one decoder layer of 0.218e9 parameters, 16-bit). EAGLE-3: the
# attention reads 2H (0.025e9 more), fc 3H × H, head for 32,000 tokens. EAGLE: fc 2H × H, head for all 128,256 tokens.
EAGLE3_8B_PARAMETERS, EAGLE3_VOCABULARY = 0.4247e9, 32_000
EAGLE_8B_PARAMETERS, EAGLE_VOCABULARY = 0.7770e9, 128_256

# SGLang on an H100, Llama 3.1 8B, no speculation: 158.34 tokens/s at batch 1 (EAGLE-3 paper, arXiv 2503.01840, table 3). What the
# traffic of weights and of 600 tokens of KV does not explain of that step is launch and host work.
LLAMA_FIXED_S = 1 / 158.34 - LLAMA_8B.weight_bytes / H100.bandwidth_bytes_per_s - 600 * 131_072 / H100.bandwidth_bytes_per_s

FITTED_EAGLE_STEP_S = 3.775e-3  # host work of a step with a draft (fitted to table 3: 18 speed-ups, largest error 12.3 %)
FITTED_EAGLE_VOCABULARY_S = 2.425e-10  # drafting one token: for each entry of the draft's vocabulary (softmax and top-k)

# Mean acceptance lengths by K (vLLM pull request 20780, Llama 3.1 8B). EAGLE-3, K = 2..7: 2.36 2.79 3.08 3.32 3.46 3.54; EAGLE:
# 2.1 2.29 2.39 2.43 2.45 2.47, read as K = 2..7 too, since K = 1 cannot give more than 2. Differences are the rates of
# positions 3..7; how 1.36 and 1.10 divide between positions 1 and 2 is not published (EAGLE-3: in the ratio .730 : .521 of
# vLLM's MT-bench test, EAGLE: geometric through position 3).
EAGLE3_8B_RATES = (0.794, 0.566, 0.43, 0.29, 0.24, 0.14, 0.08)
EAGLE_8B_RATES = (0.7285, 0.3715, 0.19, 0.10, 0.04, 0.02, 0.02)

PREFILL_UTILISATION = 0.5  # of peak FLOP/s; an assumption, since none of the tables shows prefill
MEMORY_SHARE = 0.9  # of the GPU's memory given to weights and KV cache: vLLM's default
CAPTURED_BATCHES = (1, 2, 4, *range(8, 257, 8))  # vLLM's default CUDA-graph sizes

LLAMA_NOTE = """Nominal bandwidth and FLOP/s; host work per step from the published batch-1 rate on an H100, taken over for other
machines and for 70B unchanged (an assumption). Two fitted constants: host work of a step with a draft, and time per sequence and
entry of the draft vocabulary. Reproduces EAGLE-3 and EAGLE (chain of 3) over batch 2-64 on SGLang and H100 (arXiv 2503.01840,
table 3) within 13 %. Does not reproduce: table 1 of the same paper (3.6-6.5x at batch 1: trees of depth 7-8 in a PyTorch loop
against an eager baseline), its 373 tokens/s at batch 1 (a tree; here a chain), and its vLLM table 5 (the machine is named as two
different ones)."""


def _dense(machine: Machine, model: Model) -> TargetCost:
    token_s = 2 * model.parameters / machine.flops
    return TargetCost(
        fixed_s=LLAMA_FIXED_S,
        weights_s=model.weight_bytes / machine.bandwidth_bytes_per_s,
        token_s=token_s,
        prefill_token_s=token_s / PREFILL_UTILISATION,
        context_token_s=model.kv_bytes_per_token / machine.bandwidth_bytes_per_s,
    )


def _eagle(machine: Machine, parameters: float, vocabulary: int, rates: tuple[float, ...]) -> Draft:
    """A 16-bit head that drafts a chain."""
    return Draft(
        position_rates={"default": rates},
        step_fixed_s=FITTED_EAGLE_STEP_S,
        pass_s=2 * parameters / machine.bandwidth_bytes_per_s,
        draft_token_s=2 * parameters / machine.flops + vocabulary * FITTED_EAGLE_VOCABULARY_S,
    )


def _limits(machine: Machine, weight_bytes: float, kv_bytes_per_token: float) -> Limits:
    room = MEMORY_SHARE * machine.memory_bytes - weight_bytes
    return Limits(
        max_num_seqs=256,
        max_batched_tokens=8192,
        kv_capacity_tokens=int(room / kv_bytes_per_token),
        graph_batches=CAPTURED_BATCHES,
    )


def llama_8b(machine: Machine) -> World:
    """Llama 3.1 8B, 16-bit, with EAGLE-3 and EAGLE chains (`eagle2` with topk 1)."""
    return World(
        name=f"{machine.name}-{LLAMA_8B.name}",
        note=LLAMA_NOTE,
        target=_dense(machine, LLAMA_8B),
        drafts={
            "eagle3": _eagle(machine, EAGLE3_8B_PARAMETERS, EAGLE3_VOCABULARY, EAGLE3_8B_RATES),
            "eagle2": _eagle(machine, EAGLE_8B_PARAMETERS, EAGLE_VOCABULARY, EAGLE_8B_RATES),
        },
        limits=_limits(machine, LLAMA_8B.weight_bytes + 1.05e9, LLAMA_8B.kv_bytes_per_token),
    )


# EAGLE-3 head for Llama 3.3 70B (hidden 8192): one layer of 0.86e9, 0.08e9 more for attention over 2H, fc 3H × H, head for 32,000
# tokens. Rates: mean acceptance lengths of the 8B head, since by-K figures of a 70B head are not published for this engine.
EAGLE3_70B_PARAMETERS = 1.40e9


def llama_70b(machine: Machine) -> World:
    """Llama 3.3 70B with 8-bit weights (FP8; INT8 on an A100) and an EAGLE-3 chain."""
    return World(
        name=f"{machine.name}-70B-8bit",
        note=f"{LLAMA_NOTE} For 70B the acceptance is that of the 8B head.",
        target=_dense(machine, LLAMA_70B_8BIT),
        drafts={"eagle3": _eagle(machine, EAGLE3_70B_PARAMETERS, EAGLE3_VOCABULARY, EAGLE3_8B_RATES)},
        limits=_limits(machine, LLAMA_70B_8BIT.weight_bytes, LLAMA_70B_8BIT.kv_bytes_per_token / 2),  # FP8 KV cache
    )


# GPT-OSS-20B, from its config.json: 24 layers, hidden 2880, 32 experts of 3 × 2880 × 2880 (MXFP4: 4.25 bits), 4 of them for each
# token; attention 64 × 64 with 8 KV heads and the output head over 201,088 tokens in 16 bits; 3.6e9 active parameters.
GPT_OSS_EXPERT_BYTES = 24 * 32 * 3 * 2880**2 * 4.25 / 8
GPT_OSS_DENSE_BYTES = 2 * (24 * (2880 * 4096 + 2 * 2880 * 512 + 4096 * 2880) + 201_088 * 2880)
GPT_OSS_KV_BYTES = 24 * 2 * 8 * 64 * 2
# Heads: one layer (EAGLE-3, reads 2H) or four (P-EAGLE; the first reads 2H), MLP 17,280 wide, fc 3H × H, 32,000 draft tokens.
_ATTENTION, _MLP, _SHARED = 2880 * 5120 + 4096 * 2880, 3 * 2880 * 17_280, 3 * 2880**2 + 32_000 * 2880
GPT_OSS_EAGLE3_PARAMETERS = _ATTENTION + 2880 * 5120 + _MLP + _SHARED
GPT_OSS_P_EAGLE_PARAMETERS = 4 * (_ATTENTION + _MLP) + 2880 * 5120 + _SHARED

# P-EAGLE paper, table 9: K = 7 gives 1320 tokens/s at 2 sequences on an H200 with an acceptance length of 4.0 (table 8), that is
# 6.1 ms a step, of which traffic and drafting explain 3.1.
GPT_OSS_FIXED_S = 3.0e-3

FITTED_P_EAGLE_PASS_S = 2.15e-4  # host work of one draft pass (fitted to the blog's 21 ratios, largest error 10 %)
FITTED_P_EAGLE_TOKEN_S = 9.68e-6  # of each verified token, beyond its arithmetic at peak FLOP/s

P_EAGLE_NOTE = """vLLM blog of 2026-03-13, P-EAGLE (K = 7) over EAGLE-3 (K = 3), GPT-OSS-20B on a B200, concurrency 1-64, MT-bench,
HumanEval and SPEED-Bench: all 21 ratios within 10 %. Two fitted constants: host work of a draft pass, and time per verified token.
Acceptance lengths at K = 3 and K = 7 are the blog's; between those K positions decay geometrically, which is not published. Not
reproduced: absolute tokens per second (only ratios are published), and the dip at concurrency 2 on MT-bench (1.29, then 1.35)."""


def _rates(length_3: float, length_7: float) -> tuple[float, ...]:
    """Marginal rates whose sums give two acceptance lengths: geometric up to position 3, geometric from there on."""
    first = _ratio(lambda r: r + r**2 + r**3, length_3 - 1)
    third = first**3
    rest = _ratio(lambda q: third * (q + q**2 + q**3 + q**4), length_7 - length_3)
    return (first, first**2, third, *(third * rest**i for i in range(1, 5)))


def _ratio(total: Callable[[float], float], wanted: float) -> float:
    """The ratio in 0..1 at which an increasing sum reaches `wanted`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < wanted else (low, middle)
    return low


def _gpt_oss_head(machine: Machine, parameters: int, rates: dict[str, tuple[float, ...]], *, parallel: bool) -> Draft:
    return Draft(
        position_rates={"default": rates["mt_bench"], **rates},
        parallel=parallel,
        pass_s=FITTED_P_EAGLE_PASS_S + 2 * parameters / machine.bandwidth_bytes_per_s,
        draft_token_s=2 * parameters / machine.flops,
    )


def gpt_oss_20b(machine: Machine) -> World:
    """GPT-OSS-20B with an EAGLE-3 chain and a P-EAGLE head; categories mt_bench (default), humaneval, speed_bench."""
    token_s = 2 * 3.6e9 / machine.flops
    eagle3 = {"mt_bench": _rates(2.70, 3.27), "humaneval": _rates(2.65, 3.03), "speed_bench": _rates(2.24, 2.59)}
    p_eagle = {"mt_bench": _rates(2.87, 3.70), "humaneval": _rates(3.02, 3.94), "speed_bench": _rates(2.87, 3.38)}
    return World(
        name=f"{machine.name}-GPT-OSS-20B",
        note=P_EAGLE_NOTE,
        target=TargetCost(
            fixed_s=GPT_OSS_FIXED_S,
            weights_s=GPT_OSS_DENSE_BYTES / machine.bandwidth_bytes_per_s,
            expert_weights_s=GPT_OSS_EXPERT_BYTES / machine.bandwidth_bytes_per_s,
            expert_share=4 / 32,
            token_s=token_s + FITTED_P_EAGLE_TOKEN_S,
            prefill_token_s=token_s / PREFILL_UTILISATION,
            context_token_s=GPT_OSS_KV_BYTES / machine.bandwidth_bytes_per_s,
        ),
        drafts={
            "eagle3": _gpt_oss_head(machine, GPT_OSS_EAGLE3_PARAMETERS, eagle3, parallel=False),
            "p_eagle": _gpt_oss_head(machine, GPT_OSS_P_EAGLE_PARAMETERS, p_eagle, parallel=True),
        },
        limits=_limits(machine, GPT_OSS_DENSE_BYTES + GPT_OSS_EXPERT_BYTES + 1.2e9, GPT_OSS_KV_BYTES),
    )


def small() -> World:
    """A small invented engine for tests of the client: 8 ms steps, quick prefill."""
    rates = {"default": (0.7, 0.5, 0.35, 0.25), "code": (0.9, 0.8, 0.7, 0.6), "chat": (0.6, 0.35, 0.2, 0.1)}
    return World(
        name="small",
        note="Invented; resembles no machine.",
        target=TargetCost(fixed_s=0.002, weights_s=0.006, token_s=2e-5, prefill_token_s=5e-5, context_token_s=1e-9),
        drafts={
            "draft_model": Draft(position_rates=rates, dispersion=0.2, pass_s=0.0006, draft_token_s=2e-6),
            "ngram": Draft(
                position_rates={"default": (0.3, 0.25, 0.2, 0.15)}, dispersion=0.5, draft_rate=0.4, step_fixed_s=2e-4
            ),
        },
        limits=Limits(max_num_seqs=64, max_batched_tokens=2048, kv_capacity_tokens=200_000, max_model_len=16_384),
    )


PRESETS: Mapping[str, Callable[[], World]] = {
    "small": small,
    "h100-llama-8b": lambda: llama_8b(H100),
    "h200-llama-8b": lambda: llama_8b(H200),
    "a100-llama-8b": lambda: llama_8b(A100),
    "h100-llama-70b": lambda: llama_70b(H100_8BIT),
    "h200-llama-70b": lambda: llama_70b(H200_8BIT),
    "a100-llama-70b": lambda: llama_70b(A100_8BIT),
    "b200-gpt-oss-20b": lambda: gpt_oss_20b(B200),
}
