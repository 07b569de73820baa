"""The options of `tune.py gate` as plain parameters: text in, exit code out."""

from __future__ import annotations

from harness.gate.run import GateSettings, run_gate
from harness.settings import parse_duration, parse_numbers


def gate(
    *,
    baseline: str | None = None,
    candidate: str | None = None,
    record: str | None = None,
    trace: str | None = None,
    profile: str = "pr",
    budget: str | None = None,
    out: str = "runs/gate",
    band: float = 0.03,
    acceptance_band: float = 0.02,
    lossless: bool = True,
    requests: int | None = None,
    batch_sizes: str | None = None,
    max_output_tokens: int | None = None,
    endpoint_backend: str = "vllm",
    seed: int = 0,
) -> int:
    """Compare two settings, endpoints, revisions or a stored baseline; or record one.

    Returns:
        0 pass (or recorded), 3 regression, 4 inconclusive.

    Raises:
        ConfigError, WorkloadError: exit code 2. BackendError: exit code 1, the baseline could not be measured.
    """
    return run_gate(
        GateSettings(
            baseline=baseline,
            candidate=candidate,
            record=record,
            trace=trace,
            profile=profile,
            budget_s=parse_duration("--budget", budget) if budget else None,
            out=out,
            band=band,
            acceptance_band=acceptance_band,
            lossless=lossless,
            requests=requests,
            batch_sizes=parse_numbers("--batch-sizes", batch_sizes) if batch_sizes else None,
            max_output_tokens=max_output_tokens,
            endpoint_backend=endpoint_backend,
            seed=seed,
        )
    )
