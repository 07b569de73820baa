"""The decoder gives transformers' logits, whatever way the tokens are cut into passes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, save, shape
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from backends.reference.batch import Piece, build_batch
from backends.reference.kv_cache import KVCache
from backends.reference.loader import load_model
from backends.reference.model import Decoder
from backends.types import ConfigError

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**shape()),
    "llama untied": LlamaConfig(**shape(tie_word_embeddings=False)),
    "llama biased": LlamaConfig(**shape(attention_bias=True, mlp_bias=True)),
    "llama 3 rope": LlamaConfig(**shape(rope_parameters=LLAMA3_ROPE)),
    "linear rope": LlamaConfig(**shape(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})),
    "qwen2": Qwen2Config(**shape()),
    "qwen3": Qwen3Config(**shape(head_dim=32)),
    "mistral": MistralConfig(**shape(sliding_window=None)),
    "mistral with a window": MistralConfig(**shape(sliding_window=24)),
}


class Runner:
    """A decoder with a cache of four slots."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.cache = KVCache(model.config, slots=4, rows=256, dtype=model.dtype, device=model.device)

    def __call__(self, *pieces: Piece, capture: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        batch = build_batch(
            pieces,
            slot_rows=256,
            dtype=self.model.dtype,
            device=self.model.device,
            window=self.model.config.sliding_window,
        )
        hidden, captured = self.model.forward(batch, self.cache, capture)
        return self.model.logits(hidden), captured


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save(CONFIGS[name], tmp_path)
    run = Runner(load_model(tmp_path))
    ids = tokens(100)
    expected = reference(model, ids)
    whole, _ = run(Piece(0, 0, ids))
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    parts = [run(Piece(2, start, ids[start:end]))[0] for start, end in ((0, 40), (40, 47), (47, 48), (48, 90), (90, 100))]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_sharded_weights_equal_one_file(tmp_path: Path) -> None:
    model = save(CONFIGS["llama"], tmp_path, shard="200KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = tokens(20)
    torch.testing.assert_close(Runner(load_model(tmp_path))(Piece(0, 0, ids))[0], reference(model, ids), atol=1e-4, rtol=1e-4)


def test_sequences_of_different_lengths_and_drafts_share_a_pass(tiny: tuple[Path, PreTrainedModel]) -> None:
    run = Runner(load_model(tiny[0]))
    texts = [tokens(n, seed=n) for n in (60, 25, 90, 50)]
    run(*(Piece(slot, 0, ids[:20]) for slot, ids in enumerate(texts)))
    cuts = ((20, 21), (20, 25), (20, 60), (20, 23))  # one token, a chain, a prefill chunk, a chain
    logits, _ = run(*(Piece(slot, a, texts[slot][a:b]) for slot, (a, b) in enumerate(cuts)))
    expected = torch.cat([reference(tiny[1], texts[slot])[a:b] for slot, (a, b) in enumerate(cuts)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_tree_gives_each_node_the_logits_of_its_own_path(tiny: tuple[Path, PreTrainedModel]) -> None:
    """Nodes: 0 root, 1 and 2 its children, 3 and 4 children of 2, 5 a child of 4; slot 1 runs a chain beside it."""
    run = Runner(load_model(tiny[0]))
    prompt, nodes, chain = tokens(30), tokens(6, seed=1), tokens(34, seed=2)
    run(Piece(0, 0, prompt), Piece(1, 0, chain[:30]))
    logits, _ = run(Piece(0, 30, nodes, parents=(0, 0, 2, 2, 4)), Piece(1, 30, chain[30:]))
    for node, path in enumerate(([0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4], [0, 2, 4, 5])):
        expected = reference(tiny[1], prompt + [nodes[i] for i in path])[-1]
        torch.testing.assert_close(logits[node], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[6:], reference(tiny[1], chain)[30:], atol=1e-4, rtol=1e-4)


def test_a_tree_run_level_by_level_equals_the_tree_run_at_once(tiny: tuple[Path, PreTrainedModel]) -> None:
    """Two trees and, in the last pass, a chain beside them; the second tree has fewer nodes."""
    run = Runner(load_model(tiny[0]))
    prompts, nodes = [tokens(n, seed=n) for n in (30, 12, 40)], tokens(7, seed=1)
    parents = (0, 0, 2, 1, 2, 4)
    for slot, prompt in enumerate(prompts):
        run(Piece(slot, 0, prompt))
    whole = [run(Piece(slot, len(prompts[slot]), nodes[:n], parents[: n - 1]))[0] for slot, n in ((0, 7), (1, 5))]
    for slot, prompt in enumerate(prompts):
        run(Piece(slot, 0, prompt))
    parts: list[list[Tensor]] = [[], []]
    for level in ((0, 1), (1, 3), (3, 6), (6, 7)):
        pieces = [
            Piece(slot, len(prompts[slot]), nodes[level[0] : min(n, level[1])], parents[: min(n, level[1]) - 1], level[0])
            for slot, n in ((0, 7), (1, 5))
            if level[0] < n
        ]
        logits, _ = run(*pieces, Piece(2, 40, tokens(3, seed=8)))
        for piece, rows in zip(pieces, logits.split([*(len(piece.tokens) for piece in pieces), 3]), strict=False):
            parts[piece.slot].append(rows)
    for expected, got in zip(whole, parts, strict=True):
        torch.testing.assert_close(torch.cat(got), expected, atol=1e-4, rtol=1e-4)


def test_a_tree_under_a_window_equals_transformers(tmp_path: Path) -> None:
    model = save(CONFIGS["mistral with a window"], tmp_path)
    run = Runner(load_model(tmp_path))
    prompt, nodes = tokens(40), tokens(6, seed=1)
    run(Piece(0, 0, prompt))
    logits, _ = run(Piece(0, 40, nodes, parents=(0, 0, 0, 3, 4)))
    for node, path in enumerate(([0], [0, 1], [0, 2], [0, 3], [0, 3, 4], [0, 3, 4, 5])):
        expected = reference(model, prompt + [nodes[i] for i in path])[-1]
        torch.testing.assert_close(logits[node], expected, atol=1e-4, rtol=1e-4)


def test_a_chunk_beside_a_sequence_at_the_end_of_its_slot(tiny: tuple[Path, PreTrainedModel]) -> None:
    run = Runner(load_model(tiny[0]))
    full, short = tokens(256), tokens(20, seed=1)
    run(Piece(0, 0, full[:255]))
    logits, _ = run(Piece(0, 255, full[255:]), Piece(1, 0, short))
    torch.testing.assert_close(logits[0], reference(tiny[1], full)[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1:], reference(tiny[1], short), atol=1e-4, rtol=1e-4)


def test_an_accepted_tree_path_is_kept_and_decoding_goes_on(tiny: tuple[Path, PreTrainedModel]) -> None:
    run = Runner(load_model(tiny[0]))
    prompt, nodes = tokens(30), tokens(6, seed=1)
    run(Piece(0, 0, prompt))
    run(Piece(0, 30, nodes, parents=(0, 0, 2, 2, 4)))
    run.cache.keep_paths([(0, 30, (2, 4, 5))])
    text = prompt + [nodes[i] for i in (0, 2, 4, 5)]
    following = tokens(1, seed=9)
    logits, _ = run(Piece(0, len(text), following))
    torch.testing.assert_close(logits[0], reference(tiny[1], text + following)[-1], atol=1e-4, rtol=1e-4)


def test_captured_streams_are_those_after_i_blocks(tiny: tuple[Path, PreTrainedModel]) -> None:
    ids = tokens(20)
    _, captured = Runner(load_model(tiny[0]))(Piece(0, 0, ids), capture=(0, 2, 7))
    with torch.inference_mode():
        states = tiny[1](torch.tensor([ids]), output_hidden_states=True).hidden_states
    for stream, i in zip(captured, (0, 2, 7), strict=True):
        torch.testing.assert_close(stream, states[i][0], atol=1e-4, rtol=1e-4)


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "rope type 'yarn' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized by fp8"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"hidden_size": None}, "config.json"),
        ({"intermediate_size": 99}, "has shape"),
        ({"num_hidden_layers": 9}, "lack tensor model.layers.8."),
        ({"num_hidden_layers": 7}, "does not know, such as model.layers.7."),
    ],
)
def test_a_model_that_cannot_run_is_refused_by_name(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    save(CONFIGS["llama"], tmp_path)
    _edit(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(tmp_path)
    save(CONFIGS["llama"], tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        load_model(tmp_path)
