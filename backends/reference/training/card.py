"""The model card of a trained head."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backends.reference.training.train import Training

ABOUT = {
    "eagle3": "EAGLE-3: one block over the token's embedding and the target's residual streams after 2, L/2 and L-3 blocks.",
    "eagle2": "EAGLE-1/2: one block over the token's embedding and the target's final hidden state.",
    "medusa": "Medusa: four residual blocks on the target's final hidden state, under the target's LM head.",
    "p_eagle": "P-EAGLE: two blocks that draft every token in one pass.",
    "mtp": "One multi-token-prediction module in MiMo's layout, trained after the fact: real ones come with pre-training.",
    "draft_model": "A model of three blocks under the target's embedding and LM head.",
}


def render(training: Training, results: Mapping[str, Any], *, model: str, prompts: str, command: str) -> str:
    """Markdown; `results` as `Training.final` gives them."""
    settings = training.settings
    kind = "tokens" if settings.prompts else "output tokens"
    tokens = sum(len(e.tokens) - e.prompt_tokens for e in training.train)
    lines = [
        "---",
        f"base_model: {model}",
        "license: apache-2.0",
        "---",
        "",
        f"# {settings.variant} head for {model}",
        "",
        ABOUT[settings.variant],
        "Matrices are int8 with one scale a row; embedding and LM head rows are the target's and are not in the file.",
        "",
        f"- Trained on {len(training.train)} outputs of the target itself ({tokens} tokens, three quarters greedy, the rest at "
        f"temperature 0.8) for the prompts in {prompts}. Loops at the end of outputs were cut off.",
        f"- Seed {settings.seed}, {training.step} steps of about {settings.rows} {kind}, {training.seconds / 60:.0f} minutes on "
        "the machine that trained it (shared, so not a measure of speed).",
        f"- Command: `{command}`",
        "",
        f"## Held-out acceptance, greedy, K = {settings.k}",
        "",
        "Simulated exactly on the target's outputs for prompts that were not trained on; loops cut off in the same way.",
        "",
        "| prompts | category | tau | position rates | decode steps |",
        "|---|---|---|---|---|",
    ]
    for name, categories in results.items():
        for category, counts in categories.items():
            rates = " ".join(f"{rate:.2f}" for rate in counts["position_rates"])
            lines.append(f"| {name} | {category} | {counts['tau']:.2f} | {rates} | {counts['steps']} |")
    lines += ["", "## Learning curve", "", "| step | epochs | held-out tau (a sample) |", "|---|---|---|"]
    for line in (training.folder / "history.jsonl").read_text().splitlines():
        row = json.loads(line)
        lines.append(f"| {row['step']} | {row['epochs']:g} | {row['held_out']['all']['tau']:.3f} |")
    return "\n".join(lines) + "\n"
