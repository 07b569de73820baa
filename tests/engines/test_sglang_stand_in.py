"""The kernel stand-in of the SGLang tests gives known answers by itself (no SGLang needed)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).with_name("sglang_cpu")))
from sgl_kernel import attention, cache, tree


def links(nodes: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((1, nodes), -1, dtype=torch.long) for _ in range(3))


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=allowed)
    return out.transpose(0, 1)


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
    assert torch.allclose(out, plain_attention(q, k, v, torch.ones(3, 5, dtype=torch.bool).tril(2)), atol=1e-5)
    assert attention is not None


def test_a_draft_step_sees_the_prefix_and_its_own_branch() -> None:
    # Request 1 of the table has 3 tokens in slots 5, 9, 2; its 2 branches of 3 draft slots lie in 20..22 and 23..25.
    torch.manual_seed(0)
    table = torch.zeros(2, 12, dtype=torch.int32)
    table[1, :9] = torch.tensor([5, 9, 2, 20, 21, 22, 23, 24, 25])
    requests, lengths = torch.tensor([1]), torch.tensor([3])
    slots = torch.zeros(6, dtype=torch.long)
    cache.assign_draft_cache_locs_contiguous_cpu(requests, table, lengths, slots, 12, 2, 3)
    assert slots.tolist() == [20, 21, 22, 23, 24, 25]
    rows = cache.build_draft_decode_metadata_cpu(table, requests, lengths, 2, 3, 12)
    keys, values, out = torch.randn(30, 2, 8), torch.randn(30, 2, 8), torch.zeros(2, 4, 8)
    q, k, v = torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    step = 1  # the second of the three drafts: the first lies in the cache already, this one is written by the call
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, keys, values, 1.0, 1.0, out, k, v, slots.view(2, 3)[:, step], torch.empty(0), rows, torch.arange(2),
        lengths.repeat_interleave(2) + step + 1, 8**-0.5, 0.0, False, 0, None, None,
    )  # fmt: skip
    for branch, seen in enumerate(([5, 9, 2, 20, 21], [5, 9, 2, 23, 24])):
        assert torch.equal(keys[seen[-1]], k[branch])
        assert torch.allclose(
            out[branch : branch + 1], plain_attention(q[branch : branch + 1], keys[seen], values[seen]), atol=1e-5
        )


def test_verification_of_a_tree_attends_to_ancestors_only() -> None:
    torch.manual_seed(0)
    q, k, v, out = torch.randn(6, 4, 8), torch.randn(16, 2, 8), torch.randn(16, 2, 8), torch.zeros(6, 4, 8)
    table = torch.arange(16).view(2, 8)  # two requests with 4 and 2 tokens before the 3 nodes of each
    masks = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]).bool()
    totals, three, starts = torch.tensor([7, 5]), torch.tensor([3, 3]), torch.tensor([0, 3])
    expected, wide = [], []
    for row, total in enumerate(totals.tolist()):
        wide.append(torch.cat([torch.ones(3, total - 3, dtype=torch.bool), masks[row]], dim=1))
        seen = table[row, :total]
        expected.append(plain_attention(q[3 * row : 3 * row + 3], k[seen], v[seen], wide[row]))
    for mask in (masks.flatten(), torch.cat([mask.flatten() for mask in wide])):
        out.zero_()
        torch.ops.sgl_kernel.extend_attention_cpu(
            q, None, None, out, k, v, 1.0, 1.0, table, torch.arange(2), totals, three, starts, 3, 8**-0.5, 0.0, False, 0,
            None, None, mask, True,
        )  # fmt: skip
        assert torch.allclose(out, torch.cat(expected), atol=1e-5)


def test_slots_follow_the_accepted_tokens() -> None:
    table, requests = torch.zeros(2, 8, dtype=torch.int32), torch.tensor([1, 0])
    starts, ends = torch.tensor([2, 0]), torch.tensor([4, 1])
    cache.assign_req_to_token_pool_cpu(requests, table, starts, ends, torch.tensor([7, 8, 9]), 8)
    assert table[1, 2:4].tolist() == [7, 8]
    assert table[0, 0] == 9
    out = torch.zeros(3, dtype=torch.long)
    cache.assign_extend_cache_locs_cpu(requests, table, starts, ends, out, 8)
    assert out.tolist() == [7, 8, 9]
    accepted = torch.tensor([0, 2, -1, 3, -1, -1])
    cache.fill_accept_out_cache_loc_cpu(accepted, torch.tensor([10, 11, 12, 13, 14, 15]), out)
    assert out.tolist() == [10, 12, 13]
    bonus = torch.zeros(2, dtype=torch.int32)
    cache.fill_bonus_tokens_cpu(torch.tensor([[4, 5, 6], [7, 8, 9]]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [5, 7]
    ids = torch.tensor([1, 2, 3, 4, 5])
    cache.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[30], [50]]), None)
    assert ids.tolist() == [2, 3, 30, 5, 50]


def test_rows_of_every_layer_move_as_if_at_once() -> None:
    layers = [torch.arange(12.0).view(4, 3), 100 + torch.arange(12.0).view(4, 3)]
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    cache.copy_all_layer_kv_cache_cpu(pointers, torch.tensor([12, 12]), torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert [layer[:, 0].tolist() for layer in layers] == [[0, 0, 3, 9], [100, 100, 103, 109]]
