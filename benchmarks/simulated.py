"""How fast the simulated engine runs in virtual time, and whether its two ways to run agree.

python benchmarks/simulated.py throughput
python benchmarks/simulated.py agreement
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends.openai_server import listen
from backends.simulated.presets import PRESETS
from backends.simulated.virtual import SimulatedRequest, simulate
from backends.simulated.world import World, dump_world, with_limits

# Every 5th percentile of ContextTokens in the Azure LLM inference trace 2023, conversation (19,366 requests, mean 1155;
# AzurePublicDataset, CC-BY-4.0; Patel et al., Splitwise, ISCA 2024).
AZURE_INPUT_TOKENS = (
    *(2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020),
    *(1045, 1071, 1097, 1130, 1189, 1315, 1876, 2734, 4083, 14050),
)


def azure_inputs(rng: np.random.Generator, count: int) -> list[int]:
    grid = np.linspace(0, 1, len(AZURE_INPUT_TOKENS))
    return np.interp(rng.random(count), grid, AZURE_INPUT_TOKENS).astype(int).tolist()


def at_utilisation(world: World, variant: str, k: int, share: float, inputs: list[int], outputs: int) -> list[SimulatedRequest]:
    """Poisson arrivals at a share of the rate that the engine sustains when it is never idle."""
    probe = [SimulatedRequest(0.0, tokens, outputs) for tokens in inputs[:4000]]
    full = simulate(world, probe, variant=variant, k=k, concurrency=2 * world.limits.max_num_seqs)
    rate = share * len(probe) / float(full.last_token_s.max())
    gaps = np.random.default_rng(1).exponential(1 / rate, len(inputs))
    return [SimulatedRequest(a, n, outputs) for a, n in zip(np.cumsum(gaps).tolist(), inputs, strict=True)]


def throughput(count: int) -> None:
    """Simulated requests a minute on one core: 64 output tokens, Azure conversation inputs, 60 % utilisation."""
    inputs = azure_inputs(np.random.default_rng(0), count)
    print(f"{count} requests of 64 output tokens, Azure conversation input lengths, 60 % utilisation")
    cases = [("h100-llama-8b", "off", 0), ("h100-llama-8b", "eagle3", 3), ("a100-llama-8b", "off", 0), ("small", "off", 0)]
    for name, variant, k in [*cases, ("small", "draft_model", 4), ("small", "ngram", 4)]:
        world = with_limits(PRESETS[name](), prefix_caching=False)
        work = at_utilisation(world, variant, k, 0.6, inputs, 64)
        begun = time.process_time()
        run = simulate(world, work, variant=variant, k=k)
        seconds = time.process_time() - begun
        print(
            f"{name:15} {variant:12} K={k}: {count / seconds * 60:11,.0f} requests a minute"
            f"  (mean batch {run.mean_batch:5.1f}, tau {run.counters.tau:.2f}, TTFT p50 {np.median(run.ttft_s) * 1e3:.0f} ms)"
        )


async def _send(http: httpx.AsyncClient, start_s: float, index: int, request: SimulatedRequest) -> None:
    body = {"model": "simulated", "max_tokens": request.output_tokens, "ignore_eos": True, "stream": True}
    body |= {"prompt": f"{index:04d}" * request.input_tokens}  # the simulated tokenizer has four characters a token
    await asyncio.sleep(start_s + request.arrival_s - time.monotonic())
    async with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": str(index)}) as response:
        async for _ in response.aiter_raw():
            pass


async def _replay(url: str, work: list[SimulatedRequest]) -> None:
    """Send everything on schedule."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        while True:
            try:
                if (await http.get("/health")).status_code == 200:
                    break
            except httpx.TransportError:
                await asyncio.sleep(0.1)
        start_s = time.monotonic() + 0.5
        await asyncio.gather(*(_send(http, start_s, i, request) for i, request in enumerate(work)))


def real_time(world: World, work: list[SimulatedRequest], variant: str, k: int) -> np.ndarray:
    """Times of receipt, first and last token of each request in a real-time server's own log: a row for each of the three."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "world.json", Path(folder) / "truth.jsonl"
        file.write_text(dump_world(world))
        with listen("127.0.0.1", 0) as sock:
            port = sock.getsockname()[1]
        command = [sys.executable, "-m", "backends.simulated", "--world", str(file), "--port", str(port), "--truth", str(log)]
        with subprocess.Popen([*command, "--variant", variant, "--k", str(k)], stdout=subprocess.DEVNULL) as server:
            asyncio.run(_replay(f"http://127.0.0.1:{port}", work))
            server.terminate()
        lines = {int(line["request_id"]): line for line in map(json.loads, log.read_text().splitlines())}
    times = np.array([[lines[i][name] for i in range(len(work))] for name in ("received_s", "first_token_s", "last_token_s")])
    late = np.array([lines[i]["first_token_s"] - lines[i]["model_first_s"] for i in range(len(work))])
    print(f"    first chunks left the server {np.median(late) * 1e3:.2f} ms (p95 {np.quantile(late, 0.95) * 1e3:.2f}) late")
    return times


def agreement(count: int) -> None:
    """Virtual time against real time: p50 and p95 of TTFT and E2E for the requests as the server received them.

    The virtual run takes the logged times of receipt, so that the client's own lateness is in neither.
    """
    world = with_limits(PRESETS["small"](), prefix_caching=False)
    inputs = [min(tokens, 4000) for tokens in azure_inputs(np.random.default_rng(3), count)]
    for variant, k in (("off", 0), ("draft_model", 4)):
        work = at_utilisation(world, variant, k, 0.5, inputs, 64)
        received, first, last = real_time(world, work, variant, k)
        order = np.argsort(received)
        seen = [replace(work[i], arrival_s=float(received[i] - received.min())) for i in order]
        run = simulate(world, seen, variant=variant, k=k)
        print(f"{variant} K={k}: {count} requests over {work[-1].arrival_s:.0f} s, mean batch {run.mean_batch:.1f}")
        for name, virtual, real in (("TTFT", run.ttft_s, first - received), ("E2E", run.e2e_s, last - received)):
            for q in (0.5, 0.95):
                a, b = float(np.quantile(virtual, q)), float(np.quantile(real, q))
                print(f"    {name:4} p{q * 100:.0f}: virtual {a * 1e3:7.1f} ms, real time {b * 1e3:7.1f} ms, {b / a - 1:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("throughput", "agreement"))
    parser.add_argument("--requests", type=int)
    args = parser.parse_args()
    if args.what == "throughput":
        throughput(args.requests or 100_000)
    else:
        agreement(args.requests or 300)


if __name__ == "__main__":
    main()
