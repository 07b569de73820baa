"""The shape of `result.json`, checked before it is written and before it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

SCHEMA_PATH = Path(__file__).with_name("result.schema.json")


class ResultError(ValueError):
    """A result that breaks the schema. One line: where, and what is wrong."""


@cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads(SCHEMA_PATH.read_text(encoding="utf-8")))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON type")


def validate(result: Mapping[str, Any]) -> None:
    """Check `result` as JSON would hold it (tuples are arrays).

    Raises:
        ResultError: a name, type or rule of the schema is broken, or a number is NaN or infinite.
    """
    try:
        data = json.loads(json.dumps(result, allow_nan=False, default=_plain))
    except (TypeError, ValueError) as error:
        raise ResultError(f"result.json: cannot be written as JSON: {error}") from None
    errors = list(_validator().iter_errors(data))
    if errors:
        worst = best_match(errors)
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in worst.absolute_path).lstrip(".")
        raise ResultError(f"result.json: {where or 'top level'}: {worst.message[:300]}")
