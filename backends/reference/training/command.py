"""`tune.py train-head`: outputs of the target, training, simulation on held-out outputs, and the head with its card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from backends.reference.config import read_config
from backends.reference.engine import Engine
from backends.reference.heads.export import published, write_published, write_small
from backends.reference.heads.files import read_target
from backends.reference.options import EngineOptions
from backends.reference.quantization.dense import cpu_has_bf16
from backends.reference.tokenizer import Tokenizer
from backends.reference.training import card
from backends.reference.training.distill import Distilled, generate, load, progress
from backends.reference.training.train import Settings, Training
from backends.reference.training.trainees import BUILDERS, shape_of
from backends.types import ConfigError

MAX_NUM_SEQS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """`data`: where the target's outputs are kept, to be shared by heads; `export`: where the published layout goes, if anywhere."""

    model: Path
    prompts: Path
    out: Path
    settings: Settings
    tests: Sequence[Path] = ()
    data: Path | None = None
    export: Path | None = None
    max_tokens: int = 160
    command: str = ""


def train_head(request: Request) -> None:
    """Every stage goes on where an earlier run of the same command stopped.

    Raises:
        ConfigError: an unknown variant, prompts that cannot be read, a folder of another run.
    """
    settings = request.settings
    if settings.variant not in BUILDERS:
        raise ConfigError(f"train-head has no variant '{settings.variant}': choose from {', '.join(BUILDERS)}")
    folder = request.data or request.out / "data"
    sets = [(request.prompts, folder, 16)] + [(test, folder / f"test-{test.stem}", 1) for test in request.tests]
    loaded = [_outputs(request, *each) for each in sets]
    target = read_target(request.model, torch.bfloat16 if cpu_has_bf16() else torch.float32)
    training = Training(request.out, settings, target, loaded[0])
    print(f"training on {len(training.train)} conversations, {len(training.held_out)} held out", flush=True)
    training.run()
    results = training.final(
        {"held out": loaded[0]} | {path.stem: data for (path, _, _), data in zip(sets[1:], loaded[1:], strict=True)}
    )
    head = published(
        settings.variant, training.state(), shape_of(target.config), training.token_map, target, settings.mask_token
    )
    write_small(request.out / "head", head)
    text = card.render(training, results, model=request.model.name, prompts=request.prompts.name, command=request.command)
    (request.out / "head" / "README.md").write_text(text)
    (request.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"head: {request.out / 'head'}")
    if request.export:
        write_published(request.export, settings.variant, head, target)
        (request.export / "README.md").write_text(text)
        print(f"published layout: {request.export}")


def _outputs(request: Request, prompts: Path, folder: Path, held_out_every: int) -> Distilled:
    """The target's outputs for `prompts`, generated as far as they are not in `folder`."""
    done = folder / "complete"
    if not done.exists():
        engine = Engine(EngineOptions(model=request.model, max_num_seqs=MAX_NUM_SEQS))
        progress(generate(engine, prompts, folder, max_tokens=request.max_tokens, held_out_every=held_out_every))
        done.touch()
    return load(folder, read_config(request.model).hidden_size)


def mask_token(model: Path) -> int:
    """A token that no text has: the last of the tokenizer's special ones. P-EAGLE learns an embedding for it."""
    ids = Tokenizer(model).special_ids()
    if not ids:
        raise ConfigError(f"{model}: the tokenizer has no special token to use as P-EAGLE's mask")
    return ids[-1]
