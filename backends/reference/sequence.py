"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.reference.sampling import Sampling
from backends.reference.tokenizer import TextStream
from backends.serving import TokenLogprob


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens so far and where they stand: rows 0..computed-1 of `slot` in the KV cache hold the first `computed` tokens."""

    id: int
    tokens: list[int]  # prompt, then output
    prompt_tokens: int
    max_tokens: int
    sampling: Sampling
    end_ids: frozenset[int]  # empty where the request ignores EOS
    text: TextStream
    logprobs: int | None = None  # alternatives told for each token; None: none asked for
    slot: int = -1  # -1: not running
    computed: int = 0
    reused: int | None = None  # tokens of the prompt that another sequence had computed; None: never had a slot
    finish_reason: str | None = field(default=None)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and self.output_tokens > 0

    @property
    def draft_room(self) -> int:
        """Most draft tokens that could still be emitted: the step's own token takes one of what is left."""
        return self.max_tokens - self.output_tokens - 1


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step emitted for one sequence."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] = ()
