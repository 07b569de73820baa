"""Blocking HTTP for the few calls that start and question a server. Load is sent by the harness's own client, not by this."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

# A proxy named in the environment must not stand between the harness and a server on this machine.
_OPENER = build_opener(ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Reply:
    """Any answer of a server, errors included."""

    status: int
    body: str

    def json(self) -> Any:
        """The body as JSON; None where it is not."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def call(
    url: str, payload: Mapping[str, Any] | None = None, *, timeout_s: float = 5.0, api_key_env: str | None = None
) -> Reply | None:
    """GET `url`, or POST `payload` as JSON to it. None where no server answered within `timeout_s`.

    `api_key_env` names the environment variable that holds the key, which travels in the Authorization header alone.
    """
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(api_key_env) if api_key_env else None
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if payload is None else json.dumps(payload).encode()
    try:
        with _OPENER.open(Request(url, data=data, headers=headers), timeout=timeout_s) as response:
            return Reply(response.status, response.read().decode(errors="replace"))
    except HTTPError as error:
        with error:
            return Reply(error.code, error.read().decode(errors="replace"))
    except (OSError, ValueError):  # refused, timed out, cut off, not HTTP
        return None
