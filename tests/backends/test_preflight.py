"""Preflight on small checkpoints that the tests make: what it refuses, what it names, what it lets pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from backends.checkpoint import read
from backends.findings import Finding
from backends.memory import kv_bytes_per_token
from backends.preflight import preflight
from backends.types import ConfigError, ServingConfig, WorkloadFacts

VOCAB = ["<s>", "</s>", "a", "b", "c", "ab", "bc", "abc"]
FACTS = WorkloadFacts(max_input_tokens=100, max_output_tokens=50)
H = 16


def tokenizer(tokens: list[str] | None = None, merges: list[str] | None = None) -> dict[str, Any]:
    tokens = tokens or VOCAB
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges or ["a b", "b c", "ab c"]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": tokens.index(t), "content": t, **flags} for t in ("<s>", "</s>")]
    return {"version": "1.0", "added_tokens": added, "model": model, "normalizer": None, "pre_tokenizer": None}


def make(
    folder: Path,
    name: str,
    *,
    config: dict[str, Any] | None = None,
    tokens: list[str] | None = None,
    merges: list[str] | None = None,
    template: str | None = "{{ messages }}",
    with_tokenizer: bool = True,
    tensors: dict[str, np.ndarray] | None = None,
) -> str:
    path = folder / name
    path.mkdir()
    base = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8, "max_position_embeddings": 8192,
        "rope_theta": 100000.0, "dtype": "bfloat16",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(base | (config or {})))
    if with_tokenizer:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer(tokens, merges)))
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    save_file(tensors or {"model.embed_tokens.weight": np.zeros((8, H), np.float16)}, path / "model.safetensors")
    return str(path)


def head(folder: Path, name: str = "head", **changes: Any) -> str:
    """An EAGLE-3 head in the published layout: projection of three hidden states, vocabulary of four of the eight tokens."""
    ids = [0, 2, 3, 5]
    tensors = {
        "fc.weight": np.zeros((H, 3 * H), np.float16),
        "d2t": np.array([i - index for index, i in enumerate(ids)], np.int64),
        "t2d": np.array([i in ids for i in range(8)]),
    }
    tensors |= changes.pop("tensors", {})
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 4}
    config |= changes.pop("config", {})
    return make(folder, name, config=config, tensors=tensors, with_tokenizer=False, **changes)


def check(
    target: str, draft: str | None, variant: str = "draft_model", facts: WorkloadFacts = FACTS, **options: Any
) -> list[Finding]:
    k, settings = options.pop("k", 3), options.pop("settings", {})
    config = ServingConfig(backend=options.pop("backend", "vllm"), model=target, variant=variant, k=k, draft=draft, **settings)
    return preflight(config, facts, **options)


def only(findings: list[Finding], check_name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.check == check_name]
    return found


def test_the_right_draft_model_passes(tmp_path: Path) -> None:
    target = make(tmp_path, "target")
    assert check(target, make(tmp_path, "draft", config={"hidden_size": 8, "num_hidden_layers": 1})) == []


def test_the_right_head_passes(tmp_path: Path) -> None:
    assert check(make(tmp_path, "target"), head(tmp_path), "eagle3") == []


def test_swapped_token_ids_of_equal_vocabulary_size_are_an_error(tmp_path: Path) -> None:
    swapped = ["<s>", "</s>", "a", "b", "c", "bc", "ab", "abc"]
    finding = only(check(make(tmp_path, "target"), make(tmp_path, "draft", tokens=swapped)), "tokenizer")
    assert finding.level == "error"
    assert (
        finding.evidence
        == "2 of 8 token ids mean different tokens in target and draft (5 is 'ab' and 'bc', 6 is 'bc' and 'ab')"
    )


def test_a_padded_embedding_is_allowed_and_named(tmp_path: Path) -> None:
    target, draft = make(tmp_path, "target"), make(tmp_path, "draft", config={"vocab_size": 64})
    finding = only(check(target, draft, backend="reference"), "vocabulary")
    assert finding.level == "info"
    assert "8 rows in the target and 64 in the draft" in finding.evidence
    assert only(check(target, draft), "vocabulary").level == "warning"  # vLLM ends while it starts
    told = {"extra": {"speculative": {"use_heterogeneous_vocab": True}}}
    assert only(check(target, draft, settings=told), "vocabulary").level == "info"


def test_tokens_that_only_one_side_has_are_a_warning(tmp_path: Path) -> None:
    finding = only(check(make(tmp_path, "target"), make(tmp_path, "draft", tokens=[*VOCAB, "<tool>"])), "tokenizer")
    assert (finding.level, finding.evidence) == ("warning", "1 tokens exist in the draft alone (8 '<tool>')")


def test_other_merges_of_the_same_tokens_are_a_warning(tmp_path: Path) -> None:
    finding = only(check(make(tmp_path, "target"), make(tmp_path, "draft", merges=["b c", "a bc"])), "tokenizer")
    assert (finding.level, finding.evidence[:17]) == ("warning", "merges (3 and 2) ")


def test_a_missing_chat_template_is_a_warning(tmp_path: Path) -> None:
    target, bare = make(tmp_path, "target"), make(tmp_path, "draft", template=None)
    assert "the draft" in only(check(target, bare), "chat_template").evidence
    assert "draft has no chat template" in only(check(bare, None, "ngram"), "chat_template").evidence


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"hidden_size": 32}},
        {"config": {"target_hidden_size": 32}},
        {"tensors": {"fc.weight": np.zeros((H, 100), np.float16)}},
    ],
    ids=["hidden_size", "target_hidden_size", "projection"],
)
def test_a_head_for_another_hidden_size_is_an_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert only(check(make(tmp_path, "target"), head(tmp_path, **changes), "eagle3"), "hidden_size").level == "error"


def test_a_head_of_2048_positions_and_a_request_of_5000_tokens_is_an_error(tmp_path: Path) -> None:
    target = make(tmp_path, "target")
    short = head(tmp_path, config={"max_position_embeddings": 2048})
    long = WorkloadFacts(max_input_tokens=4900, max_output_tokens=100)
    finding = only(check(target, short, "eagle3", long), "context")
    assert (finding.level, finding.evidence) == ("error", "the longest request has 5000 tokens, the draft 2048 positions")
    assert check(target, short, "eagle3", FACTS) == []


def test_rope_scaling_extends_the_context(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    rope = {"config": {"max_position_embeddings": 2048, "rope_scaling": scaling}}
    target = make(tmp_path, "target", **rope)
    assert check(target, head(tmp_path, **rope), "eagle3", WorkloadFacts(max_input_tokens=8000)) == []


def test_a_head_without_the_targets_rope_scaling_is_a_warning(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    target = make(tmp_path, "target", config={"rope_scaling": scaling})
    finding = only(check(target, head(tmp_path), "eagle3"), "rope")
    assert finding.level == "warning"
    assert "factor 8.0 and None" in finding.evidence
    same_in_new_layout = {"rope_parameters": {"rope_theta": 100000.0, **scaling}, "rope_theta": None}
    assert check(target, head(tmp_path, "new", config=same_in_new_layout), "eagle3") == []


def test_a_head_that_declares_another_base_model_is_named(tmp_path: Path) -> None:
    target = make(tmp_path, "Llama-3.1-8B-Instruct")
    verifier = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["LlamaForCausalLM"]}
    wrong = head(tmp_path, config={"speculators_config": {"verifier": verifier}})
    finding = only(check(target, wrong, "eagle3"), "base_model")
    assert (finding.level, "Qwen/Qwen3-8B" in finding.evidence) == ("warning", True)
    other = {"verifier": {**verifier, "architectures": ["Qwen3ForCausalLM"]}}
    assert (
        only(check(target, head(tmp_path, "w2", config={"speculators_config": other}), "eagle3"), "base_model").level == "error"
    )
    right = {"verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}}
    assert check(target, head(tmp_path, "right", config={"speculators_config": right}), "eagle3") == []


def test_the_base_model_is_also_read_from_the_model_card(tmp_path: Path) -> None:
    draft = head(tmp_path)
    (Path(draft) / "README.md").write_text("---\nlicense: mit\nbase_model:\n- org/Other-7B\n---\n# Head\n")
    assert "org/Other-7B" in only(check(make(tmp_path, "target"), draft, "eagle3"), "base_model").evidence


def test_layer_ids_outside_the_target_are_an_error_and_explicit_ones_a_warning_for_sglang(tmp_path: Path) -> None:
    target = make(tmp_path, "target")
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    assert check(target, head(tmp_path, config=ids), "eagle3") == []
    assert only(check(target, str(tmp_path / "head"), "eagle3", backend="sglang"), "layer_ids").level == "warning"
    outside = head(tmp_path, "outside", config={"eagle_aux_hidden_state_layer_ids": [2, 16, 29]})
    assert only(check(target, outside, "eagle3"), "layer_ids").level == "error"


@pytest.mark.parametrize(
    ("tensors", "evidence"),
    [
        ({"d2t": np.array([0, 1, 1, -1], np.int64)}, "maps 4 draft tokens to 3 target tokens"),
        ({"d2t": np.array([0, 1, 1, 9], np.int64)}, "token ids from 0 to 12, the target has 0 to 7"),
        ({"t2d": np.array([True] * 3 + [False] * 5)}, "t2d flags 3 target tokens"),
    ],
)
def test_inconsistent_draft_vocabulary_maps_are_an_error(tmp_path: Path, tensors: dict[str, Any], evidence: str) -> None:
    finding = only(check(make(tmp_path, "target"), head(tmp_path, tensors=tensors), "eagle3"), "draft_vocabulary")
    assert finding.level == "error"
    assert evidence in finding.evidence


def test_coverage_of_the_recorded_output_is_the_ceiling_of_greedy_acceptance(tmp_path: Path) -> None:
    # "abc" is token 7, outside the draft vocabulary {0, 2, 3, 5}; "a" is 2 and "b" is 3: 2 of 4 tokens are inside.
    found = check(make(tmp_path, "target"), head(tmp_path), "eagle3", outputs=["abc", "a", "b", "abc"])
    finding = only(found, "draft_vocabulary")
    assert finding.level == "warning"
    assert "4 tokens holds 50.0% of the 4 tokens" in finding.evidence
    assert "0.50" in finding.consequence


@pytest.mark.parametrize(
    ("variant", "k", "target_config", "draft_config", "evidence"),
    [
        ("medusa", 5, {}, {"medusa_num_heads": 3}, "K = 5, the checkpoint has 3 Medusa heads"),
        ("dflash", 17, {}, {"block_size": 16}, "trained for blocks of 16"),
        ("mtp", 1, {}, None, "has no multi-token-prediction layer"),
        ("mtp", 3, {"num_nextn_predict_layers": 2}, None, "K = 3 is no multiple of the 2"),
    ],
)
def test_k_beyond_what_the_head_can_is_an_error(
    tmp_path: Path, variant: str, k: int, target_config: dict[str, Any], draft_config: dict[str, Any] | None, evidence: str
) -> None:
    target = make(tmp_path, "target", config=target_config)
    draft = None if draft_config is None else head(tmp_path, config=draft_config)
    finding = only(check(target, draft, variant, k=k), "k")
    assert finding.level == "error"
    assert evidence in finding.evidence


def test_a_head_without_a_mask_token_cannot_draft_in_parallel(tmp_path: Path) -> None:
    target = make(tmp_path, "target")
    assert only(check(target, head(tmp_path), "p_eagle"), "p_eagle").level == "error"
    assert check(target, head(tmp_path, "masked", config={"ptd_token_id": 7}), "p_eagle") == []


def test_quantization_that_the_checkpoint_lacks_is_an_error(tmp_path: Path) -> None:
    target = make(tmp_path, "target")
    assert only(check(target, None, "ngram", settings={"weight_quantization": "awq"}), "quantization").level == "error"
    quantized = make(tmp_path, "awq", config={"quantization_config": {"quant_method": "awq"}})
    assert check(quantized, None, "ngram", settings={"weight_quantization": "awq"}) == []
    assert only(check(quantized, head(tmp_path), "eagle3"), "quantization").level == "info"


def test_sampling_parameters_that_vllm_refuses_with_speculation_are_an_error(tmp_path: Path) -> None:
    facts = WorkloadFacts(sampling_parameters=frozenset({"min_p", "temperature"}))
    target = make(tmp_path, "target")
    assert "min_p" in only(check(target, None, "ngram", facts), "sampling").evidence
    assert check(target, None, "ngram", facts, backend="reference") == []


def test_kv_bytes_per_token_follow_from_the_shape() -> None:
    smollm2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "dtype": "bfloat16"}
    assert kv_bytes_per_token(smollm2, "auto") == 2 * 30 * 3 * 64 * 2  # 23,040
    assert kv_bytes_per_token(smollm2, "fp8") == 2 * 30 * 3 * 64
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"}
    assert kv_bytes_per_token(latent, "auto") == 61 * 576 * 2


def test_the_cache_that_a_draft_costs_is_predicted(tmp_path: Path) -> None:
    # Target: 4 layers × 2 × 2 heads × 4 × 2 bytes = 128 bytes a token, weights 256 bytes. Draft of equal shape: twice of both.
    target, draft = make(tmp_path, "target"), make(tmp_path, "draft")
    finding = only(check(target, draft, gpu_memory_bytes=1_000_000), "memory")
    off, on = (900_000 - 256) // 128, (900_000 - 512) // 256
    assert finding.evidence.startswith(f"predicted KV cache: {off} tokens without draft, {on} with it")
    assert f"{off // 150} without and {on // 150} with draft requests of 150" in finding.evidence
    assert only(check(target, draft, gpu_memory_bytes=500), "memory").level == "error"


def test_what_is_not_on_this_machine_is_said_not_to_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert only(check("org/never-downloaded", None, "ngram"), "not_checked").level == "info"


def test_a_model_of_the_local_hub_cache_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshots = tmp_path / "hub" / "models--org--target" / "snapshots"
    snapshots.mkdir(parents=True)
    make(snapshots, "0123")
    assert check("org/target", None, "ngram") == []


def test_a_directory_that_is_no_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check(str(tmp_path), None, "ngram")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(str(tmp_path))


def test_the_gravest_finding_comes_first(tmp_path: Path) -> None:
    swapped = ["<s>", "</s>", "b", "a", "c", "ab", "bc", "abc"]
    found = check(make(tmp_path, "target"), make(tmp_path, "draft", tokens=swapped, template=None))
    assert [finding.level for finding in found] == ["error", "warning"]


def test_preflight_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    target, draft = make(tmp_path, "target"), head(tmp_path)
    code = (
        "import sys; from backends.preflight import preflight; from backends.types import *\n"
        f"config = ServingConfig('vllm', {target!r}, 'eagle3', 3, draft={draft!r})\n"
        "preflight(config, WorkloadFacts(), outputs=['abc'])\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
