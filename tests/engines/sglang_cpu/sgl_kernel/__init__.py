"""A stand-in in plain PyTorch for the few `sgl_kernel` entry points that SGLang's CPU path needs, for tests only.

There is no CPU build of `sgl_kernel` to install. Written from the call sites in SGLang 0.5.23; it makes the real server run
(scheduler, draft workers, verification, statistics), slowly. Sliding windows, attention sinks, cross attention and fp8 KV
caches are refused.
"""

from __future__ import annotations

from sgl_kernel import attention as attention  # registers torch.ops.sgl_kernel.*
from sgl_kernel.cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
