"""Prompts for traces of lengths: of exactly the recorded length, shared where blocks were shared, equal in every process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workloads.traces import trace_of
from workloads.prompts import POOLS, attach_prompts
from workloads.types import Trace, WorkloadError

CHECKOUT = Path(__file__).parents[2]


def encode(text: str) -> list[int]:
    """A tokenizer of words and line breaks: tokens of pieces add up, as those of real ones nearly do."""
    return [len(token) for token in re.findall(r"\n|[^\s]+", text)]


def contents(trace: Trace) -> list[str]:
    return [messages[0]["content"] for messages in trace.values("messages")]


LENGTHS = [1, 40, 500, 3000, 12]


@pytest.mark.parametrize("pool", POOLS)
def test_prompts_have_the_recorded_lengths_less_the_template_s(pool: str) -> None:
    trace = trace_of(arrival_s=[float(i) for i in range(5)], input_tokens=LENGTHS, output_tokens=[5] * 5)
    paired = attach_prompts(trace, pool, encode, seed=0, template_tokens=7)
    sizes = [len(encode(text)) for text in contents(paired)]
    assert sizes[1:4] == [33, 493, 2993]
    assert sizes[0] == 1  # no prompt is empty
    assert sizes[4] <= 5
    assert (paired.grade, paired.has_text, paired.arrivals_s.tolist()) == ("B", True, trace.arrivals_s.tolist())
    assert f"the pool '{pool}'" in paired.grade_reason
    assert None not in paired.values("category")


def test_shared_blocks_become_shared_text_of_their_length() -> None:
    trace = trace_of(input_tokens=[400, 400, 400], prefix_blocks=[[7, 8, 9], [7, 8, 10], [11, 8, 9]], block_size=[64] * 3)
    first, second, third = (encode_text(text) for text in contents(attach_prompts(trace, "chat", encode, seed=0)))
    assert first[:128] == second[:128]
    assert first[128:192] != second[128:192]
    assert first[64:128] == third[64:128]  # the same block id, whatever stands before it
    assert first[:64] != third[:64]


def encode_text(text: str) -> list[str]:
    return re.findall(r"\n|[^\s]+", text)


def test_without_a_recorded_length_the_question_stands_alone() -> None:
    (text,) = contents(attach_prompts(trace_of(output_tokens=[5]), "reasoning", encode, seed=0))
    assert 5 < len(encode(text)) < 1000


def test_random_words_are_graded_c() -> None:
    paired = attach_prompts(trace_of(input_tokens=[50, 50]), "random", encode, seed=0)
    assert (paired.grade, paired.grade_reason) == ("C", "text made up of random words")
    assert [len(encode(text)) for text in contents(paired)] == [50, 50]
    assert contents(paired)[0] != contents(paired)[1]


def test_any_trace_with_text_is_a_pool_and_others_are_refused(tmp_path: Path) -> None:
    pool = tmp_path / "pool.jsonl"
    pool.write_text('{"prompt": "one two three", "category": "own"}\n')
    paired = attach_prompts(trace_of(input_tokens=[3]), str(pool), encode, seed=0)
    assert (contents(paired), paired.values("category")) == (["one two three"], ["own"])
    pool.write_text('{"input_tokens": 3}\n')
    with pytest.raises(WorkloadError, match="holds no prompt with text"):
        attach_prompts(trace_of(input_tokens=[3]), str(pool), encode, seed=0)
    with pytest.raises(WorkloadError, match="no such pool; choose from chat"):
        attach_prompts(trace_of(input_tokens=[3]), "chats", encode, seed=0)


def test_other_processes_make_the_same_prompts() -> None:
    script = (
        "import hashlib; from tests.workloads.test_prompts import *; "
        "t = trace_of(input_tokens=[300] * 4, prefix_blocks=[[1, 2]] * 4, block_size=[64] * 4); "
        "print(hashlib.sha256(str(contents(attach_prompts(t, 'code', encode, seed=5))).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_the_seed_chooses_the_questions() -> None:
    trace = trace_of(input_tokens=[400] * 8)
    runs = [contents(attach_prompts(trace, "chat", encode, seed=seed)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
