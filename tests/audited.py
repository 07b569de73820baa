"""The losslessness audit as a run makes it, on two servers that a test starts: on first, then off and off's control."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.process import Server, free_port
from backends.registry import ADAPTERS
from backends.types import ServingConfig
from harness.answers import ask_all
from harness.audits import AT_ONCE, CONTROL_AT_ONCE
from harness.losslessness import entry
from workloads.types import Request

POOLS = Path(__file__).parents[1] / "workloads" / "pools"


def audited(on: ServingConfig, requests: Sequence[Request], folder: Path, command: tuple[str, ...] = ()) -> dict[str, Any]:
    """What `result.json` would hold of `on` against its off."""
    off = replace(on.off(), extra={k: v for k, v in on.extra.items() if k != "forced_acceptance"})
    with _running(on, folder / "on", command) as server:
        answers = ask_all(server.endpoint, requests, at_once=AT_ONCE)
    with _running(off, folder / "off", command) as server:
        plain = ask_all(server.endpoint, requests, at_once=AT_ONCE, gaps=True)
        control = ask_all(server.endpoint, requests, at_once=CONTROL_AT_ONCE)
    return entry(answers, plain, control, shapes=(AT_ONCE, CONTROL_AT_ONCE))


def _running(config: ServingConfig, folder: Path, command: tuple[str, ...]) -> Server:
    adapter, port = ADAPTERS[config.backend], free_port()
    folder.mkdir(parents=True)
    launch = adapter.launch(config, port=port, command=command or adapter.DEFAULT_COMMAND, base_args=())
    return Server.start(launch, port=port, folder=folder, backend=config.backend)


def prompts(*pools: str, each: int) -> list[Request]:
    """The first prompts of each of these bundled pools."""
    rows = [json.loads(line) for pool in pools for line in (POOLS / f"{pool}.jsonl").read_text().splitlines()[:each]]
    return [Request(index=i, arrival_s=None, messages=row["messages"], max_tokens=32) for i, row in enumerate(rows)]
