"""Attention over a paged KV cache, one request at a time: queries [tokens, heads, dim], caches [slots, kv_heads, dim]."""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("sgl_kernel", "DEF")
_LIBRARY.define(
    "decode_attention_cpu(Tensor q, Tensor k_cache, Tensor v_cache, float k_scale, float v_scale, Tensor(a!) out, Tensor? k, "
    "Tensor? v, Tensor slots, Tensor logits, Tensor req_to_token, Tensor requests, Tensor seq_lens, float scaling, "
    "float logit_cap, bool cross, int window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_LIBRARY.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor k_cache, Tensor v_cache, float k_scale, "
    "float v_scale, Tensor req_to_token, Tensor requests, Tensor seq_lens, Tensor extend_lens, Tensor starts, int max_extend, "
    "float scaling, float logit_cap, bool cross, int window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, "
    "bool causal) -> ()"
)


def _refuse(logit_cap: float, cross: bool, window: int, sinks: Tensor | None) -> None:
    if logit_cap or cross or window > 0 or sinks is not None:
        raise NotImplementedError("this stand-in has no logit cap, cross attention, sliding window or attention sinks")


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float, allowed: Tensor | None) -> Tensor:
    """[queries, heads, dim] over [keys, kv_heads, dim]; `allowed` is [queries, keys]. In float32, like the real kernel."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scaling
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def _decode(
    q, k_cache, v_cache, k_scale, v_scale, out, k, v, slots, logits, req_to_token, requests, seq_lens,
    scaling, logit_cap, cross, window, encoder_lens, sinks,
):  # fmt: skip
    _refuse(logit_cap, cross, window, sinks)
    if k is not None:
        k_cache[slots] = k.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[slots] = v.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    for row in range(q.shape[0]):
        keys = req_to_token[requests[row], : int(seq_lens[row])].long()
        out[row] = _attend(q[row : row + 1], k_cache[keys], v_cache[keys], scaling, None)[0].to(out.dtype)


def _extend(
    q, k, v, out, k_cache, v_cache, k_scale, v_scale, req_to_token, requests, seq_lens, extend_lens, starts, max_extend,
    scaling, logit_cap, cross, window, encoder_lens, sinks, tree_mask, causal,
):  # fmt: skip
    _refuse(logit_cap, cross, window, sinks)
    mask_at = 0
    for row in range(requests.shape[0]):
        total, new, start = int(seq_lens[row]), int(extend_lens[row]), int(starts[row])
        prefix = total - new
        slots = req_to_token[requests[row], :total].long()
        keys, values = k_cache[slots], v_cache[slots]
        if k is not None:
            keys[prefix:] = k[start : start + new].view(new, *keys.shape[1:])
            values[prefix:] = v[start : start + new].view(new, *values.shape[1:])
        allowed = None
        if tree_mask is not None:
            full = tree_mask.numel() != requests.shape[0] * new * new  # else the mask covers the draft tokens only
            width = total if full else new
            part = tree_mask[mask_at : mask_at + new * width].view(new, width).bool()
            mask_at += new * width
            allowed = part if full else torch.cat([torch.ones(new, prefix, dtype=torch.bool), part], dim=1)
        elif causal:
            allowed = torch.ones(new, total, dtype=torch.bool).tril(prefix)
        out[start : start + new] = _attend(q[start : start + new], keys, values, scaling, allowed).to(out.dtype)


_LIBRARY.impl("decode_attention_cpu", _decode, "CPU")
_LIBRARY.impl("extend_attention_cpu", _extend, "CPU")
