"""The noise of a block's change in earlier gates of one baseline on equal hardware, kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backends.cached import cache_folder
from backends.files import write_whole
from harness.gate.compare import band_of, keys_of, mean_change
from harness.gate.decide import least_blocks_to_pass
from harness.gate.metrics import label_of, metric_of
from harness.gate.statistics import Noise, blocks_to_decide
from harness.gate.types import Block, Rules

MOST_FREEDOM = 60
"""Older gates fade out: a machine's noise is not for ever."""


def noise_file(fingerprint: str, baseline: Mapping[str, Any], workload: Mapping[str, Any]) -> Path:
    """Where the noise of this baseline under this workload on this machine is kept."""
    text = json.dumps([fingerprint, baseline, workload], sort_keys=True)
    return cache_folder("gate-noise") / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_noise(path: Path) -> dict[str, Noise]:
    """By metric; empty where no gate has ended yet. A file that cannot be read counts as none: it only ever saves time."""
    try:
        return {key: Noise(float(row["variance"]), int(row["freedom"])) for key, row in json.loads(path.read_text()).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def keep_noise(path: Path, known: Mapping[str, Noise], blocks: Sequence[Block]) -> None:
    """Add what these blocks say: the spread around their own mean, so that a real difference between the sides does not enter."""
    found = dict(known)
    for key in keys_of(blocks):
        mean = mean_change(key, blocks)
        if mean.sd is None:
            continue
        before = known.get(key, Noise(0.0, 0))
        found[key] = Noise(before.variance, min(before.freedom, max(0, MOST_FREEDOM - mean.freedom))).joined(mean)
    write_whole(path, json.dumps({key: asdict(noise) for key, noise in found.items()}, indent=1) + "\n")


def expectation(known: Mapping[str, Noise], rules: Rules) -> str | None:
    """What earlier gates say of this one, in a line: the required metric that needs most pairs, and how many."""
    counts = {
        key: blocks_to_decide(noise.variance**0.5, 0.0, band_of(key, rules), rules.pass_alpha)
        for key, noise in known.items()
        if metric_of(key).required
    }
    if not counts:
        return None
    key = max(counts, key=counts.__getitem__)
    pairs = 2 * max(counts[key], least_blocks_to_pass(list(counts), rules, known))
    noise = known[key].variance ** 0.5
    return f"{label_of(key, several_loads=False)} had {noise:.1%} of noise per two pairs in earlier gates here: about {pairs} pairs decide"
