"""The kernel stand-in of the SGLang tests gives known answers by itself (no SGLang needed)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).with_name("sglang_cpu")))
from sgl_kernel import attention, tree


def links(nodes: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((1, nodes), -1, dtype=torch.long) for _ in range(3))


def test_a_tree_of_width_two_is_linked_and_masked_by_its_parents() -> None:
    # Candidates 0, 1 hang below the root; the second step's group 1 hangs below candidate 0, group 2 below candidate 1.
    # Chosen: 0 (node 1), 1 (node 2), 2 (node 3, child of node 1), 4 (node 4, child of node 2).
    index, child, sibling = links(5)
    mask, positions = torch.ones(25, dtype=torch.bool), torch.zeros(5, dtype=torch.long)
    tree.build_tree_kernel_efficient_cpu(
        torch.tensor([[-1, 0, 1]]),
        torch.tensor([[0, 1, 2, 4]]),
        torch.tensor([10]),
        mask,
        positions,
        index,
        child,
        sibling,
        2,
        2,
        5,
        1,
    )
    assert positions.tolist() == [10, 11, 11, 12, 12]
    assert child.tolist() == [[1, 3, 4, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, -1, -1]]
    rows = mask.view(5, 5).int().tolist()
    assert rows == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]


def test_links_follow_from_the_mask_alone() -> None:
    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool().flatten()
    index, child, sibling = links(5)
    positions = torch.zeros(5, dtype=torch.long)
    tree.reconstruct_indices_from_tree_mask(mask, torch.tensor([10]), positions, index, child, sibling, 1, 5)
    assert positions.tolist() == [10, 11, 11, 12, 12]
    assert child.tolist() == [[1, 3, 4, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, -1, -1]]


def test_verification_walks_down_the_branch_that_the_target_takes() -> None:
    index, child, sibling = torch.arange(5)[None], torch.tensor([[1, 3, 4, -1, -1]]), torch.tensor([[-1, 2, -1, -1, -1]])
    candidates = torch.tensor([[7, 20, 21, 30, 31]])
    target = torch.tensor([[21, 99, 31, 99, 50]])  # after the root 21 (node 2), after it 31 (node 4), after it 50
    predicts, accepted, count = torch.zeros(5, dtype=torch.int), torch.full((1, 3), -1), torch.zeros(1, dtype=torch.int)
    tree.verify_tree_greedy_cpu(predicts, accepted, count, candidates, index, child, sibling, target)
    assert accepted.tolist() == [[0, 2, 4]]
    assert count.tolist() == [2]
    assert [predicts[i].item() for i in (0, 2, 4)] == [21, 31, 50]


def test_attention_over_the_cache_is_causal_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    out, table = torch.zeros(3, 4, 8), torch.arange(5)[None]
    one = torch.tensor([0])
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, k[2:], v[2:], out, k.clone(), v.clone(), 1.0, 1.0, table, one, torch.tensor([5]), torch.tensor([3]), one, 3,
        8**-0.5, 0.0, False, 0, None, None, None, True,
    )  # fmt: skip
    keys, values = (x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
    allowed = torch.ones(3, 5, dtype=torch.bool).tril(2)
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=allowed)
    assert torch.allclose(out, expected.transpose(0, 1), atol=1e-5)
    assert attention is not None
