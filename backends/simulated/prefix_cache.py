"""Which prompt blocks are still in the KV cache.

Blocks live in what running sequences leave free; the least recently used go first.
A running sequence's own blocks are counted as its own even where it shares them, so the model understates a shared prefix.
"""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit_tokens(self, blocks: tuple[int, ...]) -> int:
        """Tokens of the longest cached prefix; `blocks` are ids that each stand for a block and all before it."""
        hits = 0
        while hits < len(blocks) and blocks[hits] in self._blocks:
            hits += 1
        self.add(blocks[:hits])
        return hits * self._block_tokens

    def add(self, blocks: tuple[int, ...]) -> None:
        """Keep these blocks as the most recently used."""
        for block in reversed(blocks):  # the head of a prefix is used again most likely, so it is evicted last
            self._blocks[block] = None
            self._blocks.move_to_end(block)

    def shrink(self, free_tokens: float) -> None:
        """Evict what no longer fits into `free_tokens`."""
        while self._blocks and len(self._blocks) * self._block_tokens > free_tokens:
            self._blocks.popitem(last=False)
