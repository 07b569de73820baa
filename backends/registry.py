"""Which engines the product can drive: the one table of adapters."""

from __future__ import annotations

from collections.abc import Mapping

from backends import sglang, tensorrt_llm, vllm
from backends.reference import adapter as reference
from backends.simulated import adapter as simulated
from backends.types import Adapter

ADAPTERS: Mapping[str, Adapter] = {
    "reference": reference,
    "vllm": vllm,
    "sglang": sglang,
    "tensorrt_llm": tensorrt_llm,
    "simulated": simulated,
}
