"""Text to token ids and back: `tokenizers`, the chat template in a sandbox, and text that grows token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from backends.reference.config import read_json
from backends.serving import RequestError
from backends.types import ConfigError

UNFINISHED = "\ufffd"  # what decoding gives for bytes that do not end a character


class Tokenizer:
    """The tokenizer of a model directory."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where tokenizer.json is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{folder} has no tokenizer.json")
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{path} cannot be read: {error}") from None
        settings_path = folder / "tokenizer_config.json"
        settings = read_json(settings_path) if settings_path.exists() else {}
        self._specials = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self._template = _chat_template(folder, settings)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self._fast.encode(text, add_special_tokens=special).ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Ids of the conversation with the generation prompt at its end.

        Raises:
            RequestError: the model has no chat template, or the template refuses these messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template: use /v1/completions", field="messages")
        try:
            text = (
                _environment()
                .from_string(self._template)
                .render(messages=messages, tools=tools, add_generation_prompt=True, **self._specials)
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template refused the messages: {error}", field="messages") from None
        return self.encode(text, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._fast.decode(list(ids), skip_special_tokens=True)

    @property
    def end_id(self) -> int | None:
        """Id of the token that ends an answer; None where the tokenizer names none."""
        end = self._specials["eos_token"]
        return self._fast.token_to_id(end) if end else None

    def special_ids(self) -> list[int]:
        """Ids of special tokens, ascending."""
        return sorted(id_ for id_, token in self._fast.get_added_tokens_decoder().items() if token.special)

    def vocabulary(self) -> dict[str, int]:
        """Every token's id, added tokens included: two tokenizers with equal vocabularies can draft for each other."""
        return self._fast.get_vocab(with_added_tokens=True)


class TextStream:
    """Text of a growing token sequence. It never splits a character, and nothing of a stop string gets out."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._ids: list[int] = []
        self._context = 0  # ids before this one are settled and no longer decoded
        self._done = 0  # ids before this one have given their text
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def push(self, ids: Sequence[int]) -> tuple[str, int]:
        """Text to send now, and how many of `ids` were used: all, or those up to the one that completed a stop string."""
        if not self._stop:
            return self._advance(ids), len(ids)
        sent = ""
        for used, token in enumerate(ids, 1):
            sent += self._release(self._advance([token]))
            if self.stopped:
                return sent, used
        return sent, len(ids)

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stopped:
            return ""
        rest = self._held + self._fresh()
        self._held, self._done = "", len(self._ids)
        return rest

    def _advance(self, ids: Sequence[int]) -> str:
        self._ids += ids
        fresh = self._fresh()
        if not fresh or fresh.endswith(UNFINISHED):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return fresh

    def _fresh(self) -> str:
        """Decoded with some ids before them, since a token's text may depend on its neighbours (leading spaces)."""
        settled = self._tokenizer.decode(self._ids[self._context : self._done])
        return self._tokenizer.decode(self._ids[self._context :])[len(settled) :]

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    """What published templates expect: trimmed blocks, `tojson` without HTML escapes, `raise_exception`, `strftime_now`."""

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment
