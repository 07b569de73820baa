"""A drafter for vLLM's `custom_class` method whose acceptance is set from outside: it replays known text and spoils some of it.

``KNOWN_TEXT`` in the environment names a JSON file ``{"p": 0.7, "texts": [[token ids of prompt and greedy answer], ...]}``, read
again whenever it changes. Draft position i is spoiled with probability 1 - p, independently, so that under greedy decoding
position i (from 1) is accepted with probability p^i. Histories that are no prefix of a known text get no draft.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class KnownTextProposer:
    def __init__(self, vllm_config: Any) -> None:
        self._k = vllm_config.speculative_config.num_speculative_tokens
        self._limit = vllm_config.model_config.max_model_len
        self._path = Path(os.environ["KNOWN_TEXT"])
        self._changed = -1.0
        self._p = 0.0
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self._random = random.Random(0)

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def propose(self, sampled: list[list[int]], lengths: Sequence[int], history: Any, **_: Any) -> list[list[int]]:
        self._reload()
        return [self._draft(history[row, : lengths[row]].tolist()) if tokens else [] for row, tokens in enumerate(sampled)]

    def _draft(self, history: list[int]) -> list[int]:
        text = self._texts.get(tuple(history[:_KEY]))
        size = len(history)
        if text is None or text[:size] != history or size + self._k >= self._limit:
            return []
        return [t if self._random.random() < self._p else (t + 1) % 1000 for t in text[size : size + self._k]]

    def _reload(self) -> None:
        changed = self._path.stat().st_mtime_ns
        if changed != self._changed:
            content = json.loads(self._path.read_text())
            self._p, self._changed = content["p"], changed
            self._texts = {tuple(text[:_KEY]): text for text in content["texts"]}


_KEY = 6  # tokens that tell one known text from another
