"""Azure LLM inference traces (github.com/Azure/AzurePublicDataset): `TIMESTAMP,ContextTokens,GeneratedTokens` (2023 with seven
digits of a second, 2024 with an offset and without digits on whole seconds), and `NumImages` in the multimodal trace of 2025.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from workloads.csv_table import counts, table_batches
from workloads.rows import Batch
from workloads.source import Source

_COLUMNS = {
    "timestamp": "time",
    "contexttokens": "input_tokens",
    "generatedtokens": "output_tokens",
    "numimages": "images",
}


def matches(source: Source) -> bool:
    return {"timestamp", "contexttokens", "generatedtokens"} <= set(source.header)


def read(source: Source) -> Iterator[Batch]:
    for batch, found in table_batches(source, _COLUMNS):
        counts(batch, found, "output_tokens", "bad_output_tokens", zero="failed_upstream")
        counts(batch, found, "input_tokens", "bad_input_tokens")
        if "images" in found:
            found["images"] = images(found["images"])
        batch.columns = {"time": found.pop("time"), **found, **batch.columns}
        yield batch


def images(values: pa.Array) -> pa.Array:
    """Whole numbers; null where there is none."""
    return pa.array([int(v) if v.strip().isdecimal() and len(v) < 10 else None for v in values.to_pylist()], pa.int64())
