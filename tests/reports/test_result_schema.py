"""What `result.json` may hold, and what it may not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from run_builder import RunSpec, result_of

from harness.result_schema import SCHEMA_PATH, ResultError, validate


@pytest.fixture
def result() -> dict[str, Any]:
    return copy.deepcopy(result_of(RunSpec(requests=12)).result)


def failed_trial(result: dict[str, Any]) -> dict[str, Any]:
    return next(t for t in result["trials"] if t["state"] == "FAIL")


def test_the_schema_is_itself_valid() -> None:
    import json

    Draft202012Validator.check_schema(json.loads(Path(SCHEMA_PATH).read_text()))


def test_a_realistic_run_is_valid(result: dict[str, Any]) -> None:
    assert {t["state"] for t in result["trials"]} == {"COMPLETE", "PRUNED", "FAIL", "INFEASIBLE"}
    validate(result)


def test_more_may_be_added_and_unmeasured_values_are_null(result: dict[str, Any]) -> None:
    result["trials"][0]["metrics"]["goodput_rps"] = None
    result["trials"][0]["metrics"]["ttft_s"]["p95_ci95"] = None
    result["new_section"] = {"x": 1}
    validate(result)


def test_tuples_and_numpy_numbers_are_what_json_makes_of_them(result: dict[str, Any]) -> None:
    result["trials"][0]["speculation"]["tau_ci95"] = (np.float32(1.0), 1.0)
    validate(result)


@pytest.mark.parametrize("state", ["FAIL", "INFEASIBLE"])
def test_a_failed_trial_cannot_carry_numbers(result: dict[str, Any], state: str) -> None:
    trial = failed_trial(result)
    trial["state"] = state
    trial["metrics"] = result["trials"][0]["metrics"]
    with pytest.raises(ResultError, match=r"trials\[\d+\]\.metrics"):
        validate(result)


def test_a_failed_trial_must_say_why(result: dict[str, Any]) -> None:
    failed_trial(result)["reason"] = None
    with pytest.raises(ResultError, match="reason"):
        validate(result)


def test_a_completed_trial_must_have_metrics(result: dict[str, Any]) -> None:
    result["trials"][0]["metrics"] = None
    with pytest.raises(ResultError, match=r"trials\[0\]\.metrics"):
        validate(result)


def test_nan_is_no_measurement(result: dict[str, Any]) -> None:
    result["trials"][0]["metrics"]["output_tokens_per_s"] = float("nan")
    with pytest.raises(ResultError, match="cannot be written as JSON"):
        validate(result)


def test_off_with_draft_tokens_is_refused(result: dict[str, Any]) -> None:
    result["trials"][0]["config"] = {**result["trials"][0]["config"], "variant": "off", "k": 3}
    with pytest.raises(ResultError, match=r"config"):
        validate(result)


def test_enable_below_batch_must_name_the_batch_size(result: dict[str, Any]) -> None:
    decision = result["decisions"][0]
    decision["verdict"], decision["below_batch"] = "enable_below_batch", None
    with pytest.raises(ResultError, match="below_batch"):
        validate(result)
