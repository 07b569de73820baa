"""Faults that a simulated server can be told to show, by name: ``--fault NAME[=VALUE][@N]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backends.types import ConfigError

FAULTS: Mapping[str, tuple[float | None, str]] = {
    # Of the engine; @N: at the N-th request (default 1).
    "slow_first": (2.0, "the engine does nothing for VALUE seconds when the first request comes"),
    "stall": (0.5, "the engine does nothing for VALUE seconds when request N comes"),
    "counter_reset": (None, "all counters fall to 0 when request N comes"),
    "crash": (None, "the process dies after the first token of request N"),
    "crash_loading": (None, "the process dies while it loads, out of memory"),
    "hang_at_start": (None, "the server answers but never becomes ready"),
    "no_spec_series": (None, "the statistics page has no speculation series"),
    # Of a request; @N: every N-th request (default every one).
    "empty_output": (None, "no token, finish_reason stop"),
    "early_eos": (0.25, "stops after VALUE of its tokens, finish_reason stop"),
    "http_error": (503.0, "answers with status VALUE"),
    "role_first": (None, "the chat role is sent at once, long before the first token"),
    "reasoning": (3.0, "the first VALUE chunks are reasoning"),
    "tool_call": (None, "all output is a tool call"),
    "bundled_first": (2.0, "the first VALUE chunks come as one"),
    "usage_missing": (None, "no usage, even where asked for"),
    "usage_last_choice": (None, "usage on the last chunk that has a choice"),
    "usage_every": (None, "usage on every chunk"),
    "error_event": (3.0, "after VALUE chunks an error event inside HTTP 200"),
    "cut": (3.0, "the connection closes after VALUE chunks"),
    "no_done": (None, "the stream ends without [DONE]"),
    "crlf": (None, "CRLF line ends and comment lines"),
    "utf8_split": (None, "text of several bytes a character, cut inside a character into two packets"),
}
"""Default VALUE (None: takes none) and meaning of every fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    value: float
    at: int  # N

    def hits(self, number: int) -> bool:
        """Whether the `number`-th request (from 1) has this fault of a request."""
        return number % self.at == 0


def parse_fault(text: str) -> Fault:
    """``stall=0.5@20`` → Fault.

    Raises:
        ConfigError: unknown name, or a part that is no number.
    """
    head, _, at = text.partition("@")
    name, _, value = head.partition("=")
    if name not in FAULTS:
        raise ConfigError(f"--fault {text}: unknown fault '{name}': choose from {', '.join(FAULTS)}")
    default = FAULTS[name][0]
    if value and default is None:
        raise ConfigError(f"--fault {text}: {name} takes no value")
    try:
        fault = Fault(name, float(value) if value else default or 0.0, int(at) if at else 1)
    except ValueError:
        raise ConfigError(f"--fault {text}: write {name}[=NUMBER][@N]") from None
    if fault.at < 1:
        raise ConfigError(f"--fault {text}: @N counts from 1")
    return fault


def find(faults: Sequence[Fault], name: str) -> Fault | None:
    return next((fault for fault in faults if fault.name == name), None)
