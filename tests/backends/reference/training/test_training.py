"""Training drafts from every position at once; what it sees must be what drafting one token after another sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from backends.reference.engine import Engine
from backends.reference.heads.block import causal
from backends.reference.heads.export import expand, published, write_published, write_small
from backends.reference.heads.files import TargetWeights, read_target
from backends.reference.heads.load import load_head
from backends.reference.loader import load_model
from backends.reference.options import EngineOptions
from backends.reference.training.batches import batch
from backends.reference.training.distill import Distilled, Example, generate, load, loop_start
from backends.reference.training.simulate import simulate
from backends.reference.training.train import Settings, Training
from backends.reference.training.trainees import Trainee, build, finished, shape_of, start_from
from backends.types import ConfigError
from tests.backends.reference.heads import published as p
from tests.backends.reference.tiny_models import VOCAB

PROMPTS = ["count to ten", "hello", "name three birds", "why is the sky blue", "a", "what is tea", "sing", "more words here"]
VARIANTS = ("eagle3", "eagle2", "mtp", "p_eagle", "medusa", "draft_model")
K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return p.target(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetWeights:
    return read_target(folder, torch.float32)


@pytest.fixture(scope="module")
def data(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Distilled:
    out = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"prompt": text, "category": "ab"[i % 2]}) for i, text in enumerate(PROMPTS)]
    (out / "prompts.jsonl").write_text("\n".join(lines))
    engine = Engine(EngineOptions(model=folder, max_num_seqs=4, dtype="float32"))
    for _ in generate(engine, out / "prompts.jsonl", out, max_tokens=20, held_out_every=4):
        pass
    return load(out, p.H)


def test_recorded_features_are_those_of_the_recorded_tokens(folder: Path, data: Distilled) -> None:
    """Against one forward over each conversation in transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sorted(e.prompt for e in data.examples) == list(range(len(PROMPTS)))
    assert [e.held_out for e in sorted(data.examples, key=lambda e: e.prompt)] == [True, False, False, False] * 2
    for example in data.examples:
        with torch.no_grad():
            states = model(torch.tensor([example.tokens]), output_hidden_states=True).hidden_states
        wanted = torch.stack([states[layer][0] for layer in (2, 4, 5, 8)], 1)[: example.rows]
        torch.testing.assert_close(data.hidden(example).float(), wanted, atol=0.05, rtol=0.02)  # kept in bf16


def test_generation_goes_on_after_a_kill(folder: Path, data: Distilled, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))

    def engine() -> Engine:
        return Engine(EngineOptions(model=folder, max_num_seqs=2, dtype="float32"))

    for done, _, _ in generate(engine(), tmp_path / "prompts.jsonl", tmp_path, max_tokens=20, held_out_every=4):
        if done == 3:
            break
    with (tmp_path / "sequences.jsonl").open("a") as file:
        file.write('{"prompt": 7, "tok')  # a line that a kill cut short
    with (tmp_path / "features.bin").open("ab") as file:
        file.write(b"half a row")
    for _ in generate(engine(), tmp_path / "prompts.jsonl", tmp_path, max_tokens=20, held_out_every=4):
        pass
    again = load(tmp_path, p.H)
    tokens = {e.prompt: e.tokens for e in data.examples}
    assert {e.prompt: e.tokens for e in again.examples} == tokens
    for example in again.examples:
        twin = next(e for e in data.examples if e.prompt == example.prompt)
        torch.testing.assert_close(again.hidden(example).float(), data.hidden(twin).float(), atol=0.05, rtol=0.02)


@pytest.mark.parametrize(
    ("output", "start"),
    [
        (list(range(100)), None),
        ([1, 2, 3] + [7, 8] * 16, 5),  # one period is kept
        ([1, 2, 3] + [7, 8] * 40, 5),
        ([5] * 31, None),  # too short
        ([1, 2] + [5] * 32, 3),
        (list(range(8)) * 4, None),  # a period of 8 is no loop
        (list(range(7)) * 5, 7),
    ],
)
def test_a_loop_is_32_tokens_of_a_period_under_8(output: list[int], start: int | None) -> None:
    assert loop_start(output) == start


def trainee(variant: str, target: TargetWeights) -> tuple[Trainee, Tensor, Tensor]:
    """A random one in float32, with its token map and input scale."""
    torch.manual_seed(1)
    token_map = torch.arange(0, VOCAB, 2)
    scale = torch.rand(3 * p.H) + 0.5
    made = build(variant, target, token_map, scale)
    made.module.float()
    for parameter in made.module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
    return made, token_map, scale


def draft_one_by_one(
    variant: str, made: Trainee, scale: Tensor, tokens: list[int], streams: Tensor, output: Tensor, ids: Tensor
) -> list[int]:
    """K greedy drafts after `tokens`, each from a causal pass over the whole sequence: streams [tokens - 1, 4, hidden]."""
    head = made.module
    drafts: list[int] = []
    rows = len(tokens) - 1
    positions = torch.arange(rows + K)[None]
    if variant == "medusa":
        return [int(ids[(x @ output.T).argmax()]) for x in head(streams[-1, 3])[:K]]
    if variant in ("eagle3", "p_eagle"):
        body = head if variant == "eagle3" else head.body
        hidden = body.fc(streams[:, :3].flatten(1) / scale)
    else:
        hidden = streams[:, 3]
    for step in range(K):
        sequence = torch.tensor(tokens + drafts)
        n = rows + step
        if variant == "draft_model":
            x = head(sequence[None])[0, -1]
        elif variant == "p_eagle":
            mask_e, mask_h = head.mask_rows(step)
            e, h = torch.cat((head.embed(torch.tensor(tokens[1:])), mask_e)), torch.cat((hidden, mask_h))
            x = head.body.norm(head(e[None], h[None], positions[:, :n], causal()))[0, -1]
        else:
            y = head(head.embed(sequence[1:])[None], hidden[None], positions[:, :n], causal())[0]
            hidden = torch.cat((hidden, y[-1:]))
            x = head.norm(y[-1]) if variant == "eagle3" else y[-1]
        drafts.append(int(ids[(x @ output.T).argmax()]))
    return drafts


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_simulated_tau_is_that_of_drafting_one_token_after_another(
    variant: str, target: TargetWeights, data: Distilled
) -> None:
    made, ids, scale = trainee(variant, target)
    output = target.output[ids]
    examples = [e for e in data.examples if len(e.tokens) - e.prompt_tokens >= 3]
    # make the recorded outputs easy to guess, so that drafts of every length are accepted: the head's own drafts, now and then
    changed = [_echo(variant, made, scale, data, e, output, ids) for e in examples]
    counts = simulate(made, data, changed, output, ids, K)
    steps = emitted = 0
    rates = [0] * K
    for example in changed:
        streams = data.hidden(example).float()
        known = example.prompt_tokens + 1
        while known < len(example.tokens):
            drafts = draft_one_by_one(variant, made, scale, example.tokens[:known], streams[: known - 1], output, ids)
            truth = example.tokens[known:]
            accepted = next((i for i, (a, b) in enumerate(zip(drafts, truth, strict=False)) if a != b), min(K, len(truth)))
            for i in range(accepted):
                rates[i] += 1
            steps += 1
            emitted += min(accepted + 1, len(truth))
            known += min(accepted + 1, len(truth))
    assert (counts["all"].steps, counts["all"].emitted, counts["all"].accepted) == (steps, emitted, rates)
    assert rates[0] > 0
    assert rates == sorted(rates, reverse=True)
    assert counts["a"].steps + counts["b"].steps == steps


def _echo(
    variant: str, made: Trainee, scale: Tensor, data: Distilled, example: Example, output: Tensor, ids: Tensor
) -> Example:
    """The example with stretches of its output replaced by what the head drafts there (features stay as they are)."""
    from dataclasses import replace

    streams = data.hidden(example).float()
    tokens = example.tokens[: example.prompt_tokens + 1]
    while len(tokens) < len(example.tokens):
        drafts = draft_one_by_one(variant, made, scale, tokens, streams[: len(tokens) - 1], output, ids)
        tokens = tokens + drafts[: 1 + len(tokens) % K] + example.tokens[len(tokens) : len(tokens) + 1]
    return replace(example, tokens=tokens[: len(example.tokens)])


def settings(variant: str, **changes: object) -> Settings:
    return Settings(variant, **{"rows": 40, "learning_rate": 5e-3, "draft_vocab": 128, "held_out": 4, "k": K, **changes})  # type: ignore[arg-type]


def losses(run: Training) -> float:
    """Of the first draft token, on the training data (how many later ones there are changes as the head learns)."""
    from backends.reference.training.train import Window

    torch.manual_seed(0)
    window = Window()
    with torch.no_grad():
        run._loss(batch(run.data, run.train), window)
    return window.loss[0] / window.rows[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_falls_and_a_resumed_run_goes_on(variant: str, target: TargetWeights, data: Distilled, tmp_path: Path) -> None:
    half = Training(tmp_path, settings(variant, epochs=4.0), target, data)
    before = losses(half)
    half.run()
    middle = losses(half)
    again = Training(tmp_path, settings(variant, epochs=8.0), target, data)
    assert again.step == half.step > 0
    assert losses(again) == pytest.approx(middle, rel=1e-5)
    again.run()
    assert again.step == 2 * half.step
    assert before > middle > losses(again)
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert len(history) == 8
    assert history[-1]["held_out"]["all"]["tau"] >= 1


def test_another_runs_folder_is_refused(target: TargetWeights, data: Distilled, tmp_path: Path) -> None:
    Training(tmp_path, settings("medusa", epochs=1.0), target, data).run()
    with pytest.raises(ConfigError, match="other settings"):
        Training(tmp_path, settings("eagle3"), target, data)


@pytest.mark.parametrize("variant", ["eagle3", "eagle2", "mtp", "p_eagle", "medusa"])
@torch.no_grad()
def test_what_is_written_is_read_back(variant: str, target: TargetWeights, tmp_path: Path) -> None:
    """The published layout exactly up to bf16, the small one up to int8; the scale of the inputs is folded in."""
    made, token_map, scale = trainee(variant, target)
    head = published(variant, finished(made, scale), shape_of(target.config), token_map, target, 7)
    write_published(tmp_path / "whole", variant, head, target)
    write_small(tmp_path / "small", head)
    expand(tmp_path / "expanded", variant, tmp_path / "small", target)
    state = finished(made, scale)
    for folder, tolerance in ((tmp_path / "whole", 2**-8), (tmp_path / "small", 1 / 127), (tmp_path / "expanded", 1 / 100)):
        loaded = load_head(folder, target, variant)
        for name, tensor in loaded.head.state_dict().items():
            if not name.endswith("head.weight") and "heads." not in name:
                wanted = state.get(name, torch.zeros(()))  # MiMo's blocks have biases, ours are zero
                assert float((tensor - wanted).abs().max()) <= tolerance * wanted.abs().max() + 1e-6, name
    assert (tmp_path / "small" / "model.safetensors").stat().st_size < (tmp_path / "whole" / "model.safetensors").stat().st_size


def test_a_written_draft_model_is_a_model(target: TargetWeights, tmp_path: Path) -> None:
    made, token_map, scale = trainee("draft_model", target)
    head = published("draft_model", finished(made, scale), shape_of(target.config), token_map, target, 0)
    write_published(tmp_path / "whole", "draft_model", head, target)
    write_small(tmp_path / "small", head)
    expand(tmp_path / "expanded", "draft_model", tmp_path / "small", target)
    for folder in (tmp_path / "whole", tmp_path / "expanded"):
        assert load_model(folder).config.num_layers == 3
        assert (folder / "tokenizer.json").exists()


@torch.no_grad()
def test_the_scale_of_inputs_is_folded_into_fc(target: TargetWeights) -> None:
    made, _, scale = trainee("eagle3", target)
    streams = torch.randn(5, 4, p.H)
    folded = streams[:, :3].flatten(1) @ finished(made, scale)["fc.weight"].T
    torch.testing.assert_close(folded, made.features(streams), atol=1e-4, rtol=0)  # type: ignore[attr-defined]


def test_the_command_trains_tests_and_writes_a_head_that_loads(folder: Path, tmp_path: Path) -> None:
    """Run as a user would, twice: the second run generates and trains nothing and gives the same head."""
    import tune

    for name, texts in (("prompts", PROMPTS), ("other", PROMPTS[:2])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in [*texts, *texts[::-1]]))
    arguments = ["train-head", "--variant", "p_eagle", "--model", str(folder), "--prompts", str(tmp_path / "prompts.jsonl")]
    arguments += ["--out", str(tmp_path / "run"), "--test-prompts", str(tmp_path / "other.jsonl"), "--epochs", "1"]
    arguments += ["--draft-vocab", "64", "--max-tokens", "12", "--export", str(tmp_path / "whole"), "--k", "2"]
    tune.app(arguments, standalone_mode=False)
    small = (tmp_path / "run" / "head" / "model.safetensors").read_bytes()
    lines = (tmp_path / "run" / "history.jsonl").read_text()
    tune.app(arguments, standalone_mode=False)
    assert (tmp_path / "run" / "head" / "model.safetensors").read_bytes() == small
    assert (tmp_path / "run" / "history.jsonl").read_text() == lines
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["held out"]["all"]["tau"] >= 1 <= results["other"]["all"]["tau"]
    card = (tmp_path / "run" / "head" / "README.md").read_text()
    assert f"{results['other']['all']['tau']:.2f}" in card
    target = read_target(folder, torch.float32)
    for written in (tmp_path / "run" / "head", tmp_path / "whole"):
        assert load_head(written, target, "p_eagle").aux_layers == (2, 4, 5)


def test_prompts_without_text_are_an_error_with_the_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    engine = Engine(EngineOptions(model=folder, max_num_seqs=2))
    with pytest.raises(ConfigError, match="line 2"):
        list(generate(engine, tmp_path / "prompts.jsonl", tmp_path / "out", max_tokens=4))


@torch.no_grad()
def test_p_eagle_started_from_eagle3_drafts_its_first_token(target: TargetWeights, data: Distilled, tmp_path: Path) -> None:
    made, token_map, scale = trainee("eagle3", target)
    head = published("eagle3", finished(made, scale), shape_of(target.config), token_map, target, 0)
    write_published(tmp_path, "eagle3", head, target)
    parallel = build("p_eagle", target, token_map, scale)
    start_from(parallel, tmp_path, target, scale)
    parallel.module.float()
    examples = [e for e in data.examples if len(e.tokens) - e.prompt_tokens >= 3]
    (x, _), (y, _) = (next(each.passes(batch(data, examples))) for each in (made, parallel))
    torch.testing.assert_close(y, x, atol=0.05, rtol=0.02)  # the head was written in bf16
    with pytest.raises(ConfigError, match="only a P-EAGLE head"):
        start_from(made, tmp_path, target, scale)
