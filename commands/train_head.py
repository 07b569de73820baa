"""The options of ``tune.py train-head``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def train_head(
    variant: Annotated[str, typer.Option(help="eagle3, eagle2, p_eagle, medusa, mtp or draft_model.")],
    prompts: Annotated[Path, typer.Option(help='Prompts to train on, one a line: {"prompt": ...} or {"messages": [...]}.')],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command again goes on where it stopped.")],
    model: Annotated[str, typer.Option(help="Target: directory, or 'demo'.")] = "demo",
    test_prompts: Annotated[
        list[Path] | None, typer.Option(help="Prompts of other kinds, only to measure acceptance on; repeat.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where the target's outputs are kept, to be shared by several heads.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the head in bf16 and its published layout, for other engines.")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the outputs.", min=0.01)] = 4.0,
    draft_vocab: Annotated[int, typer.Option(help="Tokens a head with a reduced vocabulary may draft.", min=16)] = 8192,
    learning_rate: Annotated[float, typer.Option(help="Peak of AdamW's learning rate.", min=0)] = 2.5e-3,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay.", min=0)] = 0.05,
    train_on_prompts: Annotated[
        bool,
        typer.Option("--train-on-prompts", help="Draft from positions in prompts too: twice the work, and twice the variety."),
    ] = False,
    start: Annotated[Path | None, typer.Option(help="EAGLE-3 head that a p_eagle head starts from.")] = None,
    k: Annotated[int, typer.Option("--k", help="Draft tokens per step in the simulated acceptance.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Cut each output of the target at N tokens.", min=3)] = 160,
    seed: Annotated[int, typer.Option(help="Seed of initialization and order.")] = 0,
) -> None:
    """Train a draft head for a model on its own outputs, and say what acceptance it reaches on prompts held out."""
    from backends.reference.training.command import Request, mask_token
    from backends.reference.training.command import train_head as run
    from backends.reference.training.train import Settings
    from harness.job import resolve_model

    folder = Path(resolve_model(model))
    settings = Settings(
        variant,
        epochs=epochs,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        draft_vocab=draft_vocab,
        seed=seed,
        k=k,
        mask_token=mask_token(folder),
        prompts=train_on_prompts,
        start=str(start or ""),
    )
    run(
        Request(
            model=folder,
            prompts=prompts,
            out=out,
            settings=settings,
            tests=test_prompts or (),
            data=data,
            export=export,
            max_tokens=max_tokens,
            command=shlex.join(["python", "tune.py", *sys.argv[1:]]),
        )
    )
