"""Attention of a batch's groups over the KV cache; target, draft model and draft heads all call this one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from backends.reference import kernels
from backends.reference.batch import Batch, Group
from backends.reference.kv_cache import KVCache


def attend(q: Tensor, batch: Batch, cache: KVCache, layer: int) -> Tensor:
    """The batch's queries [n, heads, head_dim] over what each may see: [n, heads, head_dim]. Keys are written before."""
    if batch.narrow is not None:
        from backends.reference.kernels.tree_attention import tree_attention  # needs triton

        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        with kernels.launching_on(q.device):
            tree_attention(q, cache.layer(layer), batch.narrow, batch.positions, out, scales=cache.scales(layer))
        for group in batch.groups:
            rows = slice(group.start, group.start + group.rows)
            out[rows] = _attend(q[rows], group, cache, layer)
        return out
    parts = [_attend(q[group.start : group.start + group.rows], group, cache, layer) for group in batch.groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(q: Tensor, group: Group, cache: KVCache, layer: int) -> Tensor:
    """One group. The query heads that share a KV head become further query rows, so K and V are read once and never repeated."""
    heads, dim = q.shape[1:]
    count, width = group.count, group.width
    keys, values = cache.read(layer, group.slot, count, group.length)
    kv_heads = keys.shape[1]
    share = heads // kv_heads
    if group.pad is not None:
        q = q[group.pad]
    if count == 1 and width > 1:  # a wide chunk: one batch entry per shared head keeps the mask small
        q = q.view(width, kv_heads, share, dim).permute(2, 1, 0, 3)
        keys, values = keys.expand(share, -1, -1, -1), values.expand(share, -1, -1, -1)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask, is_causal=group.causal)
        return out.permute(2, 1, 0, 3).reshape(width, heads, dim)
    q = q.view(count, width, kv_heads, share, dim).transpose(1, 2).reshape(count, kv_heads, width * share, dim)
    mask = group.mask
    if mask is not None:
        mask = mask.expand(-1, -1, share, -1) if width == 1 else mask.repeat_interleave(share, dim=2)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    out = out.view(count, kv_heads, width, share, dim).transpose(1, 2).reshape(count * width, heads, dim)
    return out if group.unpad is None else out[group.unpad]
