"""Checks before any engine starts: does this draft fit this target and this workload? No GPU, no server, no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from backends import checkpoint as checkpoints
from backends import draft_checks as checks
from backends.checkpoint import Checkpoint
from backends.findings import Finding
from backends.memory import MemoryEstimate, estimate
from backends.tokenizers_match import compare_tokenizers
from backends.types import NEEDS_DRAFT, ServingConfig, WorkloadFacts
from backends.vllm import REFUSED_WITH_SPECULATION

_LEVELS = ("error", "warning", "info")


def preflight(
    config: ServingConfig,
    facts: WorkloadFacts,
    *,
    outputs: Collection[str] = (),
    gpu_memory_bytes: int | None = None,
) -> list[Finding]:
    """Everything that is known to be wrong, or worth knowing, about `config` before it runs; the gravest first.

    `outputs` are texts that the trace recorded as completions; `gpu_memory_bytes` the memory of one GPU, for a prediction of
    the KV cache. A model that is not on this machine is not looked at, which is said in a finding.

    Raises:
        ConfigError: a model directory that cannot be read.
    """
    return sorted(_findings(config, facts, outputs, gpu_memory_bytes), key=lambda finding: _LEVELS.index(finding.level))


def _findings(
    config: ServingConfig, facts: WorkloadFacts, outputs: Collection[str], gpu_memory_bytes: int | None
) -> Iterator[Finding]:
    if config.variant != "off":
        yield from _sampling(config, facts)
    target = checkpoints.read(config.model)
    if target is None:
        yield _not_here(config.model)
        return
    yield from _target(target, facts)
    draft = _draft_name(config)
    head = checkpoints.read(draft) if draft else None
    if draft and head is None:
        yield _not_here(draft)
    yield from checks.check_quantization(target, head, config)
    yield from checks.check_k(target, head, config)
    if head is not None:
        yield from _pair(target, head, config, facts, outputs)
    if gpu_memory_bytes is not None and target.tensors:
        yield from _memory(target, head, config, facts, gpu_memory_bytes)


def _draft_name(config: ServingConfig) -> str | None:
    """None also for the reference engine's own copies of the target, which fit by construction."""
    if config.variant not in NEEDS_DRAFT | {"mtp"} or config.draft is None or config.draft.startswith("self-"):
        return None
    return config.draft


def _pair(
    target: Checkpoint, draft: Checkpoint, config: ServingConfig, facts: WorkloadFacts, outputs: Collection[str]
) -> Iterator[Finding]:
    is_head = config.variant in checks.HEADS
    tokenizer = list(compare_tokenizers(target, draft, shares_embedding=is_head))
    yield from tokenizer
    if not is_head and not any(finding.level == "error" for finding in tokenizer):
        yield from checks.check_embedding_size(target, draft, config)
    if is_head:
        yield from checks.check_hidden_size(target, draft)
        yield from checks.check_layer_ids(target, draft, config.backend)
        yield from checks.check_draft_vocabulary(target, draft, outputs)
        yield from checks.check_declared_base(target, draft)
    if config.variant not in ("medusa", "draft_model"):
        yield from checks.check_rope(target, draft)
    if config.variant != "medusa":  # its heads have no positions
        yield from checks.check_context(draft, _longest(facts))


def _target(target: Checkpoint, facts: WorkloadFacts) -> Iterator[Finding]:
    limit, longest = checks.context_limit(target.decoder), _longest(facts)
    if limit and longest and longest > limit:
        yield Finding(
            "warning",
            "context",
            f"the longest request has {longest} tokens, {target.name} takes {limit}",
            "the engine refuses such requests, and they count as failed",
            "leave them out, or lower their output limit",
        )
    if not target.chat_template:
        yield Finding(
            "warning",
            "chat_template",
            f"{target.name} has no chat template",
            "chat requests are refused, or rendered in another way than in production",
            "serve the instruction-tuned model, or give the template in its tokenizer_config.json",
        )
    if not target.tensors:
        yield Finding(
            "warning",
            "weights",
            f"{target.path} holds no safetensors weights",
            "an engine that reads no other format does not start",
            "check that the download is whole",
        )


def _sampling(config: ServingConfig, facts: WorkloadFacts) -> Iterator[Finding]:
    refused = sorted(facts.sampling_parameters.intersection(REFUSED_WITH_SPECULATION)) if config.backend == "vllm" else []
    if refused:
        yield Finding(
            "error",
            "sampling",
            f"requests of the trace use {', '.join(refused)}",
            "vLLM answers them with HTTP 400 when it speculates",
            "drop the parameter from the trace if production can do without it; else speculation is not for this traffic",
        )
    if "logprobs" in facts.sampling_parameters:
        yield Finding(
            "info",
            "sampling",
            "requests of the trace ask for logprobs",
            "some vLLM versions do not speculate on such requests, and acceptance then counts the others alone",
            "compare tau with and without them",
        )


def _memory(
    target: Checkpoint, draft: Checkpoint | None, config: ServingConfig, facts: WorkloadFacts, gpu_memory_bytes: int
) -> Iterator[Finding]:
    def of(head: Checkpoint | None) -> MemoryEstimate:
        return estimate(
            target,
            head,
            gpu_memory_bytes=gpu_memory_bytes,
            kv_cache_dtype=config.kv_cache_dtype,
            weight_quantization=config.weight_quantization,
            draft_layers=0 if config.variant == "medusa" else 1 if config.variant in ("eagle2", "eagle3") else None,
            tensor_parallel=config.tensor_parallel,
        )

    off, on = of(None), of(draft)
    if on.kv_tokens <= 0:
        yield Finding(
            "error",
            "memory",
            f"predicted: weights of {on.weight_bytes / 2**30:.1f} GiB leave no KV cache in {config.tensor_parallel} × "
            f"{gpu_memory_bytes / 2**30:.0f} GiB",
            "the engine runs out of memory while it starts",
            "quantize the weights, add GPUs (--tensor-parallel), or draft without a model (ngram, suffix)",
        )
        return
    longest = _longest(facts)
    ceiling = (
        f", {off.kv_tokens // longest} without and {on.kv_tokens // longest} with draft requests of {longest}"
        if longest
        else ""
    )
    yield Finding(
        "info",
        "memory",
        f"predicted KV cache: {off.kv_tokens} tokens without draft, {on.kv_tokens} with it{ceiling}",
        f"the draft costs {1 - on.kv_tokens / off.kv_tokens:.1%} of the cache, and so of the batch size where memory is the limit",
        "compare with the KV-cache tokens that the trial reports",
    )


def _longest(facts: WorkloadFacts) -> int | None:
    if facts.max_input_tokens is None:
        return None
    return facts.max_input_tokens + (facts.max_output_tokens or 0)


def _not_here(name: str) -> Finding:
    return Finding(
        "info",
        "not_checked",
        f"{name} is neither a directory nor in the local model cache",
        "its tokenizer, shapes and context were not compared",
        "download it first to have it checked",
    )
