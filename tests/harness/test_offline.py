"""Offline acceptance against the drafters themselves, step by step, and against answers worked out by hand."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.matchers import SuffixIndex, propose_ngram
from harness.offline import Acceptance, Recorded, ngram_acceptance, pool, record, suffix_acceptance
from tests.workloads.traces import trace_of

Propose = Callable[[list[int], int], list[int]]

sequences = st.lists(
    st.builds(
        Recorded,
        prompt_ids=st.lists(st.integers(0, 3), min_size=1, max_size=20),
        output_ids=st.lists(st.integers(0, 3), max_size=30),
        category=st.sampled_from(["a", "b", None]),
    ),
    min_size=1,
    max_size=4,
)


def decode(recorded: list[Recorded], k: int, propose: Propose) -> tuple[int, int, int, int]:
    """(steps, drafted steps, draft tokens, tokens after the first), as an engine counts them."""
    steps = drafted_steps = draft_tokens = emitted = 0
    for item in recorded:
        history, rest = [*item.prompt_ids, *item.output_ids[:1]], list(item.output_ids[1:])
        while rest:
            draft = propose(history, min(k, len(rest) - 1))
            agreed = next((i for i, (d, t) in enumerate(zip(draft, rest, strict=False)) if d != t), len(draft))
            steps += 1
            drafted_steps += bool(draft)
            draft_tokens += len(draft)
            emitted += agreed + 1
            history += rest[: agreed + 1]
            del rest[: agreed + 1]
    return steps, drafted_steps, draft_tokens, emitted


def counts(part: Acceptance) -> tuple[int, int, int, int]:
    return part.steps, part.drafted_steps, part.draft_tokens, part.emitted_tokens


@given(sequences)
@settings(max_examples=60, deadline=None)
def test_ngram_counts_equal_those_of_decoding_step_by_step(recorded: list[Recorded]) -> None:
    found = {(p.k, p.min_n, p.max_n): counts(p) for p in pool(ngram_acceptance(recorded, max_k=4, max_n=3))}
    for (k, low, high), numbers in found.items():

        def propose(history: list[int], room: int, low: int | None = low, high: int | None = high) -> list[int]:
            return propose_ngram(history, room, low or 1, high or 1)

        assert numbers == decode(recorded, k, propose)
    if any(len(item.output_ids) > 1 for item in recorded):
        assert len(found) == 4 * 6


@given(sequences)
@settings(max_examples=60, deadline=None)
def test_suffix_counts_equal_those_of_decoding_step_by_step(recorded: list[Recorded]) -> None:
    def propose(history: list[int], room: int) -> list[int]:
        index = SuffixIndex()
        index.extend(history)
        return index.propose(room)

    for part in pool(suffix_acceptance(recorded, max_k=4)):
        assert counts(part) == decode(recorded, part.k, propose)


def test_a_repeated_prompt_is_emitted_in_steps_of_k_plus_one() -> None:
    """Prompt 1..9, output the same: after the first token each n = 1 match drafts right; 8 tokens at K = 3 are two steps of 4."""
    recorded = [Recorded(range(1, 10), range(1, 10))]
    (part,) = [p for p in pool(ngram_acceptance(recorded)) if (p.k, p.min_n, p.max_n) == (3, 1, 1)]
    assert counts(part) == (2, 2, 6, 8)
    assert part.tau == 4.0


def test_text_without_repetition_has_tau_one_and_no_draft() -> None:
    (part,) = [p for p in pool(ngram_acceptance([Recorded([1, 2], [3, 4, 5])])) if (p.k, p.min_n, p.max_n) == (8, 1, 4)]
    assert counts(part) == (2, 0, 0, 2)


def test_steps_are_split_by_category_and_by_context_length_at_the_step() -> None:
    long = Recorded(range(1000, 1000 + 511), [1, 2, 3], "long")  # histories of 512 and 513 tokens
    short = Recorded([7], [1, 2], "short")
    parts = [p for p in ngram_acceptance([long, short]) if (p.k, p.min_n, p.max_n) == (1, 1, 1)]
    assert {(p.category, p.context_from, p.context_to): p.steps for p in parts} == {
        ("long", 512, 2048): 2,
        ("short", 0, 512): 1,
    }
    assert [p.steps for p in pool(parts, by=["category"])] == [2, 1]


def test_an_output_of_one_token_has_no_decode_step() -> None:
    assert ngram_acceptance([Recorded([1, 1], [1])]) == []


def test_an_answer_that_ended_itself_has_the_token_that_ended_it() -> None:
    trace = trace_of(
        prompt=["p"] * 5,
        output_text=["ab"] * 5,
        output_tokens=[3, 2, None, None, None],
        source_status=[None, None, "stop", "length", "stop"],
        sampling=[None] * 4 + ['{"stop": ["c"]}'],
    )
    found = record(trace, lambda _: [1], lambda text: list(map(ord, text)), end_id=0)
    assert [len(item.output_ids) for item in found] == [3, 2, 3, 2, 2]
