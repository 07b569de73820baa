"""Verdicts on blocks with known content: pass, regression with its cause, inconclusive with the count needed."""

from dataclasses import replace

import pytest

from harness.gate.compare import changes, divergence, gating
from harness.gate.decide import decide
from harness.gate.session import GateRun, run_session
from harness.gate.types import Block, Progress, Rules
from tests.harness.gate.blocks import ListSource, blocks, turn

RULES = Rules()


def gate(found: list[Block], *, budget_s: float = 160.0, rules: Rules = RULES) -> GateRun:
    return run_session(ListSource(found), rules, budget_s)


def status(run: GateRun, question: str) -> str:
    return next(answer.status for answer in run.verdict.answers if answer.question == question)


def text(run: GateRun, question: str) -> str:
    return next(answer.text for answer in run.verdict.answers if answer.question == question)


def test_equal_sides_pass_before_the_budget_ends() -> None:
    run = gate(blocks(16, noise=0.01))
    assert run.verdict.outcome == "pass"
    assert run.verdict.exit_code == 0
    assert run.stopped_by == "decided"
    assert run.elapsed_s < 160


def test_fallen_tau_is_named_with_its_value_and_equal_step_time() -> None:
    run = gate(blocks(16, noise=0.01, tau=2.6 / 3.1))
    assert run.verdict.outcome == "regression"
    assert run.verdict.exit_code == 3
    assert run.verdict.causes == ("acceptance",)
    assert text(run, "acceptance").startswith("tau fell 3.10 → 2.60 (-16.1 %)")
    assert text(run, "step_cost").startswith("step time equal")


def test_slower_steps_are_named_and_tau_stays_equal() -> None:
    run = gate(blocks(16, slow=1.09, noise=0.001))
    assert run.verdict.outcome == "regression"
    assert run.verdict.causes == ("step_cost",)
    assert text(run, "step_cost") == "step time rose 40.0 ms → 43.6 ms (+9.0 %) at batch 8"
    assert status(run, "acceptance") == "equal"


def test_a_later_first_token_alone_is_prefill_or_queueing() -> None:
    run = gate(blocks(16, noise=0.01, ttft_p50=1.5, e2e_p50=1.08))
    assert run.verdict.outcome == "regression"
    assert run.verdict.causes == ("prefill_or_queue",)


def test_noise_that_the_budget_cannot_overcome_is_inconclusive_and_says_how_many_pairs_would_decide() -> None:
    run = gate(blocks(16, noise=0.11, seed=1))
    assert run.verdict.outcome == "inconclusive"
    assert run.verdict.exit_code == 4
    # One block's change has noise 11 %: ((2.33 + 1.28) × 0.11 ÷ 0.0296)² is about 180 blocks, 330 pairs more.
    assert run.verdict.pairs_needed == pytest.approx(330, rel=0.8)
    assert "more pairs would decide" in run.verdict.reasons[1]


def test_a_change_inside_the_band_passes() -> None:
    assert gate(blocks(16, slow=1.01, noise=0.003)).verdict.outcome == "pass"


def test_an_improvement_passes_and_is_shown() -> None:
    run = gate(blocks(16, slow=0.9, noise=0.01))
    assert run.verdict.outcome == "pass"
    assert status(run, "step_cost") == "improved"


def test_red_needs_fresh_blocks_that_show_it_again() -> None:
    bad, good = blocks(4, slow=1.1), blocks(12, noise=0.01)
    run = gate([*bad, *good])
    assert run.verdict.outcome == "inconclusive"
    assert "fresh pairs did not confirm it" in run.verdict.reasons[0]


def test_a_suspicion_without_time_to_confirm_is_inconclusive() -> None:
    run = gate(blocks(6, slow=1.1, noise=0.001), budget_s=60)
    assert run.verdict.outcome == "inconclusive"
    assert "budget ended before fresh pairs confirmed it" in run.verdict.reasons[0]


def test_the_order_of_a_block_cancels_a_linear_drift() -> None:
    drifting = Block((turn(1.0), turn(1.03)), (turn(1.01), turn(1.02)))
    assert changes("e2e_p50@8", [drifting])[0] == pytest.approx(0.0, abs=1e-4)


def test_a_slower_first_server_is_neither_a_change_nor_noise() -> None:
    slow, fast = turn(1.03), turn(1.0)
    found = [
        Block((slow, slow), (fast, fast)) if i % 2 == 0 else Block((fast, fast), (slow, slow), first="candidate")
        for i in range(9)
    ]
    run = gate(found)
    assert run.verdict.outcome == "pass"
    step = next(c for c in run.verdict.comparisons if c.key == "step@8")
    assert step.change == pytest.approx(0.0, abs=1e-9)
    assert step.noise == pytest.approx(0.0, abs=1e-9)


def with_failures(block: Block, failed: int) -> Block:
    first, second = block.candidate
    return replace(block, candidate=(replace(first, failed=failed, failures={"http_500": failed}), second))


def test_failed_requests_in_two_blocks_are_red_at_once() -> None:
    found = blocks(16, noise=0.01)
    run = gate([with_failures(found[0], 1), found[1], with_failures(found[2], 2), *found[3:]])
    assert run.verdict.outcome == "regression"
    assert run.verdict.causes == ("failures",)
    assert "3 of" in text(run, "failures")
    assert "http_500 3" in text(run, "failures")


def test_one_failed_request_that_does_not_repeat_forbids_a_pass() -> None:
    found = blocks(16, noise=0.01)
    run = gate([with_failures(found[0], 1), *found[1:]])
    assert run.verdict.outcome == "inconclusive"
    assert "did not happen in a second block" in run.verdict.reasons[0]


def with_outputs(found: list[Block], *, own: bool, new: bool) -> list[Block]:
    """Two requests a block; the baseline differs from itself in the first if `own`, the candidate in both if `new`."""
    out = []
    for i, block in enumerate(found):
        same = {2 * i: "a", 2 * i + 1: "b"}
        (a1, a2), (b1, b2) = block.baseline, block.candidate
        again = {**same, 2 * i: "x"} if own else same
        other = dict.fromkeys(same, "z") if new else same
        pair = (replace(a1, outputs=same), replace(a2, outputs=again))
        out.append(Block(pair, (replace(b1, outputs=other), replace(b2, outputs=other))))
    return out


def test_new_divergence_is_red() -> None:
    run = gate(with_outputs(blocks(16, noise=0.01), own=False, new=True))
    assert run.verdict.outcome == "regression"
    assert run.verdict.causes == ("losslessness",)


def test_divergence_that_the_baseline_has_too_is_none_of_the_candidate_s() -> None:
    found = with_outputs(blocks(16, noise=0.01), own=True, new=False)
    assert gate(found).verdict.outcome == "pass"
    assert divergence(found).own == 16


def test_where_answers_may_differ_divergence_is_not_judged() -> None:
    found = with_outputs(blocks(16, noise=0.01), own=False, new=True)
    run = gate(found, rules=Rules(lossless=False))
    assert run.verdict.outcome == "pass"
    assert status(run, "losslessness") == "not_measured"


def test_each_request_counts_once_however_often_it_was_sent() -> None:
    found = with_outputs(blocks(1), own=False, new=True) * 5
    assert divergence(found).requests == 2


def test_tails_gate_only_with_enough_requests() -> None:
    few = [Block((turn(e2e_p50=1), turn()), (turn(), turn()))] * 4
    assert not gating("e2e_p95@8", few)
    many = [Block(b.baseline, (replace(b.candidate[0], requests=30), replace(b.candidate[1], requests=30))) for b in few]
    assert gating("e2e_p95@8", many)  # 4 × 60 = 240 requests


def test_a_metric_that_one_turn_lacks_is_not_compared() -> None:
    found = blocks(5)
    values = {key: value for key, value in found[2].candidate[1].values.items() if key != "tau@8"}
    broken = replace(found[2], candidate=(found[2].candidate[0], replace(found[2].candidate[1], values=values)))
    step = decide([*found[:2], broken, *found[3:]], Progress(), 0.5, RULES)
    assert "tau@8" not in {c.key for c in step.verdict.comparisons}
    assert next(a.status for a in step.verdict.answers if a.question == "acceptance") == "not_measured"


def test_nothing_is_decided_before_the_smallest_number_of_blocks() -> None:
    assert not decide(blocks(3), Progress(), 0.9, RULES).decided


def test_no_block_is_begun_that_would_not_fit_into_the_budget() -> None:
    run = gate(blocks(16, noise=0.11), budget_s=95)
    assert run.elapsed_s == 90
    assert run.stopped_by == "budget"


def test_a_greater_k_is_judged_by_tau_and_not_by_where_its_steps_begin() -> None:
    """Position 1 is accepted less often, because steps reach further; only the candidate has a position 2."""
    found = [
        Block(block.baseline, tuple(replace(turn, values={**turn.values, "position_2@8": 0.6}) for turn in block.candidate))
        for block in blocks(8, position_1=0.9, tau=1.2)
    ]
    assert decide(found, Progress(fraction=0.35), 0.5, Rules()).verdict.outcome == "pass"
    equally_far = blocks(8, position_1=0.9)
    assert decide(equally_far, Progress(fraction=0.35), 0.5, Rules()).progress.suspects
