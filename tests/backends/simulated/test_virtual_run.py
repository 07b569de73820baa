"""The discrete-event run against answers that can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.simulated.acceptance import Acceptance, expected_steps_per_token
from backends.simulated.scheduler import Scheduler
from backends.simulated.virtual import SimulatedRequest, SimulatedRun, simulate
from backends.simulated.world import Draft, Limits, Noise, TargetCost, World, expected_tau, step_cost, with_limits
from backends.types import ConfigError

# 10 ms a step, 1 ms for each token verified, 0.1 ms for each prompt token.
COST = TargetCost(fixed_s=0.004, weights_s=0.006, token_s=0.001, prefill_token_s=0.0001)
RATES = (0.8, 0.6, 0.3)
WORLD = World(
    name="hand",
    target=COST,
    drafts={"draft_model": Draft(position_rates={"default": RATES, "hard": (0.2, 0.1, 0.0)}, pass_s=0.002)},
    limits=Limits(max_num_seqs=4, max_batched_tokens=100, kv_capacity_tokens=10_000),
)


def requests(*shapes: tuple[float, int, int]) -> list[SimulatedRequest]:
    return [SimulatedRequest(*shape) for shape in shapes]


def test_one_request_takes_its_prefill_and_a_step_for_each_token() -> None:
    run = simulate(WORLD, requests((1.0, 50, 4)))
    times, tokens = run.chunks(0)
    assert run.ttft_s == pytest.approx([0.010 + 50 * 0.0001])
    assert np.diff(times) == pytest.approx([0.011] * 3)
    assert tokens == [1, 1, 1, 1]
    assert run.counters.tau == 1.0
    assert run.counters.engine_steps == 3


def test_context_slows_a_step_as_it_grows() -> None:
    world = replace(WORLD, target=replace(COST, context_token_s=0.001))
    times, _ = simulate(world, requests((0.0, 50, 4))).chunks(0)
    assert np.diff(times) == pytest.approx([0.061, 0.062, 0.063])


def test_request_that_comes_during_a_step_waits_for_its_end() -> None:
    run = simulate(WORLD, requests((0.0, 50, 3), (0.016, 50, 3)))
    # Steps: prefill 0-15 ms, decode 15-26 ms, then decode of one and prefill of the other: 10 + 1 + 5 ms.
    assert run.first_token_s == pytest.approx([0.015, 0.042])
    assert run.last_token_s == pytest.approx([0.042, 0.042 + 2 * 0.011])


def test_a_draft_costs_its_passes_and_verified_tokens() -> None:
    seconds, _ = step_cost(WORLD, "draft_model", 3, batch=2)
    assert seconds == pytest.approx(0.010 + 2 * 4 * 0.001 + 3 * 0.002)
    parallel = replace(WORLD, drafts={"p_eagle": replace(WORLD.drafts["draft_model"], parallel=True)})
    assert step_cost(parallel, "p_eagle", 3, batch=2)[0] == pytest.approx(0.010 + 2 * 4 * 0.001 + 0.002)


def test_batches_are_padded_to_captured_graphs() -> None:
    world = with_limits(replace(WORLD, target=replace(COST, eager_s=0.005)), graph_batches=(1, 2, 4))
    assert step_cost(world, "off", 0, batch=3) == step_cost(world, "off", 0, batch=4)
    assert step_cost(world, "off", 0, batch=5)[0] == pytest.approx(0.010 + 0.005 + 0.005)


def test_experts_are_read_as_far_as_tokens_touch_them() -> None:
    world = replace(WORLD, target=replace(COST, token_s=0.0, expert_weights_s=0.032, expert_share=0.25))
    assert step_cost(world, "off", 0, batch=2)[0] == pytest.approx(0.010 + 0.032 * (1 - 0.75**2))


@pytest.mark.parametrize("dispersion", [0.0, 0.5, 1.0])
def test_first_steps_accept_at_the_marginal_rates_whatever_the_dispersion(dispersion: float) -> None:
    draft = replace(WORLD.drafts["draft_model"], dispersion=dispersion)
    acceptance = Acceptance(draft, 3, seed=1)
    first = [acceptance.steps(40, None).accepted for _ in range(20_000)]
    rates = [np.mean([steps is not None and steps[0] >= i for steps in first]) for i in (1, 2, 3)]
    assert rates == pytest.approx(RATES, abs=0.012)  # 3.5 standard errors


def test_dispersion_makes_requests_differ() -> None:
    spread = {}
    for dispersion in (0.0, 0.5):
        acceptance = Acceptance(replace(WORLD.drafts["draft_model"], dispersion=dispersion), 3, seed=1)
        spread[dispersion] = np.std([acceptance.steps(200, None).count for _ in range(300)])
    assert spread[0.5] > 3 * spread[0.0]


def test_tau_is_one_plus_the_position_rates_in_every_category() -> None:
    assert expected_tau(WORLD.drafts["draft_model"], 2) == pytest.approx(2.4)
    for category, tau in ((None, 2.7), ("hard", 1.3)):
        work = [SimulatedRequest(0.0, 10, 400, category)] * 100
        run = simulate(WORLD, work, variant="draft_model", k=3, concurrency=4)
        counters = run.counters
        assert counters.tau == pytest.approx(tau, rel=0.01)
        assert counters.tau_drafted == pytest.approx(tau, rel=0.01)
        assert counters.draft_tokens == 3 * counters.decode_steps


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_stretch_makes_small_k_better_than_the_rates_of_the_largest_say(k: int) -> None:
    draft = replace(WORLD.drafts["draft_model"], stretch=0.1)
    plain = 1 + sum(RATES[:k])
    truth = expected_tau(draft, k)
    assert math.log(truth / plain) == pytest.approx(0.1 * math.log(1 + sum(RATES)) * (1 - k / 3))
    work = [SimulatedRequest(0.0, 10, 400)] * 100
    counters = simulate(replace(WORLD, drafts={"draft_model": draft}), work, variant="draft_model", k=k, concurrency=4).counters
    assert counters.tau == pytest.approx(truth, rel=0.02)
    assert expected_steps_per_token(draft.rates(k), 0.0) == pytest.approx(1 / truth)


def test_steps_without_a_draft_count_for_tau_and_not_for_tau_drafted() -> None:
    lookup = Draft(position_rates={"default": (0.2, 0.2)}, draft_rate=0.25)
    world = replace(WORLD, drafts={"ngram": lookup})
    counters = simulate(world, [SimulatedRequest(0.0, 10, 400)] * 100, variant="ngram", k=2, concurrency=4).counters
    assert counters.tau == pytest.approx(1.4, rel=0.02)
    assert counters.tau_drafted == pytest.approx(1 + 0.4 / 0.25, rel=0.02)


def test_without_chunked_prefill_decoding_waits_for_whole_prompts() -> None:
    long_prompt = requests((0.0, 50, 20), (0.016, 1000, 1))
    chunked = simulate(WORLD, long_prompt)
    whole = simulate(with_limits(WORLD, chunked_prefill=False), long_prompt)
    # Budget 100 tokens: chunks of 99 beside one decoding sequence, so no step is longer than 10 + 1 + 9.9 ms.
    assert max(np.diff(chunked.chunks(0)[0])) == pytest.approx(0.0209)
    assert max(np.diff(whole.chunks(0)[0])) == pytest.approx(0.010 + 0.1 + 0.011)
    assert whole.first_token_s[1] < chunked.first_token_s[1]


def test_shared_prefix_is_not_computed_again() -> None:
    prefix = tuple(range(5))  # 80 tokens
    work = [SimulatedRequest(float(i), 96, 1, prefix=prefix) for i in range(2)]
    run = simulate(WORLD, work)
    assert run.cached_tokens.tolist() == [0, 80]
    assert run.ttft_s == pytest.approx([0.0196, 0.0116])
    assert (run.counters.prefix_hit_tokens, run.counters.prefix_query_tokens) == (80, 192)
    assert simulate(with_limits(WORLD, prefix_caching=False), work).cached_tokens.tolist() == [0, 0]


def test_whole_prompt_in_the_cache_still_computes_one_token() -> None:
    work = [SimulatedRequest(float(i), 32, 1, prefix=(1, 2)) for i in range(2)]
    assert simulate(WORLD, work).cached_tokens.tolist() == [0, 31]


def test_full_cache_preempts_the_youngest_and_all_still_finish() -> None:
    world = with_limits(WORLD, kv_capacity_tokens=300)
    run = simulate(world, requests((0.0, 90, 100), (0.0, 90, 100), (0.0, 90, 100)))
    assert run.counters.preemptions is not None
    assert run.counters.preemptions >= 1
    assert run.preemptions[0] == 0
    assert [sum(run.chunks(i)[1]) for i in range(3)] == [100, 100, 100]
    assert run.last_token_s[0] < run.last_token_s[2]


def test_closed_loop_keeps_its_concurrency() -> None:
    run = simulate(WORLD, [SimulatedRequest(0.0, 10, 50)] * 60, concurrency=3)
    assert run.mean_batch == pytest.approx(3, abs=0.15)
    assert sorted(run.sent_s)[:3] == [0.0, 0.0, 0.0]
    assert set(run.sent_s[3:]) <= set(run.last_token_s)


def test_noise_has_mean_one_and_drift_slows_down() -> None:
    work = [SimulatedRequest(0.0, 10, 5_000)]
    quiet = simulate(WORLD, work).e2e_s[0]
    noisy = simulate(replace(WORLD, noise=Noise(step_sigma=0.3)), work).e2e_s[0]
    drifting = simulate(replace(WORLD, noise=Noise(drift_per_hour=36.0)), work).e2e_s[0]  # +1 % a second
    runs = [simulate(replace(WORLD, noise=Noise(run_sigma=0.05)), work[:1], seed=i).e2e_s[0] / quiet for i in range(100)]
    assert noisy == pytest.approx(quiet, rel=0.02)
    assert drifting == pytest.approx((np.exp(0.01 * quiet) - 1) / 0.01, rel=0.01)  # dt/dn = a (1 + d t)
    assert np.std(runs) == pytest.approx(0.05, rel=0.25)
    assert np.mean(runs) == pytest.approx(1.0, abs=0.02)


def outcome(run: SimulatedRun) -> list[list[float]]:
    return [run.first_token_s.tolist(), run.last_token_s.tolist(), run.decode_steps.tolist()]


def test_equal_seeds_give_equal_runs() -> None:
    world = replace(WORLD, noise=Noise(step_sigma=0.1, run_sigma=0.1))
    work = requests(*[(0.01 * i, 20, 30) for i in range(50)])
    first, again, other = (simulate(world, work, variant="draft_model", k=2, seed=seed) for seed in (5, 5, 6))
    assert outcome(first) == outcome(again)
    assert outcome(first) != outcome(other)


@pytest.mark.parametrize(
    ("work", "variant", "k", "message"),
    [
        ([(0.0, 9_990, 20)], "off", 0, "KV cache of 10000"),
        ([(0.0, 10, 0)], "off", 0, "at least one input and one output token"),
        ([(1.0, 10, 1), (0.0, 10, 1)], "off", 0, "before the one in front of it"),
        ([(0.0, 10, 1)], "eagle3", 2, "no variant 'eagle3': it has off, draft_model"),
        ([(0.0, 10, 1)], "draft_model", 4, "for K = 1..3, not 4"),
    ],
)
def test_what_cannot_run_is_said(work: list[tuple[float, int, int]], variant: str, k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(WORLD, requests(*work), variant=variant, k=k)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=25),
    st.integers(0, 3),
    st.integers(1, 6),
    st.sampled_from([210, 400, 10_000]),
    st.booleans(),
    st.booleans(),
)
def test_every_request_gets_its_tokens_in_order(
    shapes: list[tuple[float, int, int]], k: int, seqs: int, kv_tokens: int, chunked: bool, closed: bool
) -> None:
    world = with_limits(WORLD, max_num_seqs=seqs, kv_capacity_tokens=kv_tokens, chunked_prefill=chunked)
    work = sorted(requests(*shapes), key=lambda request: request.arrival_s)
    run = simulate(world, work, variant="draft_model" if k else "off", k=k, concurrency=3 if closed else None)
    assert (np.diff(run.step_end_s) > 0).all()
    for index, request in enumerate(work):
        times, tokens = run.chunks(index)
        assert run.sent_s[index] < times[0] <= times[-1] == run.last_token_s[index]
        assert (np.diff(times) > 0).all()
        assert sum(tokens) == request.output_tokens
        assert all(1 <= count <= k + 1 for count in tokens)
    batches = np.zeros(len(run.step_end_s) + 1, dtype=int)
    for sequence in run.sequences:
        for begin, end in sequence.segments:
            batches[begin] += 1
            batches[end] -= 1
    assert np.cumsum(batches).max(initial=0) <= seqs
    assert run.decode_steps.sum() == np.cumsum(batches)[:-1].sum()


@pytest.mark.parametrize("concurrency", [None, 2])
def test_long_runs_of_steps_end_as_they_do_one_by_one(monkeypatch: pytest.MonkeyPatch, concurrency: int | None) -> None:
    work = requests((0.0, 50, 400), (1.2345, 50, 300), (1.3, 50, 200))
    arrays = simulate(WORLD, work, concurrency=concurrency)
    monkeypatch.setattr("backends.simulated.scheduler.LONG_RUN", 10**9)
    assert arrays.step_end_s.tolist() == simulate(WORLD, work, concurrency=concurrency).step_end_s.tolist()


def test_cancelled_sequence_leaves_nothing_behind() -> None:
    scheduler = Scheduler(WORLD, "off", 0)
    run = simulate(WORLD, requests((0.0, 30, 9), (0.0, 30, 9), (0.0, 30, 9)))
    first, second, third = run.sequences
    for sequence in (first, second, third):
        sequence.__init__(  # type: ignore[misc]  # a fresh sequence of the same shape
            sequence.index, 0.0, input_tokens=30, output_tokens=9, steps=sequence.steps
        )
        scheduler.submit(sequence)
    scheduler.cancel(third)  # waiting
    scheduler.step()
    scheduler.step(max_steps=2)
    scheduler.cancel(second)  # running
    while scheduler.busy:
        scheduler.step()
    assert scheduler.kv_tokens == 0.0
    assert first.last_token_s > 0
    assert np.isnan(third.last_token_s)
