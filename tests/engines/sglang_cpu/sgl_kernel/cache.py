"""Bookkeeping of KV-cache slots: `req_to_token[request, position]` holds the slot of a token."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, req_to_token: Tensor, seq_lens: Tensor, out: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    width = topk * steps
    for row, (request, start) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        out[row * width : (row + 1) * width] = req_to_token[request, start : start + width]


def assign_extend_cache_locs_cpu(
    requests: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, out: Tensor, pool_len: int
) -> None:
    at = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        out[at : at + end - start] = req_to_token[request, start:end]
        at += end - start


def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, pool_len: int
) -> None:
    at = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[request, start:end] = slots[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, requests: Tensor, seq_lens: Tensor, topk: int, steps: int, pool_len: int
) -> Tensor:
    """One row per (request, branch): the prefix's slots, then the branch's own `steps` draft slots."""
    rows = torch.zeros(len(requests) * topk, pool_len, dtype=req_to_token.dtype)
    for index, (request, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        for branch in range(topk):
            row, start = rows[index * topk + branch], length + branch * steps
            row[:length] = req_to_token[request, :length]
            row[length : length + steps] = req_to_token[request, start : start + steps]
    return rows


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Copy rows of `stride` bytes inside each buffer; all sources are read before the first target is written."""
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(pointer + target * stride, row, stride)


def fill_bonus_tokens_cpu(accepted: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    rows = torch.arange(len(lengths))
    bonus[: len(lengths)] = accepted.flatten()[stride * rows + lengths.long() - 1].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, out: Tensor) -> None:
    chosen = slots[accept_index[accept_index > -1].long()]
    out[: len(chosen)] = chosen.to(out.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor, starts: Tensor, lengths: Tensor, new_tokens: Tensor, select_index: Tensor | None
) -> None:
    """Shift each request's tokens left by one and put its new token last (or at `select_index`)."""
    new = new_tokens.flatten()
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if length > 0:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
            last = start + length - 1 if select_index is None else int(select_index[row])
            input_ids[last] = new[row]
