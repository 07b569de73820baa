"""Speed and memory of reading traces and of offline acceptance, as ratios within one run.

python -m benchmarks.workloads
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson

AZURE_ROWS, MOONCAKE_ROWS, WINDOW_ROWS = 1_000_000, 200_000, 10_000_000


def write_azure(path: Path, rows: int, *, mixed: bool = False) -> None:
    """Rows as the 2023 trace writes them, or with the 2024 trace's offsets and whole seconds without fraction."""
    with path.open("w", newline="") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
        for i in range(rows):
            s, tick = divmod(i * 360_000, 10**7)
            clock = f"{s // 3600 % 24:02}:{s // 60 % 60:02}:{s % 60:02}"
            day = 10 + s // 86_400
            fraction = "" if mixed and tick == 0 else f".{tick // 10:06}" if mixed else f".{tick:07}"
            file.write(f"2024-05-{day:02} {clock}{fraction}{'+00:00' if mixed else ''},{i % 4000 + 1},{i % 900 + 1}\r\n")


def write_mooncake(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(1, 48, rows)
    with path.open("wb") as file:
        for i, n in enumerate(blocks.tolist()):
            row = {"timestamp": i * 300, "input_length": n * 512 - 7, "output_length": 5, "hash_ids": list(range(i, i + n))}
            file.write(orjson.dumps(row) + b"\n")


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of some runs."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def peak_bytes(path: Path, window: str) -> int:
    """What reading `path` adds to the peak memory of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.workloads", "--peak", str(path), window]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_peak(path: str, window: str) -> None:
    from workloads.load import load_trace

    before = kib("VmRSS")
    trace = load_trace(path, window=(0.0, float(window)) if window else None)
    assert len(trace)
    print((kib("VmHWM") - before) * 1024)


def kib(name: str) -> int:
    """A line of this process's memory as Linux tells it. `getrusage` is no use here: its peak is that of the parent, if larger."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def reading(folder: Path) -> None:
    import pandas as pd

    from workloads.load import load_trace

    for name, mixed in (("Azure 2023", False), ("Azure 2024", True)):
        path = folder / "azure.csv"
        write_azure(path, AZURE_ROWS, mixed=mixed)
        ours = seconds(lambda path=path: load_trace(path))  # type: ignore[misc]
        theirs = seconds(lambda path=path: pd.read_csv(path, engine="pyarrow"))  # type: ignore[misc]
        memory = peak_bytes(path, "") / path.stat().st_size
        print(f"{name}, {AZURE_ROWS:,} rows: {ours:.2f} s, {ours / theirs:.2f} x pandas.read_csv, peak {memory:.1f} x file")
    path = folder / "mooncake.jsonl"
    write_mooncake(path, MOONCAKE_ROWS)
    ours = seconds(lambda: load_trace(path))
    theirs = seconds(lambda: [orjson.loads(line) for line in path.open("rb")])
    memory = peak_bytes(path, "") / path.stat().st_size
    print(f"Mooncake, {MOONCAKE_ROWS:,} rows: {ours:.2f} s, {ours / theirs:.2f} x orjson.loads, peak {memory:.1f} x file")


def window(folder: Path) -> None:
    path = folder / "long.csv"
    for rows in (WINDOW_ROWS // 10, WINDOW_ROWS):
        write_azure(path, rows)
        print(f"window of 60 s of {rows:,} rows: peak {peak_bytes(path, '60') / 2**20:.0f} MiB")


def acceptance() -> None:
    from harness.offline import Recorded, ngram_acceptance

    rng = np.random.default_rng(0)
    recorded = []
    for _ in range(10_000):  # 5 million output tokens, a third of each copied from its prompt
        prompt, output = rng.zipf(1.3, 500) % 30_000, rng.zipf(1.3, 500) % 30_000
        output[100:266] = prompt[50:216]
        recorded.append(Recorded(prompt, output))
    print(f"n-gram acceptance, 5,000,000 output tokens, K 1-8, n 1-4: {seconds(lambda: ngram_acceptance(recorded), 1):.1f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        measure_peak(*sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as name:
            reading(Path(name))
            if "--window" in sys.argv:
                window(Path(name))
        acceptance()
