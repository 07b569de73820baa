"""Text and numbers for people: milliseconds, units, a dash for what was not measured, and nothing that a browser could run."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

DASH = "–"

_BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")
_TEXT_KEYS = frozenset(
    {"prompt", "prompts", "messages", "text", "texts", "output", "output_text", "completion", "content", "example", "examples"}
)
"""Keys under which a section of a result may hold text of the workload."""


def clean(value: Any, *, show_text: bool) -> Any:
    """A copy of a JSON value that is safe to show.

    Control characters and bidirectional overrides become visible escapes (``\\x1b``), user names and passwords in URLs are cut
    out, and, without `show_text`, whatever is stored under a name that holds prompt or output text is dropped.
    """
    if isinstance(value, str):
        return _URL_PASSWORD.sub("", "".join(_visible(c) for c in value))
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if show_text or k not in _TEXT_KEYS}
        return {clean(k, show_text=show_text): clean(v, show_text=show_text) for k, v in kept.items()}
    if isinstance(value, list | tuple):
        return [clean(v, show_text=show_text) for v in value]
    return value


def _visible(character: str) -> str:
    if character in "\n\t":
        return character
    if character in _BIDI_CONTROLS or unicodedata.category(character) in ("Cc", "Cs"):
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    return character


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, thousands grouped, never in exponents: 1,234 · 56.7 · 0.0123."""
    if value is None:
        return DASH
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if value == 0:
        return "0"
    decimals = max(digits - len(str(int(abs(value)))) if abs(value) >= 1 else digits, 0)
    return f"{value:,.{decimals}f}"


def ms(value_s: float | None) -> str:
    """Seconds as milliseconds, without the unit."""
    return DASH if value_s is None else number(value_s * 1e3)


def seconds(value_s: float | None) -> str:
    """A duration with its unit: 42 s, 7.5 min, 3.2 h."""
    if value_s is None:
        return DASH
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60)):
        if value_s < limit:
            return f"{number(value_s / size, 2)} {unit}"
    return f"{number(value_s / 3600, 2)} h"


def interval(ci: Sequence[float] | None, show: Any = number) -> str:
    """``412 to 455``, or nothing where the sample gives no interval."""
    return "" if ci is None else f"{show(ci[0])} to {show(ci[1])}"


def tau(value: float | None) -> str:
    """Tokens per step, to the hundredth: 2.98, and 1.00 for off."""
    return DASH if value is None else f"{value:.2f}"


def factor(value: float | None) -> str:
    """A speed-up: 1.42×."""
    return DASH if value is None else f"{value:.2f}×"


def percent(share: float | None) -> str:
    return DASH if share is None else f"{share * 100:.1f} %"


_ACRONYMS: Mapping[str, str] = {
    "cpu": "CPU", "gpu": "GPU", "gib": "GiB", "kv": "KV", "ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "itl": "ITL",
    "slo": "SLO", "tau": "τ", "k": "K", "ci95": "95 % interval", "usd": "USD",
}  # fmt: skip


def words(name: str) -> str:
    """``first_position_acceptance`` -> ``First position acceptance``; the unit of a duration is left to the value."""
    if name.endswith("_s") and not name.endswith("_per_s"):
        name = name.removesuffix("_s")
    text = " ".join(_ACRONYMS.get(word, word) for word in name.split("_") if word)
    return text[:1].upper() + text[1:]


def value_text(name: str, value: Any) -> str:
    """A plain value of a section whose shape is open, read by the unit in its name (`_s` seconds, `_share` a share of 1)."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name.endswith("_s") and not name.endswith("_per_s"):
            return f"{ms(value)} ms" if value < 10 else seconds(value)
        return percent(value) if name.endswith("_share") else number(value)
    if isinstance(value, list):
        return ", ".join(value_text(name, v) for v in value) or DASH
    return str(value)


VARIANT_NAMES: Mapping[str, str] = {
    "off": "off",
    "ngram": "n-gram",
    "suffix": "suffix",
    "draft_model": "draft model",
    "medusa": "Medusa",
    "eagle2": "EAGLE-2",
    "eagle3": "EAGLE-3",
    "p_eagle": "P-EAGLE",
    "mtp": "MTP",
    "dflash": "DFlash",
    "dspark": "DSpark",
}


def config_label(config: Mapping[str, Any] | None) -> str:
    """``draft model, K = 4, int8 weights``."""
    if config is None:
        return DASH
    parts = [VARIANT_NAMES.get(config["variant"], str(config["variant"]))]
    if config["k"]:
        parts.append(f"K = {config['k']}")
    if config.get("topk", 1) > 1:
        parts.append(f"top-k {config['topk']}, {config.get('num_draft_tokens') or '?'} nodes")
    for name, title in (("weight_quantization", "weights"), ("draft_quantization", "draft")):
        if config.get(name, "none") != "none":
            parts.append(f"{config[name]} {title}")
    if config.get("kv_cache_dtype", "auto") != "auto":
        parts.append(f"{config['kv_cache_dtype']} KV cache")
    return ", ".join(parts)


def group_label(config: Mapping[str, Any]) -> str:
    """Engine and quantization: what a speed-up is never taken across."""
    quantization = config.get("weight_quantization", "none")
    name = config["backend"] if quantization == "none" else f"{config['backend']}, {quantization} weights"
    cache = config.get("kv_cache_dtype", "auto")
    return name if cache == "auto" else f"{name}, {cache} KV cache"


def load_label(load: Mapping[str, Any]) -> str:
    if load["mode"] == "closed":
        return f"closed loop, {load['concurrency']} at a time"
    scale = load.get("time_scale")
    return "trace's own arrivals" if scale in (None, 1, 1.0) else f"trace's arrivals, time × {number(scale)}"
