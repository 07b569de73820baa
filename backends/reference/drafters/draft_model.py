"""A second, cheaper model drafts a chain, one token after another, with a KV cache of its own under the target's slots."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from backends.reference.batch import Piece, build_batch
from backends.reference.drafters.choice import Choice, Law, chain
from backends.reference.kv_cache import KVCache
from backends.reference.model import Decoder
from backends.reference.sequence import Sequence
from backends.reference.verify import Draft


class DraftModel:
    capture: tuple[int, ...] = ()

    def __init__(self, model: Decoder, *, slots: int, rows: int, stored: str, vocab_size: int, rule: str) -> None:
        """`stored`: as in `KVCache`."""
        self._model = model
        self._cache = KVCache(model.config, slots=slots, rows=rows, dtype=model.dtype, device=model.device, stored=stored)
        self._vocab_size = vocab_size
        self._choice = Choice(vocab_size, None, rule)
        self._seen: list[tuple[int, list[int]]] = [
            (0, [])
        ] * slots  # of each slot: tokens in the cache, drafts in rows after them

    def propose(self, work: list[tuple[Sequence, int]]) -> list[Draft]:
        """The first pass takes in whatever the cache lacks: the prompt once, then one or two tokens (after a fully accepted
        draft the last drafted token was never run through the model)."""
        drafts: list[list[int]] = [[] for _ in work]
        laws: list[list[Law]] = [[] for _ in work]
        active = [i for i, (_, limit) in enumerate(work) if limit > 0]
        pieces = [self._catch_up(work[i][0]) for i in active]
        while active:
            logits = self._next_logits(pieces)
            where = [(work[i][0].sampling, len(work[i][0].tokens), len(drafts[i])) for i in active]
            for i, token, law in zip(active, *self._choice.one(logits, where), strict=True):
                drafts[i].append(token)
                laws[i].append(law)
            active = [i for i in active if len(drafts[i]) < work[i][1]]
            pieces = [Piece(s.slot, len(s.tokens) + len(drafts[i]) - 1, drafts[i][-1:]) for i in active for s in (work[i][0],)]
        for (sequence, limit), draft in zip(work, drafts, strict=True):
            if limit > 0:
                self._seen[sequence.slot] = (len(sequence.tokens), draft[:-1])
        return [chain(tokens, drawn) for tokens, drawn in zip(drafts, laws, strict=True)]

    def observe(self, sequence: Sequence, rows: list[int], hidden: Tensor, captured: list[Tensor]) -> None:
        pass

    def adopt(self, sequence: Sequence, slot: int, rows: int) -> int:
        usable = min(rows, self._seen[slot][0])
        self._cache.copy_rows(slot, sequence.slot, usable)
        self._seen[sequence.slot] = (usable, [])
        return rows

    def forget(self, sequence: Sequence) -> None:
        pass

    def _catch_up(self, sequence: Sequence) -> Piece:
        known, drafted = self._seen[sequence.slot]
        for token, actual in zip(drafted, sequence.tokens[known:], strict=False):
            if token != actual:
                break
            known += 1
        known = min(known, len(sequence.tokens) - 1)  # forced acceptance may emit a refused token all the same
        return Piece(sequence.slot, known, sequence.tokens[known:])

    def _next_logits(self, pieces: list[Piece]) -> Tensor:
        """Logits [pieces, target vocabulary] after each piece's last token. Vocabularies padded to other sizes are aligned."""
        model, cache = self._model, self._cache
        batch = build_batch(
            pieces, slot_rows=cache.rows, dtype=model.dtype, device=model.device, window=model.config.sliding_window
        )
        hidden, _ = model.forward(batch, cache)
        last = [batch.starts[piece.slot] + len(piece.tokens) - 1 for piece in pieces]
        logits = model.logits(hidden[last])[:, : self._vocab_size]
        return F.pad(logits, (0, self._vocab_size - logits.shape[1]), value=float("-inf"))
