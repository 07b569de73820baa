"""What the report of a large run costs: ``python -m benchmarks.report [TRIALS] [REQUESTS]`` (default 200 × 10,000).

The run is written once, then rendered in a process of its own, whose peak memory is what is printed.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMITS = {"seconds": 20.0, "peak_gb": 2.0, "html_mb": 3.0}


def build(folder: Path, trials: int, requests: int) -> int:
    """A run of about `trials` trials with `requests` requests each; returns how many trials it has."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "reports"))
    from run_builder import RunSpec, build_run

    batch_sizes = (1, 2, 4, 8, 16, 32, 48, 64)
    cells = max((trials - 3 * len(batch_sizes) - 2) // (3 * len(batch_sizes)), 1)  # values of K for three variants
    spec = RunSpec(
        variants=("ngram", "draft_model", "eagle3"),
        k=tuple(range(1, cells + 1)),
        batch_sizes=batch_sizes,
        requests=requests,
        search_requests=requests,
        chunks=False,
    )
    build_run(folder, spec)
    return len(list((folder / "trials").iterdir()))


def render(folder: Path) -> None:
    """Render and print seconds (with those of CPU time), peak memory of this process, and the size of the page."""
    begun, used = time.perf_counter(), time.process_time()
    from reports import render as render_report

    render_report(folder)
    measured = {
        "seconds": time.perf_counter() - begun,
        "cpu_s": time.process_time() - used,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "html_mb": (folder / "report.html").stat().st_size / 1e6,
    }
    for name, value in measured.items():
        print(f"{name:>8}: {value:7.2f}" + (f"  (limit {LIMITS[name]:g})" if name in LIMITS else ""))
    if any(measured[name] > limit for name, limit in LIMITS.items()):
        raise SystemExit("over the limit")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--render"]:
        render(Path(arguments[1]))
        return
    trials, requests = (int(a) for a in (*arguments, *("200", "10000")[len(arguments) :]))
    with tempfile.TemporaryDirectory() as folder:
        found = build(Path(folder), trials, requests)
        print(f"{found} trials with records, {requests:,} requests each")
        raise SystemExit(
            subprocess.run([sys.executable, "-m", "benchmarks.report", "--render", folder], check=False).returncode
        )


if __name__ == "__main__":
    main(sys.argv[1:])
