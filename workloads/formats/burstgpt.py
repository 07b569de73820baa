"""BurstGPT (github.com/HPMLL/BurstGPT), versions 1 and 2, and 3 with `Session ID` and `Elapsed time`, read by column name.
`Timestamp` is seconds. Rows without response tokens are requests that failed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from workloads.csv_table import counts, table_batches
from workloads.rows import Batch
from workloads.source import Source
from workloads.times import number_in

_COLUMNS = {
    "timestamp": "time",
    "sessionid": "session_id",
    "elapsedtime": "source_latency_s",
    "requesttokens": "input_tokens",
    "responsetokens": "output_tokens",
    "logtype": "category",
}


def matches(source: Source) -> bool:
    return {"timestamp", "requesttokens", "responsetokens"} <= set(source.header)


def read(source: Source) -> Iterator[Batch]:
    for batch, found in table_batches(source, _COLUMNS):
        counts(batch, found, "output_tokens", "bad_output_tokens", zero="failed_upstream")
        counts(batch, found, "input_tokens", "bad_input_tokens")
        for name in ("session_id", "category"):
            if name in found:
                found[name] = _text(found[name])
        if "source_latency_s" in found:
            latencies = [number_in(value) for value in found["source_latency_s"].to_pylist()]
            found["source_latency_s"] = pa.array(latencies, pa.float64())
        batch.columns = {"time": seconds(found.pop("time")), **found, **batch.columns}
        yield batch


def _text(values: pa.Array) -> pa.Array:
    stripped = pc.utf8_trim_whitespace(values).cast(pa.large_string())
    return pc.if_else(pc.equal(stripped, ""), None, stripped)


def seconds(values: pa.Array) -> pa.Array:
    """Numbers; NaN where there is none, which the loader counts as a bad time."""
    try:
        return values.cast(pa.float64())
    except pa.ArrowInvalid:
        return pa.array([float("nan") if (n := number_in(v)) is None else float(n) for v in values.to_pylist()], pa.float64())
