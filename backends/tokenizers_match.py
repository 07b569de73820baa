"""Whether two tokenizers mean the same by the same token ids. Sizes say nothing: two of equal size may have swapped ids."""

from __future__ import annotations

from collections.abc import Iterator

from backends.checkpoint import Checkpoint
from backends.findings import Finding

_SPECIAL = ("bos_token", "eos_token")
SHOWN = 3


def compare_tokenizers(target: Checkpoint, draft: Checkpoint, *, shares_embedding: bool) -> Iterator[Finding]:
    """Findings on vocabulary, merges, special tokens and chat template.

    `shares_embedding`: the draft is a head that uses the target's own ids, so that a directory without a tokenizer is normal.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        missing = target if target.tokenizer is None else draft
        if not shares_embedding or missing is target:
            yield Finding(
                "warning",
                "tokenizer",
                f"{missing.name} has no tokenizer.json",
                "nobody can tell whether draft and target mean the same by a token id",
                "save the fast tokenizer beside the weights",
            )
        return
    yield from _vocabulary(target, draft)
    yield from _segmentation(target, draft)
    yield from _special_tokens(target, draft)
    if target.chat_template and not draft.chat_template and not shares_embedding:
        yield Finding(
            "warning",
            "chat_template",
            f"the target has a chat template, the draft {draft.name} has none",
            "the draft was hardly trained on this chat format, and low acceptance is likely",
            "use the instruction-tuned draft of the same family",
        )


def _vocabulary(target: Checkpoint, draft: Checkpoint) -> Iterator[Finding]:
    here = {token_id: token for token, token_id in target.token_ids.items()}
    there = {token_id: token for token, token_id in draft.token_ids.items()}
    different = [i for i in sorted(here.keys() & there.keys()) if here[i] != there[i]]
    if different:
        shown = ", ".join(f"{i} is {here[i]!r} and {there[i]!r}" for i in different[:SHOWN])
        yield Finding(
            "error",
            "tokenizer",
            f"{len(different)} of {len(here)} token ids mean different tokens in target and draft ({shown})",
            "every draft is another text than the draft model meant: nothing is accepted, or the output is wrong",
            "use a draft of the same tokenizer",
        )
        return
    only = [("target", here.keys() - there.keys()), ("draft", there.keys() - here.keys())]
    for name, extra in only:
        if extra:
            tokens = here if name == "target" else there
            shown = ", ".join(f"{i} {tokens[i]!r}" for i in sorted(extra)[:SHOWN])
            yield Finding(
                "warning",
                "tokenizer",
                f"{len(extra)} tokens exist in the {name} alone ({shown})",
                "they can never be drafted" if name == "target" else "a draft of one of them is always rejected",
                "check that these are unused tokens; else use a draft of the same tokenizer",
            )


def _segmentation(target: Checkpoint, draft: Checkpoint) -> Iterator[Finding]:
    assert target.tokenizer is not None, "the caller has looked"
    assert draft.tokenizer is not None, "the caller has looked"
    here, there = _merges(target), _merges(draft)
    parts = [name for name in ("normalizer", "pre_tokenizer") if target.tokenizer.get(name) != draft.tokenizer.get(name)]
    if here != there:
        parts.insert(0, f"merges ({len(here)} and {len(there)})")
    if parts:
        yield Finding(
            "warning",
            "tokenizer",
            f"{', '.join(parts)} of target and draft differ, the token ids do not",
            "the draft was trained on other splits of the same text, and accepts less",
            "use a draft of the same tokenizer",
        )


def _merges(checkpoint: Checkpoint) -> list[str]:
    merges = (checkpoint.tokenizer or {}).get("model", {}).get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _special_tokens(target: Checkpoint, draft: Checkpoint) -> Iterator[Finding]:
    for name in _SPECIAL:
        here, there = (_content(checkpoint.tokenizer_config.get(name)) for checkpoint in (target, draft))
        if here and there and here != there:
            yield Finding(
                "warning",
                "special_tokens",
                f"{name} is {here!r} in the target and {there!r} in the draft",
                "the draft ends or begins texts with another token, so that their last step is rejected",
                "use a draft tuned for the same chat format",
            )


def _content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
