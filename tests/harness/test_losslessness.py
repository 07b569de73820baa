"""The losslessness audit: each world says which verdict is right."""

import numpy as np
import pytest

from harness.answers import Output
from harness.losslessness import Answers, Match, audit, compare, degenerate, entry, newly_degenerate, sampled_tests

SURE = 3.0
TIE = 0.05


def answers(rows: dict[int, tuple[int, ...]], gap: float | None = SURE) -> Answers:
    return {i: Output("SECRET", ids, "length", (gap,) * len(ids) if gap is not None else ()) for i, ids in rows.items()}


def varied(n: int, changed: dict[int, int], gap: float | None = SURE, length: int = 24) -> Answers:
    """n answers of `length` tokens; `changed` maps a request to the first token that is another."""
    rows = {i: tuple(1000 * i + t + (7 if t >= changed.get(i, length) else 0) for t in range(length)) for i in range(n)}
    return answers(rows, gap)


def test_equal_answers_are_identical_and_the_interval_says_how_sure() -> None:
    off = varied(16, {})
    match = compare(off, varied(16, {}))
    assert match.share == 1.0
    assert match.ci95 == pytest.approx((0.806, 1.0), abs=1e-3)  # Wilson, 16 of 16
    assert audit(match, compare(off, off)).verdict == "identical"


def test_differences_that_off_has_with_itself_are_within_the_control() -> None:
    off = varied(16, {}, gap=None)
    on, control = compare(off, varied(16, {2: 9, 5: 3})), compare(off, varied(16, {5: 3, 7: 20}))
    assert audit(on, control).verdict == "within_control"
    assert "2 of 16 answers differ from off's, 2 of 16 in the control" in audit(on, control).reason


def test_broken_verification_differs_even_where_no_log_probabilities_are_told() -> None:
    off = varied(16, {}, gap=None)
    broken = compare(off, varied(16, dict.fromkeys(range(12), 1)))
    assert audit(broken, compare(off, off)).verdict == "differs"


def test_one_answer_that_parts_where_off_was_sure_is_enough() -> None:
    off = varied(16, {}, gap=SURE)
    on = compare(off, varied(16, {3: 5}))
    assert [(d.index, d.at, d.gap) for d in on.divergences] == [(3, 5, SURE)]
    assert audit(on, compare(off, off)).verdict == "differs"


def test_near_ties_do_not_count_however_many() -> None:
    off = varied(16, {}, gap=TIE)
    on = compare(off, varied(16, {i: i + 1 for i in range(10)}))
    assert all(d.near_tie for d in on.divergences)
    assert audit(on, compare(off, off)).verdict == "within_control"


def test_an_answer_that_is_cut_short_is_a_divergence_at_its_end() -> None:
    off = answers({0: (1, 2, 3, 4)})
    (found,) = compare(off, answers({0: (1, 2)})).divergences
    assert found.at == 2


def test_text_is_compared_where_there_are_no_token_ids() -> None:
    off, on = {0: Output("the cat sat", (), "stop")}, {0: Output("the cot sat", (), "stop")}
    assert compare(off, on).divergences[0].at == 5
    with pytest.raises(ValueError, match="no request"):
        compare(off, {1: Output("x", (), "stop")})


def test_degenerate_answers_are_named_and_only_held_against_speculation_where_off_is_sound() -> None:
    sound = Output("fine words", tuple(range(32)), "length")
    looping = Output("la la", (1, 2, 3, 4) * 8, "length")
    broken = Output("\ufffd\ufffda\x00", (5, 6), "length")
    empty = Output("", (), "stop")
    on = {0: sound, 1: looping, 2: broken, 3: empty}
    assert degenerate(on) == {"empty": [3], "looping": [1], "not text": [2]}
    assert newly_degenerate(on, {0: sound, 1: looping, 2: sound, 3: empty}) == {"empty": [], "looping": [], "not text": [2]}
    found = audit(Match(4, ()), Match(4, ()), newly_degenerate(on, dict.fromkeys(range(4), sound)))
    assert found.verdict == "differs"
    assert "1 empty, 1 looping, 1 not text" in found.reason


def drawn(rng: np.random.Generator, weights: list[float], n: int = 40, length: int = 30) -> Answers:
    return {i: Output("t", tuple(int(t) for t in rng.choice(len(weights), size=length, p=weights)), "length") for i in range(n)}


FLAT, SHARP = [0.25] * 4, [0.4, 0.3, 0.2, 0.1]


def test_sampled_answers_of_another_distribution_are_caught_and_of_the_same_are_not() -> None:
    rng = np.random.default_rng(1)
    same = sampled_tests(drawn(rng, FLAT), drawn(rng, FLAT))
    other = sampled_tests(drawn(rng, SHARP), drawn(rng, FLAT))
    assert same is not None
    assert other is not None
    assert same["token_frequency_p"] > 0.001
    assert other["token_frequency_p"] < 0.001


def test_shorter_sampled_answers_are_caught_by_their_length() -> None:
    rng = np.random.default_rng(2)
    found = sampled_tests(drawn(rng, FLAT, length=24), drawn(rng, FLAT, length=30))
    assert found is not None
    assert found["length_p"] < 0.001
    assert (found["mean_tokens_on"], found["mean_tokens_off"]) == (24.0, 30.0)
    assert sampled_tests({}, {}) is None


def test_the_tests_on_samples_hold_their_level() -> None:
    p_values = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        found = sampled_tests(drawn(rng, SHARP, n=20), drawn(rng, SHARP, n=20), seed=seed)
        assert found is not None
        p_values.append(found["token_frequency_p"])
    assert 0 <= sum(p < 0.05 for p in p_values) <= 12  # 5 expected; more than 12 has probability 0.0014
    assert sum(p < 0.5 for p in p_values) > 30  # and it is no test that never fires


def test_an_entry_holds_no_text_and_lists_where_answers_part() -> None:
    off = varied(16, {}, gap=TIE)
    on = varied(16, {2: 9, 5: 3, 6: 12})
    found = entry(on, off, varied(16, {}), shapes=(4, 1))
    assert found["verdict"] == "within_control"
    assert found["divergence_tokens"] == [3, 9, 12]
    assert found["first_divergence_token_p50"] == 9
    assert found["near_tie_divergences"] == 3
    assert found["control"] == "off at 1 at a time against off at 4 at a time"
    assert "SECRET" not in str(found)


def test_an_entry_differs_where_the_samples_do() -> None:
    rng = np.random.default_rng(3)
    off = varied(8, {})
    found = entry(off, off, off, shapes=(4, 1), sampled=(drawn(rng, SHARP), drawn(rng, FLAT)))
    assert found["verdict"] == "differs"
    assert found["sampled"]["requests"] == 40
