"""The table of trace formats: one entry here and one file for each. The first that matches reads the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workloads.formats import (
    azure,
    bailian,
    burstgpt,
    langfuse,
    litellm,
    mooncake,
    native,
    openai_batch,
    otel,
    prompt_set,
    ragpulse,
    sglang_log,
    sharegpt,
    trajectory,
    vllm_log,
)
from workloads.rows import Batch
from workloads.source import Source


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format. `exact_unit` is the unit of its times where its definition leaves no doubt; `usual_unit` is where files in
    other units are about, so that the numbers decide."""

    name: str
    title: str
    matches: Callable[[Source], bool]
    read: Callable[[Source], Iterator[Batch]]
    exact_unit: str | None = None
    usual_unit: str | None = None


_TABLE = (
    Format("azure", "Azure LLM inference 2023, 2024 and multimodal 2025", azure.matches, azure.read),
    Format("burstgpt", "BurstGPT 1, 2 and 3", burstgpt.matches, burstgpt.read, exact_unit="s"),
    Format("openai_batch", "OpenAI batch, requests and results", openai_batch.matches, openai_batch.read),
    Format("sglang_log", "SGLang request log (JSON)", sglang_log.matches, sglang_log.read),
    Format("vllm_log", "vLLM server log: arrivals and sampling", vllm_log.matches, vllm_log.read),
    Format("litellm", "LiteLLM StandardLoggingPayload", litellm.matches, litellm.read, usual_unit="s"),
    Format("langfuse", "Langfuse export", langfuse.matches, langfuse.read),
    Format("otel", "OpenTelemetry GenAI spans", otel.matches, otel.read, usual_unit="ns"),
    Format("bailian", "Bailian (Qwen) usage trace", bailian.matches, bailian.read, exact_unit="s"),
    Format("ragpulse", "RAGPulse", ragpulse.matches, ragpulse.read, exact_unit="s"),
    Format("mooncake", "Mooncake, also extended", mooncake.matches, mooncake.read, usual_unit="ms"),
    Format("trajectory", "agent trajectory", trajectory.matches, trajectory.read),
    Format("sharegpt", "ShareGPT, LMSYS-Chat-1M, WildChat", sharegpt.matches, sharegpt.read),
    Format("prompt_set", "Spec-Bench, MT-bench, SPEED-Bench, HumanEval, GSM8K", prompt_set.matches, prompt_set.read),
    Format("native", "native JSONL", native.matches, native.read),
)
FORMATS = {entry.name: entry for entry in _TABLE}


def detect(source: Source) -> Format:
    """The format of the file, from its content.

    Raises:
        WorkloadError: none matches.
    """
    for entry in _TABLE:
        if entry.matches(source):
            return entry
    names = ", ".join(FORMATS)
    if source.kind == "json_lines":
        for _ in source.records():  # a broken line is the likelier cause: name it
            pass
    raise source.error(None, f"is of no known format; choose one with --format: {names}")
