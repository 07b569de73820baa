from dataclasses import replace

import numpy as np

from harness.funnel import prune
from harness.funnel.acceptance import from_loads
from harness.funnel.step_cost import fit
from tests.harness.funnel.loads import OFF, observe, on, workload


def test_a_drafter_that_gets_nothing_accepted_is_dead_and_the_evidence_says_so() -> None:
    load = observe(on("ngram", 6), 8)
    assert (
        prune.dead(replace(load, tau=1.001))
        == f"dead drafter: tau 1.001 over {load.decode_steps * load.tau / 1.001:.0f} decode steps at K = 6"
    )
    assert prune.dead(observe(on("mtp", 6), 8)) is None


def test_accepting_everything_calls_for_a_look() -> None:
    load = observe(on("mtp", 6), 8)
    assert not prune.accepts_everything(load)
    assert prune.accepts_everything(replace(load, tau=6.995))


def test_a_drafter_that_loses_even_for_free_is_pruned_with_its_best_case() -> None:
    offs = [observe(OFF, batch) for batch in (1, 4, 16, 48)]
    cost = fit(offs)
    configs = [on("ngram", k) for k in range(1, 7)]
    curve = from_loads([observe(configs[-1], 32)])
    wide, narrow = workload({48: 1.0}), workload({1: 1.0})
    reason = prune.cannot_win(configs, cost, [(wide, curve)], 500, 0.05)
    assert reason is not None
    assert "to beat is 1.051x" in reason
    good = from_loads([observe(on("eagle3", 6), 32)])
    assert prune.cannot_win([on("eagle3", k) for k in range(1, 7)], cost, [(narrow, good)], 500, 0.05) is None


def test_a_configuration_slower_on_paired_requests_is_pruned_and_an_equal_one_is_not() -> None:
    fast = observe(on("eagle3", 3), 8)
    slow = replace(
        fast, config=on("eagle3", 6), e2e_s=fast.e2e_s * np.random.default_rng(0).normal(1.05, 0.02, len(fast.e2e_s))
    )
    reason = prune.loses_pairwise(slow, fast, 0.004)
    assert reason is not None
    assert reason.startswith("slower than eagle3 K=3 on 64 paired requests at batch size 8: median +")
    even = replace(slow, e2e_s=fast.e2e_s * np.random.default_rng(1).normal(1.0, 0.02, len(fast.e2e_s)))
    assert prune.loses_pairwise(even, fast, 0.004) is None


def test_few_common_requests_prune_nothing() -> None:
    fast, slow = observe(on("eagle3", 3), 8), observe(on("mtp", 6), 8)
    assert prune.loses_pairwise(replace(slow, requests=tuple(range(60, 124))), fast, 0.004) is None
