from dataclasses import replace

import pytest

from harness.funnel.step_cost import StepCost, fit
from tests.harness.funnel.loads import OFF, WORLD, observe, on

BATCHES = (1, 4, 16, 48)


def fitted() -> StepCost:
    probes = [observe(on(variant, k), batch) for variant in ("eagle3", "mtp") for k in (6, 2) for batch in (1, 32)]
    return fit([*(observe(OFF, batch) for batch in BATCHES), *probes])


def test_steps_that_were_not_measured_are_predicted_within_four_percent() -> None:
    cost = fitted()
    context = observe(OFF, 1).context_tokens
    for variant in ("eagle3", "mtp"):
        for k in (1, 3, 4, 5):
            for batch in (1, 8, 32):
                draft = WORLD.drafts[variant]
                target = WORLD.target
                true = target.fixed_s + target.weights_s + batch * ((1 + k) * target.token_s + context * target.context_token_s)
                true += draft.cost_s(batch, k)
                assert cost.step_s(on(variant, k), batch, context) == pytest.approx(true, rel=0.04)


def test_the_stated_error_is_small_where_the_model_holds_and_grows_where_it_does_not() -> None:
    stepped = replace(WORLD, limits=replace(WORLD.limits, graph_batches=(1, 32, 64)))  # 4 and 16 cost as much as 32
    loads = [observe(OFF, batch, stepped) for batch in (1, 4, 16, 32, 48)]
    assert fitted().error < 0.02
    assert fit(loads).error > 0.02


def test_the_crossover_is_where_arithmetic_takes_as_long_as_reading_the_weights() -> None:
    cost = StepCost(fixed_s=0.01, token_s=1e-4, context_token_s=0, prefill_token_s=0, experts_s=0, expert_share=1)
    assert cost.crossover_batch(0) == pytest.approx(100)
    assert cost.crossover_batch(4) == pytest.approx(20)
    assert cost.memory_share(100, 0, 500) == pytest.approx(0.5)
    assert StepCost(0.01, 0, 0, 0, 0, 1).crossover_batch(0) is None


def test_what_one_k_cannot_tell_apart_is_said_to_be_in_doubt() -> None:
    offs = [observe(OFF, batch) for batch in BATCHES]
    one = fit([*offs, observe(on("eagle3", 6), 1), observe(on("eagle3", 6), 32)])
    assert one.split_doubt(on("eagle3", 6), 1, 500) == 0
    assert one.split_doubt(on("eagle3", 1), 1, 500) > 0.1  # 2.9 ms of draft beside 10 ms: fixed or six passes?
    assert fitted().split_doubt(on("eagle3", 1), 1, 500) == 0
    (draft,) = one.drafts.values()
    assert 0.5 < draft.fixed_s / draft.pass_s < 2  # about a pass, until another K says more
    wide = fit([*offs, *(observe(on("eagle3", k), batch) for k, batch in ((6, 1), (6, 32), (1, 32)))])
    assert wide.split_doubt(on("eagle3", 1), 1, 500) > 0.1  # where batches are large a draft hardly shows


def test_a_fit_needs_off() -> None:
    with pytest.raises(ValueError, match="without speculation"):
        fit([observe(on("eagle3", 6), 1)])
