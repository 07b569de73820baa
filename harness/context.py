"""Whether every request fits the model's context, found before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from backends.reference.tokenizer import Tokenizer
from backends.types import ConfigError
from workloads.types import Request, WorkloadError


def output_limit(request: Request, cap: int | None) -> int | None:
    """Most tokens this request may be answered with: its own limit, else the recorded length, both under the user's cap."""
    known = [value for value in (request.max_tokens or request.output_tokens, cap) if value]
    return min(known, default=None)


def check_lengths(model: str, trace: str, requests: Sequence[Request], cap: int | None) -> int | None:
    """The longest request's tokens, prompt and answer; None where `model` is no local directory, so nothing can be counted.

    Raises:
        WorkloadError: a request does not fit the context.
        ConfigError: the directory holds no model.
    """
    folder = Path(model)
    if not folder.exists() and "/" in model and not model.startswith((".", "/", "~")):
        return None  # a hub id
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ConfigError(f"--model {model}: {config_path} does not exist; give a model directory, a hub id, or 'demo'")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"--model {model}: no weights there (*.safetensors); convert older checkpoints to safetensors first")
    context = json.loads(config_path.read_text())["max_position_embeddings"]
    tokenizer = Tokenizer(folder)
    longest = 0
    for request in requests:
        prompt = len(prompt_ids(request, tokenizer)) or request.input_tokens or 0
        answer = output_limit(request, cap) or 1
        if prompt + answer > context:
            raise WorkloadError(
                f"{trace}:{request.line}: prompt of {prompt} tokens plus {answer} output tokens exceed the model's context of "
                f"{context} tokens; remove the request, or limit answers with --max-output-tokens"
            )
        longest = max(longest, prompt + answer)
    return longest


def prompt_ids(request: Request, tokenizer: Tokenizer) -> Sequence[int]:
    """Token ids of the request's prompt under the model's chat template; empty where the request has no text."""
    if request.messages:
        return tokenizer.encode_chat(request.messages, request.tools)
    if request.prompt is not None:
        return tokenizer.encode(request.prompt)
    return request.token_ids or ()
