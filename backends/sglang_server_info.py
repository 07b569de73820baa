"""What an SGLang server says of itself on /server_info and in a response: effective settings, and counts of one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.types import ServingConfig, SpecCounters

_FIELDS: Mapping[str, str] = {
    "max_num_seqs": "max_running_requests",
    "tensor_parallel": "tp_size",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "chunked_prefill_tokens": "chunked_prefill_size",
    "mem_fraction_static": "mem_fraction_static",
    "page_size": "page_size",
    "attention_backend": "attention_backend",
    "prefill_attention_backend": "prefill_attention_backend",
    "decode_attention_backend": "decode_attention_backend",
    "device": "device",
    "dtype": "dtype",
    "speculative_algorithm": "speculative_algorithm",
    "speculative_num_steps": "speculative_num_steps",
    "speculative_eagle_topk": "speculative_eagle_topk",
    "speculative_num_draft_tokens": "speculative_num_draft_tokens",
    "speculative_draft_model_quantization": "speculative_draft_model_quantization",
    "speculative_adaptive": "speculative_adaptive",
    "version": "version",
    "kv_cache_tokens": "max_total_num_tokens",
}
"""Our name -> SGLang's."""


def settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in effect that bear on a measurement, from the body of /server_info. What it does not say is absent."""
    states = body.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    known = {**body, **state}  # the scheduler's own copy is what runs; the front end's is what was resolved at start
    out = {ours: known[theirs] for ours, theirs in _FIELDS.items() if theirs in known}
    if "disable_radix_cache" in known:
        out["prefix_caching"] = not known["disable_radix_cache"]
    if "disable_overlap_schedule" in known:
        out["overlap_schedule"] = not known["disable_overlap_schedule"]
    if "chunked_prefill_tokens" in out:
        out["chunked_prefill"] = (out["chunked_prefill_tokens"] or 0) > 0
    graph = known.get("cuda_graph_config")
    decode = graph.get("decode") if isinstance(graph, dict) else None
    if isinstance(decode, dict) and not known.get("disable_cuda_graph") and out.get("device") == "cuda":
        out["cuda_graph_max_batch"] = decode.get("max_bs")
    return out


def differences(resolved: Mapping[str, Any], config: ServingConfig, speculation: Mapping[str, Any]) -> tuple[str, ...]:
    """One line for each setting in effect that is not what `config` asked for; `speculation` are SGLang's own names and values.

    What the server did not say is not judged. An adaptive server changes steps and verified tokens by design.
    """
    asked: dict[str, Any] = {
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel": config.tensor_parallel,
        "prefix_caching": config.prefix_caching,
        "chunked_prefill": config.chunked_prefill,
        "speculative_algorithm": speculation.get("speculative_algorithm"),
    }
    if not resolved.get("speculative_adaptive"):
        asked |= speculation
    if config.weight_quantization != "none":
        asked["quantization"] = config.weight_quantization
    out = [
        f"asked for {name} {value}, SGLang runs with {resolved[name]}"
        for name, value in asked.items()
        if name in resolved and resolved[name] != value
    ]
    if (config.extra.get("adaptive") or config.extra.get("k_schedule")) and resolved.get("speculative_adaptive") is False:
        out.append("SGLang dropped the K schedule: it runs with one K at every batch size")
    most = resolved.get("cuda_graph_max_batch")
    if most is not None and most < config.max_num_seqs:
        out.append(
            f"CUDA graphs end at batch size {most}, up to {config.max_num_seqs} requests may run: larger batches are slower"
        )
    return tuple(out)


def forced_acceptance(environment: Mapping[str, str]) -> tuple[str, ...]:
    """A warning where SGLang is told to fake acceptance: its text is then not the target's."""
    length = environment.get("SGLANG_SIMULATE_ACC_LEN")
    try:
        forced = length is not None and float(length) > 0
    except ValueError:
        forced = False
    return (
        (f"acceptance is forced to {length} tokens a step (SGLANG_SIMULATE_ACC_LEN): the text is not the target's",)
        if forced
        else ()
    )


def request_counts(meta_info: Mapping[str, Any]) -> SpecCounters:
    """Counts of one request from the `meta_info` of /generate, under the key names of 0.5.4 to 0.5.23.

    A request without speculation has no such keys; its decode steps are then unknown, not 0. `spec_accept_length` of SGLang is
    completion tokens ÷ verification steps, the first token included; `SpecCounters.tau` leaves that token out.
    """

    def first(*names: str) -> int | None:
        return next((int(meta_info[name]) for name in names if meta_info.get(name) is not None), None)

    steps = first("spec_verify_ct") or None
    return SpecCounters(
        generated_tokens=first("completion_tokens"),
        first_tokens=1 if first("completion_tokens") else None,
        decode_steps=steps,
        drafted_steps=steps,
        draft_tokens=first("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
        accepted_tokens=first("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"),
        accepted_per_position=_by_position(
            meta_info.get("spec_correct_drafts_histogram") or meta_info.get("spec_accept_histogram")
        ),
    )


def _by_position(histogram: Any) -> tuple[int, ...] | None:
    """[steps with 0, 1, 2, ... drafts accepted] -> [steps in which position 1, 2, ... was accepted]."""
    if not isinstance(histogram, list) or len(histogram) < 2:
        return None
    return tuple(sum(histogram[position:]) for position in range(1, len(histogram)))
