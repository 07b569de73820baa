"""One result of a preflight check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`error`: the configuration cannot give what it is for, do not start it; `warning`: it may; `info`: good to know."""

    level: Level
    check: str  # tokenizer, vocabulary, hidden_size, layer_ids, draft_vocabulary, context, rope, quantization, ...
    evidence: str
    consequence: str
    action: str
    value: float | None = None  # the figure behind the evidence, where it has one

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        return f"{self.level}: {self.check}: {self.evidence}; {self.consequence}; {self.action}"
