"""What an in-process engine offers to the HTTP server that the reference and the simulated engine share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class RequestError(Exception):
    """A request that this engine refuses: HTTP 400 that names the field."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One validated request. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives told for each token, most likely first; None: no log-probabilities
    request_id: str = ""
    category: str | None = None  # the simulated engine's acceptance may depend on it; others ignore it


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position, before temperature and cuts."""

    logprob: float  # of the token emitted
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most likely first


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens that one engine step emitted for one request (1..K+1), and the text they add."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None  # stop, length; set on the last chunk only
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token, where they were asked for


class ServedEngine(Protocol):
    """An engine the HTTP server can drive. `generate` may be called from many tasks at once."""

    model: str
    max_model_len: int
    max_logprobs: int  # most alternatives a request may ask for; 0: this engine tells no log-probabilities

    @property
    def ready(self) -> bool: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens the tokenizer adds to a prompt."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Token ids of a conversation under the model's chat template, generation prompt included."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Chunks as they are made; closing the iterator cancels the request.

        Raises:
            RequestError: the request cannot be served (longer than the context, a parameter out of range).
        """
        ...

    def metrics_page(self) -> str:
        """The Prometheus text page of this moment."""
        ...

    async def drain(self) -> None:
        """Finish what runs, accept nothing new."""
        ...
