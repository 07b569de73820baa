"""Self-distillation data: the target's own outputs, with the hidden states that a draft head will see, generated once and kept.

Heads learn what the target says, not what is true, so prompts are all that is needed. The reference engine generates in large
batches; a recorder in the drafter's place keeps each token's hidden states as they pass, so that no second forward is needed.

A folder holds `features.bin`, bf16 [rows, streams, hidden], and `sequences.jsonl`, a line for each finished sequence, written
after its features: a run that was killed goes on where the last line ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.reference.engine import Engine
from backends.reference.sequence import Sequence as Running
from backends.reference.verify import Draft
from backends.serving import GenerationRequest
from backends.types import ConfigError

HELD_OUT_EVERY = 16
SAMPLED_EVERY, TEMPERATURE = 4, 0.8
LOOP_TOKENS, LOOP_PERIOD = 32, 8


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation. Row i of its features is what the target computed for token i; the last token has none."""

    prompt: int  # line of the prompt file
    category: str
    held_out: bool
    temperature: float
    prompt_tokens: int
    tokens: list[int]  # prompt and output; the end token included, a loop at the end cut off
    first_row: int

    @property
    def rows(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Distilled:
    """What a folder holds. `features` is uint16 (bf16 bits) [rows, streams, hidden]: low, middle and high residual stream, and
    the final hidden state after the last norm."""

    examples: list[Example]
    features: np.ndarray

    def split(self, *, held_out: bool) -> list[Example]:
        return [example for example in self.examples if example.held_out == held_out]

    def hidden(self, example: Example) -> Tensor:
        """bf16 [rows, streams, hidden] of one conversation."""
        rows = self.features[example.first_row : example.first_row + example.rows]
        return torch.from_numpy(rows).view(torch.bfloat16)


class Recorder:
    """Stands where a drafter does, drafts nothing, and keeps hidden states."""

    def __init__(self, capture: tuple[int, ...]) -> None:
        self.capture = capture
        self._rows: dict[int, list[Tensor]] = {}

    def propose(self, work: list[tuple[Running, int]]) -> list[Draft]:
        return [Draft()] * len(work)

    def observe(self, sequence: Running, rows: list[int], hidden: Tensor, captured: list[Tensor]) -> None:
        seen = torch.stack([stream[rows] for stream in (*captured, hidden)], dim=1)
        self._rows.setdefault(sequence.id, []).append(seen.to(torch.bfloat16))

    def adopt(self, sequence: Running, slot: int, rows: int) -> int:
        return 0  # every token's hidden state is wanted

    def forget(self, sequence: Running) -> None:
        pass

    def take(self, sequence: Running) -> Tensor:
        return torch.cat(self._rows.pop(sequence.id))


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The residual streams that EAGLE-3 heads fuse by default in every engine, as blocks run before them."""
    return 2, num_layers // 2, num_layers - 3


def loop_start(output: Sequence[int]) -> int | None:
    """Where a loop begins when the last 32 tokens repeat with a period under 8 (one period is kept); None where they do not."""
    tail = output[-LOOP_TOKENS:]
    if len(tail) < LOOP_TOKENS:
        return None
    for period in range(1, LOOP_PERIOD):
        if all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            start = len(output) - LOOP_TOKENS
            while start > 0 and output[start - 1] == output[start - 1 + period]:
                start -= 1
            return start + period
    return None


def read_prompts(path: Path) -> list[tuple[list[dict[str, Any]], str]]:
    """Messages and category of each line: `{"prompt": ...}` or `{"messages": [...]}`, `category` optional.

    Raises:
        ConfigError: no such file, or a line that is neither.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"prompts {path} cannot be read: {error.strerror}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        except (ValueError, KeyError, AttributeError):
            raise ConfigError(f'{path}, line {number}: expected {{"prompt": ...}} or {{"messages": [...]}}') from None
        prompts.append((messages, str(row.get("category", "all"))))
    if not prompts:
        raise ConfigError(f"prompts {path}: the file is empty")
    return prompts


def generate(
    engine: Engine,
    prompts: Path,
    folder: Path,
    *,
    max_tokens: int,
    held_out_every: int = HELD_OUT_EVERY,
    limit: int | None = None,
) -> Iterator[tuple[int, int, int]]:
    """Fill `folder` with the target's outputs for `prompts`, as far as they are not there yet.

    Every 16th conversation is held out; of the others every 4th samples at temperature 0.8, the rest are greedy.

    Yields:
        (conversations done, of how many, tokens generated) after each step.
    """
    rows = read_prompts(prompts)[:limit]
    folder.mkdir(parents=True, exist_ok=True)
    done = _resume(folder, row_bytes=8 * engine.model.config.hidden_size)
    first_row = sum(example.rows for example in done)
    finished = {example.prompt for example in done}
    todo = [i for i in range(len(rows)) if i not in finished]
    todo.reverse()
    recorder = Recorder(aux_layers(engine.model.config.num_layers))
    engine.drafter = recorder
    running: dict[int, tuple[int, Running]] = {}
    tokens = 0
    with (folder / "features.bin").open("ab") as features, (folder / "sequences.jsonl").open("a") as lines:
        while todo or running:
            while todo and len(running) < engine.options.max_num_seqs:
                index = todo.pop()
                ids = engine.tokenizer.encode_chat(rows[index][0])
                room = engine.max_model_len - len(ids)
                if room > LOOP_TOKENS:
                    temperature = TEMPERATURE if index % SAMPLED_EVERY == 1 and index % held_out_every else 0.0
                    request = GenerationRequest(
                        prompt_ids=tuple(ids), max_tokens=min(max_tokens, room), temperature=temperature, seed=index
                    )
                    sequence = engine.add(request)
                    running[sequence.id] = index, sequence
            for output in engine.step():
                sequence = output.sequence
                tokens += len(output.token_ids)
                made = sequence.tokens[sequence.prompt_tokens :]
                loop = loop_start(made) if len(made) % 8 == 0 else None
                if output.finish_reason is None and loop is None:
                    continue
                loop = loop_start(made) if loop is None else loop
                engine.cancel(sequence)
                index, _ = running.pop(sequence.id)
                example = Example(
                    prompt=index,
                    category=rows[index][1],
                    held_out=index % held_out_every == 0,
                    temperature=sequence.sampling.temperature,
                    prompt_tokens=sequence.prompt_tokens,
                    tokens=sequence.tokens[: sequence.prompt_tokens + (len(made) if loop is None else loop)],
                    first_row=first_row,
                )
                seen = recorder.take(sequence)[: example.rows].contiguous()
                first_row += len(seen)
                features.write(seen.view(torch.int16).numpy().tobytes())
                features.flush()
                lines.write(json.dumps(asdict(example)) + "\n")
                lines.flush()
            yield len(rows) - len(todo) - len(running), len(rows), tokens


def load(folder: Path, hidden_size: int) -> Distilled:
    """The finished conversations of `folder`, with all their features in memory (a mapped file would be read in random order).

    Raises:
        ConfigError: nothing there.
    """
    path = folder / "sequences.jsonl"
    if not path.exists():
        raise ConfigError(f"{folder} holds no generated outputs (sequences.jsonl)")
    examples = [Example(**json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")]
    rows = sum(example.rows for example in examples)
    features = np.fromfile(folder / "features.bin", dtype=np.uint16, count=rows * 4 * hidden_size)
    return Distilled(examples, features.reshape(rows, 4, hidden_size))


def _resume(folder: Path, row_bytes: int) -> list[Example]:
    """Finished conversations of an earlier run; what a kill left half-written is cut off both files."""
    path = folder / "sequences.jsonl"
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
    path.write_text("".join(lines))
    examples = [Example(**json.loads(line)) for line in lines]
    os.truncate(folder / "features.bin", row_bytes * sum(example.rows for example in examples))
    return examples


def progress(steps: Iterator[tuple[int, int, int]], every_s: float = 10.0) -> None:
    """Run `steps`, printing a line now and then."""
    start = shown = time.monotonic()
    for done, total, tokens in steps:
        now = time.monotonic()
        if now - shown > every_s or done == total:
            shown = now
            print(f"{done}/{total} conversations, {tokens} tokens, {tokens / (now - start):.0f} tokens/s", flush=True)
