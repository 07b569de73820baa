"""What a trace's text is worth as evidence: grade A, B or C."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from workloads.types import ContentGrade


def grade_of(table: pa.Table, declared: str | None = None) -> tuple[ContentGrade, str]:
    """(grade, reason). A: real text, arrivals and sampling, outputs that end by themselves. B: real text, something else made up
    or unknown. C: no text, or text made up. `declared` is what the source says of itself; it can only lower the grade."""
    if not any(_known(table, name) for name in ("messages", "prompt", "token_ids")):
        return "C", "no text: acceptance cannot be measured; --prompts POOL pairs the lengths with real prompts"
    if declared == "C":
        return "C", "the trace declares its text made up"
    if declared == "B":
        return "B", "real text, paired with arrivals or lengths from elsewhere, as the trace declares"
    missing = []
    if _known(table, "arrival_s") < table.num_rows:
        missing.append("arrivals" if not _known(table, "arrival_s") else "arrivals of some rows")
    if not _known(table, "sampling"):
        missing.append("sampling parameters")
    if missing:
        return "B", f"real text, but the trace does not record {' and '.join(missing)}"
    if pc.any(pc.match_substring_regex(table["sampling"], r'"(ignore_eos":true|min_tokens":[1-9])')).as_py():
        return "B", "real text, but lengths are forced (ignore_eos or min_tokens), so outputs do not end by themselves"
    return "A", "real text with recorded arrivals and sampling parameters; outputs end by themselves"


def _known(table: pa.Table, name: str) -> int:
    return table.num_rows - table[name].null_count if name in table.column_names else 0
