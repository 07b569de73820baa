"""The catalogue of published draft heads: complete entries, each with its source, found by target."""

from __future__ import annotations

from backends.drafts import catalogue, known_drafts
from backends.types import NEEDS_DRAFT, VARIANTS


def test_it_knows_the_heads_of_llama_3_3_70b() -> None:
    heads = {(known.variant, known.draft) for known in known_drafts("meta-llama/Llama-3.3-70B-Instruct")}
    assert heads == {
        ("eagle3", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"),
        ("eagle3", "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3"),
        ("eagle3", "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge"),
    }


def test_at_least_25_targets_each_entry_complete_and_sourced() -> None:
    assert len({known.target for known in catalogue()}) >= 25
    for known in catalogue():
        assert known.variant in VARIANTS
        assert known.source.startswith("https://")
        assert (known.draft is not None) == (known.variant in NEEDS_DRAFT), known
        assert (known.layout == "in_target") == (known.variant == "mtp"), known
        assert known.draft is None or known.draft.count("/") == 1


def test_no_head_is_listed_twice_for_a_target() -> None:
    pairs = [(known.target, known.variant, known.draft) for known in catalogue()]
    assert len(pairs) == len(set(pairs))


def test_an_unknown_context_is_none_not_zero() -> None:
    assert all(known.trained_context is None or known.trained_context > 0 for known in catalogue())


def test_a_local_folder_is_found_by_its_name_and_case_does_not_matter() -> None:
    assert {known.target for known in known_drafts("/models/qwen3-8b/")} == {"Qwen/Qwen3-8B"}


def test_a_model_without_known_heads_gives_an_empty_list() -> None:
    assert known_drafts("HuggingFaceTB/SmolLM2-135M-Instruct") == []
