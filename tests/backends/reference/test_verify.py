"""Exactness in closed form: every draft enumerated, every coin integrated, and the law of the output is the target's.

The target is a random table p(. | prefix), the drafter another one q(. | prefix). The law of the next K + 1 tokens, a step's
output continued by plain target sampling where the step ended early, must be the product of p to 1e-12.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from backends.reference import verify
from backends.reference.sampling import Sampling, probabilities
from backends.reference.verify import Draft, block, forced, reject, walk

Law = dict[tuple[int, ...], float]
Table = dict[tuple[int, ...], Tensor]
SAMPLINGS = [Sampling(temperature=t, top_p=cut) for t in (0.7, 1.3) for cut in (1.0, 0.9)]
TREES = [(0, 0), (0, 0, 1), (0, 1, 0, 1, 3), (0, 0, 2, 2, 1, 3)]


def prefixes(vocab: int, length: int) -> list[tuple[int, ...]]:
    return [p for n in range(length + 1) for p in itertools.product(range(vocab), repeat=n)]


def table(vocab: int, length: int, seed: int, sampling: Sampling) -> Table:
    generator = torch.Generator().manual_seed(seed)
    return {
        prefix: probabilities(torch.randn(vocab, generator=generator, dtype=torch.float64) * 1.5, sampling)
        for prefix in prefixes(vocab, length)
    }


def target_law(p: Table, vocab: int, length: int) -> Law:
    return {
        text: float(torch.stack([p[text[:i]][text[i]] for i in range(length)]).prod())
        for text in itertools.product(range(vocab), repeat=length)
    }


def continued(law: Law, p: Table, vocab: int, length: int) -> Law:
    """Texts of a step, filled up to `length` by the target."""
    full: Law = defaultdict(float)
    for text, weight in law.items():
        for rest in itertools.product(range(vocab), repeat=length - len(text)):
            whole = text + rest
            more = 1.0
            for i in range(len(text), length):
                more *= float(p[whole[:i]][whole[i]])
            full[whole] += weight * more
    return full


def distance(law: Law, expected: Law) -> float:
    return max(abs(law.get(text, 0.0) - expected[text]) for text in expected)


def node_prefixes(draft: Draft) -> list[tuple[int, ...]]:
    """The text from the root to each node."""
    parents = range(len(draft.tokens)) if draft.parents is None else draft.parents
    texts: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, parents, strict=True):
        texts.append((*texts[parent], token))
    return texts


def rejection_law(draft: Draft, p: Table) -> Law:
    """Law of one step: each coin splits the walk in two, weighted by the acceptance that the code itself computes."""
    texts = node_prefixes(draft)
    law: Law = defaultdict(float)
    pending: list[tuple[tuple[bool, ...], float]] = [((), 1.0)]  # outcomes forced so far, and their probability
    while pending:
        outcomes, weight = pending.pop()
        tossed: list[float] = []
        original = verify.acceptance

        def spy(p_: Tensor, q_: Tensor, token: int, *, tossed: list[float] = tossed, rule: Callable = original) -> float:
            tossed.append(rule(p_, q_, token))
            return tossed[-1]

        verify.acceptance = spy
        try:
            # the coin is asked for before the rule, so it answers from the outcome: 0 is below any chance > 0, 1 below none
            path, last = reject(
                draft,
                lambda node: p[texts[node]],
                lambda depth, rank, outcomes=outcomes, tossed=tossed: (
                    -1.0 if len(tossed) < len(outcomes) and outcomes[len(tossed)] else 2.0
                ),
            )
        finally:
            verify.acceptance = original
        if len(tossed) > len(outcomes):  # the next coin is free: try both sides
            chance = tossed[len(outcomes)]
            pending += [((*outcomes, True), weight * chance), ((*outcomes, False), weight * (1 - chance))]
            continue
        if weight > 0:
            for token, share in enumerate(last.tolist()):
                law[(*texts[path[-1]], token) if path else (token,)] += weight * share
    return law


def chains(q: Table, vocab: int, k: int) -> list[tuple[float, Draft]]:
    """Every chain the drafter can draw, with its probability."""
    drafts = []
    for tokens in itertools.product(range(vocab), repeat=k):
        rows = torch.stack([q[tokens[:i]] for i in range(k)])
        weight = float(rows[range(k), list(tokens)].prod())
        if weight > 0:
            drafts.append((weight, Draft(tokens, probabilities=rows)))
    return drafts


def mixed_rejection_law(p: Table, q: Table, vocab: int, k: int) -> Law:
    law: Law = defaultdict(float)
    for weight, draft in chains(q, vocab, k):
        for text, share in continued(rejection_law(draft, p), p, vocab, k + 1).items():
            law[text] += weight * share
    return law


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T={s.temperature} top_p={s.top_p}")
@pytest.mark.parametrize(("vocab", "k"), [(6, 1), (5, 2), (4, 3)])
def test_rejection_of_sampled_chains_is_exact(vocab: int, k: int, sampling: Sampling) -> None:
    p, q = table(vocab, k, 1, sampling), table(vocab, k, 2, sampling)
    assert distance(mixed_rejection_law(p, q, vocab, k), target_law(p, vocab, k + 1)) < 1e-12


@pytest.mark.parametrize(("vocab", "k"), [(6, 1), (5, 2), (4, 3)])
def test_rejection_of_fixed_chains_is_exact(vocab: int, k: int) -> None:
    """A draft that was not drawn (n-gram): q is one-hot."""
    p = table(vocab, k, 1, Sampling(temperature=0.7))
    for tokens in itertools.product(range(vocab), repeat=k):
        law = continued(rejection_law(Draft(tokens), p), p, vocab, k + 1)
        assert distance(law, target_law(p, vocab, k + 1)) < 1e-12


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T={s.temperature} top_p={s.top_p}")
@pytest.mark.parametrize("parents", TREES)
def test_rejection_of_trees_is_exact(parents: tuple[int, ...], sampling: Sampling) -> None:
    p = table(4, 4, 1, sampling)
    tokens = torch.randint(0, 4, (len(parents),), generator=torch.Generator().manual_seed(3)).tolist()
    law = continued(rejection_law(Draft(tuple(tokens), parents), p), p, 4, 4)
    assert distance(law, target_law(p, 4, 4)) < 1e-12


def test_rejection_of_siblings_drawn_from_one_law_is_exact() -> None:
    """Two children drawn independently from q, tried in order against what the first left."""
    p, q = table(5, 2, 1, Sampling(temperature=1.0)), table(5, 1, 2, Sampling(temperature=1.0))[()]
    law: Law = defaultdict(float)
    for a, b in itertools.product(range(5), repeat=2):
        draft = Draft((a, b), (0, 0), torch.stack((q, q)))
        for text, share in continued(rejection_law(draft, p), p, 5, 2).items():
            law[text] += float(q[a] * q[b]) * share
    assert distance(law, target_law(p, 5, 2)) < 1e-12


def block_law(draft: Draft, p: Table) -> Law:
    """Law of one step: prefix n is kept with its chance, if none longer was."""
    texts = node_prefixes(draft)
    chances, laws = verify.block_chances(draft, lambda node: p[texts[node]])
    law: Law = defaultdict(float)
    left = 1.0
    for length in range(len(draft.tokens), -1, -1):
        weight = left * chances[length - 1] if length else left
        left -= weight
        for token, share in enumerate(laws[length].tolist()):
            law[(*texts[length], token)] += weight * share
    return law


def mixed(step: Callable[[Draft, Table], Law], p: Table, q: Table, vocab: int, k: int) -> tuple[Law, float]:
    """Law of the next K + 1 tokens and the expected number of tokens in a step."""
    law: Law = defaultdict(float)
    emitted = 0.0
    for weight, draft in chains(q, vocab, k):
        own = step(draft, p)
        emitted += weight * sum(len(text) * share for text, share in own.items())
        for text, share in continued(own, p, vocab, k + 1).items():
            law[text] += weight * share
    return law, emitted


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T={s.temperature} top_p={s.top_p}")
@pytest.mark.parametrize(("vocab", "k"), [(6, 1), (5, 2), (4, 3)])
def test_block_verification_is_exact_and_never_accepts_less(vocab: int, k: int, sampling: Sampling) -> None:
    p, q = table(vocab, k, 1, sampling), table(vocab, k, 2, sampling)
    law, emitted = mixed(block_law, p, q, vocab, k)
    assert distance(law, target_law(p, vocab, k + 1)) < 1e-12
    _, one_by_one = mixed(rejection_law, p, q, vocab, k)
    assert emitted > one_by_one - 1e-12
    assert k == 1 or sampling.top_p < 1 or emitted > one_by_one + 1e-3


@pytest.mark.parametrize(("vocab", "k"), [(6, 1), (5, 2), (4, 3)])
def test_block_verification_of_fixed_chains_is_exact(vocab: int, k: int) -> None:
    p = table(vocab, k, 1, Sampling(temperature=0.7))
    for tokens in itertools.product(range(vocab), repeat=k):
        law = continued(block_law(Draft(tokens), p), p, vocab, k + 1)
        assert distance(law, target_law(p, vocab, k + 1)) < 1e-12


def test_block_keeps_the_longest_prefix_whose_coin_says_so() -> None:
    p, q = table(5, 2, 1, SAMPLINGS[0]), table(5, 2, 2, SAMPLINGS[0])
    for _, draft in chains(q, 5, 2):
        texts = node_prefixes(draft)
        chances, laws = verify.block_chances(draft, lambda node, texts=texts: p[texts[node]])
        if all(0 < chance < 1 for chance in chances):
            break
    else:
        pytest.fail("no draft whose coins decide")
    for coins, length in (((0.0, 0.0), 2), ((0.0, 1.0), 1), ((1.0, 0.0), 2), ((1.0, 1.0), 0)):
        path, law = block(draft, lambda node: p[texts[node]], lambda n, coins=coins: coins[n - 1])
        assert path == (1, 2)[:length]
        assert torch.equal(law, laws[length])


def test_forced_acceptance_goes_down_the_deepest_branch() -> None:
    draft = Draft((7, 8, 9, 5), (0, 0, 2, 3))  # 8, 9, 5 is the deepest branch: nodes 2, 3, 4
    chosen = [10, 11, 12, 13, 14]
    for count, path in ((0, ()), (1, (2,)), (2, (2, 3)), (3, (2, 3, 4)), (4, (2, 3, 4))):
        assert forced(draft, count, chosen) == verify.Verdict(path, chosen[path[-1] if path else 0])
    assert forced(Draft((7, 8)), 1, [1, 2, 3]) == verify.Verdict((1,), 2)
    assert forced(Draft(), 2, [1]) == verify.Verdict((), 1)


BROKEN = {
    "accepts too often": ("acceptance", lambda p, q, token: min(1.0, float(p[token] / q[token]) * 1.01)),
    "accepts with p": ("acceptance", lambda p, q, token: float(p[token])),
    "residual is p": ("residual", lambda p, q: p),
    "residual is |p - q|": ("residual", lambda p, q: (p - q).abs() / (p - q).abs().sum()),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what, rule = BROKEN[name]
    monkeypatch.setattr(verify, what, rule)
    p, q = table(5, 2, 1, SAMPLINGS[0]), table(5, 2, 2, SAMPLINGS[0])
    assert distance(mixed_rejection_law(p, q, 5, 2), target_law(p, 5, 3)) > 1e-4


@pytest.mark.parametrize("name", ["residual is p", "residual is |p - q|"])
def test_a_broken_rule_is_seen_in_trees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what, rule = BROKEN[name]
    monkeypatch.setattr(verify, what, rule)
    p = table(4, 3, 1, SAMPLINGS[0])
    assert distance(continued(rejection_law(Draft((1, 2, 3), (0, 0, 1)), p), p, 4, 3), target_law(p, 4, 3)) > 1e-4


def test_a_broken_block_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chances a little too high."""
    original = verify.block_chances

    def eager(draft: Draft, target: Callable[[int], Tensor]) -> tuple[list[float], list[Tensor]]:
        chances, laws = original(draft, target)
        return [min(1.0, 1.05 * chance) for chance in chances], laws

    monkeypatch.setattr(verify, "block_chances", eager)
    p, q = table(5, 2, 1, SAMPLINGS[0]), table(5, 2, 2, SAMPLINGS[0])
    assert distance(mixed(block_law, p, q, 5, 2)[0], target_law(p, 5, 3)) > 1e-4


def coupled_law(draft: Draft, p: Table, vocab: int, step: Callable[[Draft, Sequence[int]], verify.Verdict] = walk) -> Law:
    """Law of one step: the target's tokens at the nodes are independent draws from p (exponential races of separate keys)."""
    texts = node_prefixes(draft)
    law: Law = defaultdict(float)
    for chosen in itertools.product(range(vocab), repeat=len(texts)):
        weight = 1.0
        for text, token in zip(texts, chosen, strict=True):
            weight *= float(p[text][token])
        verdict = step(draft, chosen)
        law[(*(draft.tokens[node - 1] for node in verdict.path), verdict.token)] += weight
    return law


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T={s.temperature} top_p={s.top_p}")
@pytest.mark.parametrize(("vocab", "k"), [(6, 1), (5, 2), (4, 3)])
def test_the_coupled_walk_is_exact_for_every_chain(vocab: int, k: int, sampling: Sampling) -> None:
    p = table(vocab, k, 1, sampling)
    expected = target_law(p, vocab, k + 1)
    for tokens in itertools.product(range(vocab), repeat=k):
        assert distance(continued(coupled_law(Draft(tokens), p, vocab), p, vocab, k + 1), expected) < 1e-12


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T={s.temperature} top_p={s.top_p}")
@pytest.mark.parametrize("parents", [(0, 0), (0, 0, 1), (0, 1, 0, 1), (0, 0, 2, 2, 1)])
def test_the_coupled_walk_is_exact_for_trees(parents: tuple[int, ...], sampling: Sampling) -> None:
    p = table(4, 3, 1, sampling)
    for seed in range(2):
        tokens = torch.randint(0, 4, (len(parents),), generator=torch.Generator().manual_seed(seed)).tolist()
        law = continued(coupled_law(Draft(tuple(tokens), parents), p, 4), p, 4, 4)
        assert distance(law, target_law(p, 4, 4)) < 1e-12


@pytest.mark.parametrize("parents", [(0, 0), (0, 0, 1), (0, 0, 1, 2)])
def test_every_small_tree_is_exact_under_both_rules(parents: tuple[int, ...]) -> None:
    """All token assignments, siblings of the same token included."""
    p = table(4, 2, 1, SAMPLINGS[1])
    expected = target_law(p, 4, 3)
    for tokens in itertools.product(range(4), repeat=len(parents)):
        draft = Draft(tokens, parents)
        assert distance(continued(coupled_law(draft, p, 4), p, 4, 3), expected) < 1e-12
        assert distance(continued(rejection_law(draft, p), p, 4, 3), expected) < 1e-12


def test_a_broken_walk_is_seen() -> None:
    """One that takes the first draft token whatever the target chose."""

    def trusting(draft: Draft, chosen: Sequence[int]) -> verify.Verdict:
        return verify.Verdict((1,), chosen[1])

    p = table(5, 2, 1, SAMPLINGS[0])
    assert distance(continued(coupled_law(Draft((2, 3)), p, 5, trusting), p, 5, 3), target_law(p, 5, 3)) > 1e-4


def test_the_walk_follows_the_target_down_a_tree() -> None:
    draft = Draft((7, 8, 9, 5), (0, 0, 2, 2))  # the root's children are 7 and 8, those of 8 are 9 and 5
    assert walk(draft, [8, 0, 5, 0, 4]) == verify.Verdict((2, 4), 4)
    assert walk(draft, [7, 1, 5, 0, 4]) == verify.Verdict((1,), 1)
    assert walk(draft, [3, 1, 5, 0, 4]) == verify.Verdict((), 3)
    assert walk(Draft(), [3]) == verify.Verdict((), 3)


def test_a_token_that_q_cannot_give_is_refused_and_an_empty_residual_falls_back_to_p() -> None:
    p, q = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.0, 1.0]).double()
    assert verify.acceptance(p, q, 0) == 0.0
    torch.testing.assert_close(verify.residual(p, p), p)
