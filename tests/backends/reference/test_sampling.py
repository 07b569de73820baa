"""Noise keyed by (seed, position, token): reproducible, uniform, and the race draws from the softmax."""

import math

import pytest
import torch
from scipy import stats

from backends.reference.sampling import (
    ACCEPT,
    DRAFT,
    TARGET,
    Sampling,
    choose,
    log_exponential,
    mix64,
    probabilities,
    race,
    uniform,
)


def test_splitmix64_known_answers() -> None:
    """The first outputs of the reference implementation from state 0."""
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_noise_depends_on_the_key_alone() -> None:
    a = log_exponential(1000, seed=7, position=3, stream=TARGET)
    assert torch.equal(a, log_exponential(1000, seed=7, position=3, stream=TARGET))
    assert torch.equal(a[:10], log_exponential(10, seed=7, position=3, stream=TARGET))  # whatever the vocabulary's size
    for other in ({"seed": 8}, {"position": 4}, {"stream": DRAFT}):
        b = log_exponential(1000, **{"seed": 7, "position": 3, "stream": TARGET, **other})
        assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 0.12


def test_noise_is_exponential() -> None:
    noise = torch.cat([log_exponential(50000, seed, position, TARGET) for seed in range(2) for position in range(2)]).exp()
    assert torch.isfinite(noise).all()
    assert stats.kstest(noise.double().numpy(), "expon").pvalue > 1e-3


def test_coins_are_uniform() -> None:
    coins = [uniform(seed, position, ACCEPT) for seed in range(100) for position in range(100)]
    assert stats.kstest(coins, "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, top_k=5),
        Sampling(temperature=1.5, top_p=0.8),
        Sampling(temperature=0.9, top_k=6, top_p=0.7),
    ],
)
def test_20000_seeded_samples_follow_the_law(sampling: Sampling) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5
    law = probabilities(logits, sampling)
    rows = [(Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed), 5) for seed in range(20_000)]
    counts = torch.bincount(torch.tensor(choose(logits.expand(20_000, -1), rows)), minlength=12)
    allowed = law > 0
    assert counts[~allowed].sum() == 0
    assert stats.chisquare(counts[allowed].numpy(), (law[allowed] * 20_000).numpy()).pvalue > 1e-3


def test_cuts_keep_what_they_should() -> None:
    """p = .4 .3 .2 .1: top-p .65 keeps two tokens, since one does not reach it."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for top_p, kept in ((0.35, 1), (0.65, 2), (0.75, 3), (0.95, 4)):
        assert int((probabilities(logits, Sampling(1.0, top_p=top_p)) > 0).sum()) == kept
    expected = torch.tensor([0.4, 0.3, 0, 0], dtype=torch.float64) / 0.7
    torch.testing.assert_close(probabilities(logits, Sampling(1.0, top_p=0.65)), expected, atol=1e-6, rtol=0)
    assert int((probabilities(logits, Sampling(1.0, top_k=3)) > 0).sum()) == 3
    # top-k first: of the two left (.57, .43) the first alone reaches .5
    assert int((probabilities(logits, Sampling(1.0, top_k=2, top_p=0.5)) > 0).sum()) == 1


def test_a_flat_nucleus_wider_than_the_first_look_is_cut_right() -> None:
    logits = torch.linspace(1, 0, 5000)
    law = torch.softmax(logits.double(), 0)
    kept = int((probabilities(logits, Sampling(1.0, top_p=0.9)) > 0).sum())
    assert math.isclose(float(law[:kept].sum()), 0.9, abs_tol=1e-3)


def test_rows_sample_independently_of_their_neighbours() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    rows = [
        (Sampling(), 1),
        *((Sampling(0.8, seed=seed), position) for seed, position in ((1, 2), (1, 3), (2, 2), (3, 9), (4, 4))),
    ]
    together = choose(logits, rows)
    assert together == [choose(row[None], [where])[0] for row, where in zip(logits, rows, strict=True)]
    assert together[0] == int(logits[0].argmax())


def test_the_race_never_picks_an_excluded_token() -> None:
    weights = torch.full((500,), -math.inf)
    weights[[3, 400]] = 0.0
    assert {int(race(weights, seed, 0, TARGET)) for seed in range(50)} == {3, 400}
