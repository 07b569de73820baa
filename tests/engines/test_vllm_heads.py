"""The EAGLE-3 and P-EAGLE heads that come with the demo model, as vLLM and as the reference engine run them: same text, same tau.

Both get the same token ids and run in float32, so the text is the target's own on either side, and a draft may differ only where
two of the head's logits are within rounding. The two taus differ by how they count a request's last step (`emitted`).

vLLM reads the heads in their published layout with code of its own. Where one of the two reads a head wrongly (auxiliary layers,
draft vocabulary, norms, the mask token's place), the text is still right: it shows here alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_server import ask_all, config, counters, running

from backends.reference.demo_heads import demo_head_dir
from backends.reference.demo_model import demo_model_dir
from backends.reference.engine import Engine
from backends.reference.options import EngineOptions
from backends.reference.tokenizer import Tokenizer
from backends.reference.training.distill import read_prompts
from backends.serving import GenerationRequest
from workloads.prompts import POOLS

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]

POOL_FILES = Path(__file__).parents[2] / "workloads" / "pools"
EACH, LONGEST = 10, 200
K, TOKENS, AT_ONCE = 4, 64, 8
TOLERANCE = 0.03


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Chat prompts of all pools as token ids, `EACH` from each; long ones would only cost time."""
    tokenizer = Tokenizer(demo_model_dir())
    chosen = []
    for pool in POOLS:
        encoded = [tokenizer.encode_chat(messages) for messages, _ in read_prompts(POOL_FILES / f"{pool}.jsonl")]
        chosen += [ids for ids in encoded if len(ids) <= LONGEST][:EACH]
    return chosen


@pytest.mark.parametrize("variant", ["eagle3", "p_eagle"])
def test_a_shipped_head_has_the_same_text_steps_and_tau_in_vllm(variant: str, prompts: list[list[int]], tmp_path: Path) -> None:
    draft = str(demo_head_dir(variant))
    texts, accepted, tau = reference(variant, draft, prompts)
    with running(config(demo_model_dir(), variant, K, draft=draft), tmp_path) as endpoint:
        before = counters(endpoint)
        answers = ask_all(endpoint, prompts, TOKENS, concurrency=AT_ONCE)
        grown = counters(endpoint) - before
    same = sum(emitted(answer.per_step_accepted) == steps for answer, steps in zip(answers, accepted, strict=True))
    found = {"variant": variant, "reference": tau, "vllm": grown.tau_drafted, "requests with the same steps": same}
    print(json.dumps(found))
    assert [answer.token_ids for answer in answers] == texts
    assert grown.tau_drafted == pytest.approx(tau, rel=TOLERANCE), found
    assert same >= 0.95 * len(prompts), found  # all of them on the CPU it was written on


def emitted(accepted: tuple[int, ...]) -> tuple[int, ...]:
    """Without what vLLM's last step accepts beyond the end of a request of `TOKENS` tokens, which the reference engine never drafts."""
    *before, last = accepted
    left = TOKENS - 1 - sum(count + 1 for count in before)  # the first token is the prompt's
    return (*before, min(last, left - 1))


def reference(variant: str, draft: str, prompts: list[list[int]]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], float]:
    """Token ids of each answer, draft tokens accepted in each of its steps, and tau over the steps with a draft."""
    options = EngineOptions(
        demo_model_dir(), variant, K, draft=draft, dtype="float32", max_num_seqs=AT_ONCE, max_model_len=LONGEST + TOKENS
    )
    engine = Engine(options)
    sequences = [engine.add(GenerationRequest(tuple(ids), TOKENS, ignore_eos=True)) for ids in prompts]
    sizes: dict[int, list[int]] = {sequence.id: [] for sequence in sequences}  # tokens of each step
    while engine.has_work:
        for output in engine.step():
            sizes[output.sequence.id].append(len(output.token_ids))
    texts = [tuple(sequence.tokens[sequence.prompt_tokens :]) for sequence in sequences]
    accepted = [tuple(size - 1 for size in sizes[sequence.id][1:]) for sequence in sequences]
    return texts, accepted, 1 + engine.counters.accepted_tokens / engine.counters.drafted_steps
