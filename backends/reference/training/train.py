"""Training a draft head on the target's own outputs: `tune.py train-head`."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.reference.heads.export import round_int8
from backends.reference.heads.files import TargetWeights
from backends.reference.training.batches import FrozenHeadLoss, batch, epoch, usable
from backends.reference.training.distill import Distilled, Example
from backends.reference.training.simulate import Acceptance, simulate
from backends.reference.training.trainees import Trainee, build, finished, start_from, unfinished
from backends.types import ConfigError

STRAYS = 0.1
"""Share of wrong drafts that go on all the same, so that later steps learn before earlier ones are good."""
COOL = 0.3
"""Last part of training, in which the learning rate falls to a twentieth; before it is constant, so a run may be made longer."""
WHOLE_VOCABULARY = ("eagle2", "mtp", "draft_model")
"""Variants that draft from the target's whole vocabulary. They are trained on the frequent part and a few other tokens, drawn anew
for each batch, so that no other token is left too likely."""
OTHERS = 1024
FEATURE_LOSS = 5.0
"""Of an EAGLE-1/2 head, whose output has no norm and is its next input: what being another state than the target's counts beside
cross entropy. EAGLE (arXiv 2401.15077, section 3.2) gives it 10; here later steps see the head's own states too."""


@dataclass(frozen=True, slots=True)
class Settings:
    variant: str
    epochs: float = 3.0
    rows: int = 640  # drafts that start in a batch
    prompts: bool = False  # whether drafts start in prompts too: twice the work of an epoch, and twice the variety
    learning_rate: float = 2.5e-3
    weight_decay: float = 0.05
    draft_vocab: int = 8192
    seed: int = 0
    held_out: int = 96  # conversations simulated after each epoch
    k: int = 4
    mask_token: int = 0
    start: str = ""  # folder of an EAGLE-3 head that a P-EAGLE head starts from


def frequent_tokens(examples: Sequence[Example], count: int, vocab: int) -> Tensor:
    """The `count` ids that outputs (and then prompts) use most, ascending; ids nobody used fill up."""
    outputs = Counter(token for e in examples for token in e.tokens[e.prompt_tokens :])
    prompts = Counter(token for e in examples for token in e.tokens[: e.prompt_tokens])
    order = [token for token, _ in outputs.most_common()] + [token for token, _ in prompts.most_common()]
    kept = list(dict.fromkeys([*order, *range(vocab)]))[:count]
    return torch.tensor(sorted(kept))


def input_scale(data: Distilled, examples: Sequence[Example]) -> Tensor:
    """[3 × hidden]: root mean square of each stream's dimensions, the first token (an attention sink) left out."""
    rows = torch.cat([data.hidden(example)[1:, :3] for example in examples]).float()
    return rows.pow(2).mean(0).sqrt().flatten().clamp_min(1e-6)


class Training:
    """One run, with everything that a kill must not lose in `folder`."""

    def __init__(self, folder: Path, settings: Settings, target: TargetWeights, data: Distilled) -> None:
        """Starts, or goes on from `folder`'s checkpoint.

        Raises:
            ConfigError: the folder belongs to a run with other settings, or the data is too small.
        """
        self.folder, self.settings, self.target, self.data = folder, settings, target, data
        folder.mkdir(parents=True, exist_ok=True)
        self.train = usable(data.split(held_out=False))
        self.held_out = usable(data.split(held_out=True))[: settings.held_out]
        if not self.train or not self.held_out:
            raise ConfigError("too few conversations to train on and hold out: give more prompts")
        torch.manual_seed(settings.seed)
        saved = self._checkpoint()
        if saved is None:
            self.token_map = frequent_tokens(
                self.train, min(settings.draft_vocab, target.config.vocab_size), target.config.vocab_size
            )
            self.scale = input_scale(data, self.train[:64])
        else:
            self.token_map, self.scale = saved["token_map"], saved["scale"]
        self.draft_ids = torch.full((target.config.vocab_size,), -1).index_put(
            (self.token_map,), torch.arange(len(self.token_map))
        )
        self.trainee: Trainee = build(settings.variant, target, self.token_map, self.scale, mask_token=settings.mask_token)
        if saved is None and settings.start:
            start_from(self.trainee, Path(settings.start), target, self.scale)
        self.output = target.output[self.token_map]
        self.parameters = [p for p in self.trainee.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self.step, self.seconds = 0, 0.0
        if saved is not None:
            self.trainee.module.load_state_dict(saved["module"], strict=False)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.seconds = saved["step"], saved["seconds"]

    def run(self) -> None:
        """Train to the end of the last epoch, saving every minute."""
        settings = self.settings
        epochs = [
            epoch(self.train, settings.rows, settings.seed + number, prompts=settings.prompts)
            for number in range(math.ceil(settings.epochs))
        ]
        groups = [group for groups in epochs for group in groups]
        ends = {sum(len(groups) for groups in epochs[:number]) for number in range(1, len(epochs))}
        total = max(1, round(len(groups) * settings.epochs / len(epochs)))
        saved = shown = time.monotonic()
        window = Window()
        while self.step < total:
            start = time.monotonic()
            self._optimize(groups[self.step], window, _rate(self.step, total))
            self.step += 1
            now = time.monotonic()
            self.seconds += now - start
            passed = settings.epochs * self.step / total
            if now - shown > 20:
                print(f"step {self.step}/{total} (epoch {passed:.2f}), {window.line()}", flush=True)
                shown, window = now, Window()
            if self.step in ends or self.step == total:
                self._report(passed)
            if now - saved > 60 or self.step == total:
                saved = now
                self._save()

    def _optimize(self, group: list[Example], window: Window, rate: float) -> None:
        data = batch(self.data, group, prompts=self.settings.prompts)
        with self._precision():
            losses = self._loss(data, window)
        self.optimizer.zero_grad(set_to_none=True)
        losses.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group_ in self.optimizer.param_groups:
            group_["lr"] = self.settings.learning_rate * rate
        self.optimizer.step()

    def _precision(self) -> torch.autocast:
        """Mixed where the target was read in bf16."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.target.embedding.dtype == torch.bfloat16)

    def _loss(self, data: Any, window: Window) -> Tensor:
        """Cross entropy with the target's distribution at every draft position that is reached, over the number of starts."""
        trainee = self.trainee
        passes = trainee.passes(data)
        x, bases = next(passes)
        total, starts = torch.zeros(()), len(x)
        output = self.output
        if self.settings.variant in WHOLE_VOCABULARY:
            others = (self.draft_ids < 0).nonzero().flatten()
            drawn = others[torch.randperm(len(others))[:OTHERS]]
            output = torch.cat((output, self.target.output[drawn].to(output.dtype)))
        for step in range(trainee.steps):
            at = bases.position + 2 + step
            inside = at < data.length[bases.sequence]
            truth = self.draft_ids[data.tokens[bases.sequence, at.clamp_max(data.tokens.shape[1] - 1)]]
            counted = inside & (truth >= 0)
            teacher = data.streams[bases.sequence, (at - 1).clamp_max(data.tokens.shape[1] - 1), 3]
            loss, guesses = FrozenHeadLoss.apply(x, teacher, output, counted.float())
            total = total + loss / starts
            if self.settings.variant == "eagle2":
                off = F.smooth_l1_loss(x, teacher.to(x.dtype), reduction="none").mean(-1)
                total = total + FEATURE_LOSS * (off * counted).sum() / starts
            right = counted & (guesses == truth)
            window.add(step, float(loss.detach()), int(counted.sum()), int(right.sum()), starts)
            keep = (right | (inside & (torch.rand(len(right)) < STRAYS))).nonzero().flatten()
            if step == trainee.steps - 1 or not len(keep):
                break
            x, bases = passes.send(keep)
        passes.close()
        return total

    def _report(self, epochs: float) -> None:
        result = self._simulate(self.data, self.held_out)
        row: dict[str, Any] = {
            "step": self.step,
            "epochs": round(epochs, 3),
            "seconds": round(self.seconds),
            "train_conversations": len(self.train),
        }
        row["held_out"] = {name: counts.as_dict() for name, counts in sorted(result.items())}
        with (self.folder / "history.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        by = ", ".join(f"{name} {counts.tau:.2f}" for name, counts in sorted(result.items()) if name != "all")
        rates = " ".join(f"{rate:.2f}" for rate in result["all"].position_rates)
        print(
            f"epoch {epochs:.2f}: held-out tau at K = {self.settings.k}: {result['all'].tau:.3f} (rates {rates}; {by})",
            flush=True,
        )

    def final(self, sets: Mapping[str, Distilled]) -> dict[str, dict[str, dict[str, object]]]:
        """What the head reaches as it is shipped, its matrices rounded to int8: greedy acceptance on every held-out conversation of
        each set, by category."""
        module, scale = self.trainee.module, self.scale
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        rounded = {name: round_int8(t) if t.dim() == 2 and min(t.shape) > 1 else t for name, t in self.state().items()}
        module.load_state_dict(unfinished(self.trainee, rounded, scale))
        results = {}
        for name, data in sets.items():
            counts = self._simulate(data, usable(data.split(held_out=True)))
            results[name] = {category: count.as_dict() for category, count in sorted(counts.items())}
        module.load_state_dict(before)
        return results

    def _simulate(self, data: Distilled, examples: Sequence[Example]) -> dict[str, Acceptance]:
        whole = self.settings.variant in WHOLE_VOCABULARY
        output, token_map = (self.target.output, None) if whole else (self.output, self.token_map)
        with self._precision():
            return simulate(self.trainee, data, examples, output, token_map, self.settings.k)

    def _checkpoint(self) -> dict[str, Any] | None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return None
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        fixed = {k: v for k, v in asdict(self.settings).items() if k not in ("epochs", "held_out", "k")}
        if any(saved["settings"].get(key, value) != value for key, value in fixed.items()):
            raise ConfigError(f"{self.folder} holds a run with other settings ({saved['settings']}): give another --out")
        return saved

    def _save(self) -> None:
        state = {
            "settings": asdict(self.settings),
            "token_map": self.token_map,
            "scale": self.scale,
            "module": {n: t for n, t in self.trainee.module.state_dict().items() if not n.endswith("head.weight")},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        scratch = self.folder / "checkpoint.tmp"
        torch.save(state, scratch)
        os.replace(scratch, self.folder / "checkpoint.pt")

    def state(self) -> dict[str, Tensor]:
        return finished(self.trainee, self.scale)


class Window:
    """Losses and hits since the last line shown."""

    def __init__(self) -> None:
        self.loss: Counter[int] = Counter()
        self.rows: Counter[int] = Counter()
        self.right: Counter[int] = Counter()
        self.starts = 0

    def add(self, step: int, loss: float, rows: int, right: int, starts: int) -> None:
        self.loss[step] += loss  # type: ignore[assignment]
        self.rows[step] += rows
        self.right[step] += right
        self.starts += starts if step == 0 else 0

    def line(self) -> str:
        steps = sorted(step for step in self.rows if self.rows[step])
        losses = " ".join(f"{self.loss[s] / self.rows[s]:.2f}" for s in steps)
        hits = " ".join(f"{self.right[s] / self.rows[s]:.2f}" for s in steps)
        return f"loss by draft position {losses}, hits {hits}"


def _rate(step: int, total: int) -> float:
    """Warm-up over the first steps, constant, then a cosine down to 1/20 over the last part."""
    warm = min(1.0, (step + 1) / 40)
    cooled = max(0.0, (step - total * (1 - COOL)) / (total * COOL))
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, cooled))))
