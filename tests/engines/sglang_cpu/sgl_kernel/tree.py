"""Draft trees: node 0 is the last accepted token, links are stored as first child and next sibling, -1 for none."""

from __future__ import annotations

from torch import Tensor


def build_tree_kernel_efficient_cpu(
    parents: Tensor, selected: Tensor, seq_lens: Tensor, mask: Tensor, positions: Tensor, index: Tensor,
    next_token: Tensor, next_sibling: Tensor, topk: int, depth: int, nodes: int, mask_mode: int,
) -> None:  # fmt: skip
    """Fill mask, positions and links of each request's tree.

    `selected[i]` numbers the candidate behind node i + 1 (candidates of one parent are `topk` in a row); candidate c hangs below
    the candidate that `parents[c // topk]` names, below the root where c // topk is 0.
    """
    if int(mask_mode) != 1:
        raise NotImplementedError("this stand-in builds masks over the draft tokens only")
    masks, places = mask[: len(seq_lens) * nodes * nodes].view(-1, nodes, nodes), positions.view(-1, nodes)
    for row, length in enumerate(seq_lens.tolist()):
        chosen = selected[row].tolist()
        node_of = {candidate: node + 1 for node, candidate in enumerate(chosen)}
        parent = [-1] * nodes
        for node, candidate in enumerate(chosen, start=1):
            group = candidate // topk
            parent[node] = 0 if group == 0 else node_of.get(int(parents[row, group]), -1)
        index[row] = row * nodes + index.new_tensor(range(nodes))
        masks[row] = False
        for node in range(nodes):
            steps, at = 0, node
            while at > 0:
                masks[row, node, at] = True
                at, steps = parent[at], steps + 1
            masks[row, node, 0] = True
            places[row, node] = length + steps
        _link(parent, next_token[row], next_sibling[row])


def _link(parent: list[int], next_token: Tensor, next_sibling: Tensor) -> None:
    for node in range(len(parent) - 1, 0, -1):  # the lowest node ends up as the first child
        if parent[node] >= 0:
            next_sibling[node] = next_token[parent[node]]
            next_token[parent[node]] = node


def reconstruct_indices_from_tree_mask(
    mask: Tensor, seq_lens: Tensor, positions: Tensor, index: Tensor, next_token: Tensor, next_sibling: Tensor,
    batch: int, nodes: int,
) -> None:  # fmt: skip
    """The same links from a mask alone: `mask[row, i, j]` says that node j is an ancestor of node i (or i itself)."""
    masks = mask[: batch * nodes * nodes].view(batch, nodes, nodes).bool()
    places, indices = positions.view(-1, nodes), index.view(-1, nodes)
    children, siblings = next_token.view(-1, nodes), next_sibling.view(-1, nodes)
    for row in range(batch):
        ancestors = masks[row].tril(-1)
        parent = [max(line.nonzero().flatten().tolist(), default=-1) for line in ancestors]
        places[row] = int(seq_lens[row]) + ancestors.sum(1)
        indices[row] = row * nodes + indices.new_tensor(range(nodes))
        children[row], siblings[row] = -1, -1
        for node in range(nodes - 1, 0, -1):
            if parent[node] >= 0:
                siblings[row, node] = children[row, parent[node]]
                children[row, parent[node]] = node


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """Walk down while a child holds the target's token; the target's own last token closes the step."""
    rows, nodes = candidates.shape
    target = target_predict.view(rows, nodes)
    for row in range(rows):
        at = 0
        accept_index[row, 0] = retrive_index[row, 0]
        accepted = 0
        while accepted + 1 < accept_index.shape[1]:
            child = int(retrive_next_token[row, at])
            while child != -1 and int(candidates[row, child]) != int(target[row, at]):
                child = int(retrive_next_sibling[row, child])
            if child == -1:
                break
            predicts[retrive_index[row, at]] = target[row, at].to(predicts.dtype)
            at, accepted = child, accepted + 1
            accept_index[row, accepted] = retrive_index[row, at]
        accept_token_num[row] = accepted
        predicts[retrive_index[row, at]] = target[row, at].to(predicts.dtype)
