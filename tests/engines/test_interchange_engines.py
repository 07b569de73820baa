"""vLLM's and SGLang's own code reads the synthetic-acceptance settings that a report writes."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
from vllm_server import python as vllm_python

from reports.interchange import synthetic
from tests.engines.sglang_server import ENVIRONMENT, sglang_python

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

RATES = [0.82, 0.6522, 0.4803]
TRIAL: dict[str, Any] = {
    "config": {"variant": "eagle3", "k": 3},
    "speculation": {"position_rates": RATES, "tau": 1 + sum(RATES), "verify_steps": 1000},
}


def output_of(interpreter: str, code: str, env: dict[str, str]) -> Any:
    done = subprocess.run(
        [interpreter, "-c", code], check=False, capture_output=True, text=True, env={**os.environ, **env}, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_vllm_resolves_the_rates_to_themselves_and_the_length_to_the_same_tau() -> None:
    given = synthetic(TRIAL)["vllm"]["speculative_config"]
    k, rates = given["num_speculative_tokens"], given["synthetic_acceptance_rates"]
    code = (
        "import json; from vllm.config.speculative import SpeculativeConfig as S; r = S._resolve_synthetic_acceptance_rates;"
        f"print(json.dumps([r({k}, {rates!r}, None), r({k}, None, {1 + sum(rates)!r})]))"
    )
    by_rates, by_length = output_of(vllm_python(), code, {"VLLM_NO_USAGE_STATS": "1"})
    assert by_rates == rates
    assert 1 + sum(by_length) == pytest.approx(1 + sum(RATES))


def test_sglang_reads_the_length_the_method_and_the_token_mode() -> None:
    names = ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD", "SGLANG_SIMULATE_ACC_TOKEN_MODE")
    code = (
        f"import json; from sglang.srt.environ import envs;print(json.dumps([getattr(envs, name).get() for name in {names!r}]))"
    )
    length, method, mode = output_of(sglang_python(), code, {**ENVIRONMENT, **synthetic(TRIAL)["sglang"]["env"]})
    assert length == pytest.approx(1 + sum(RATES), abs=1e-4)
    assert (method, mode) == ("match-expected", "real-draft-token")
