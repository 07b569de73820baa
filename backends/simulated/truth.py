"""What a simulated server really did, one JSON line for each request.

Times are CLOCK_MONOTONIC seconds, which all processes of a machine share: `time.monotonic()` of the client is on the same axis.
A chunk's time is taken right before its bytes are given to the socket, which is where the event loop writes them.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import BinaryIO

import orjson

from backends.simulated.faults import Fault


@dataclass(slots=True)
class RequestTruth:
    request_id: str
    number: int  # from 1, in order of receipt
    received_s: float
    faults: tuple[Fault, ...] = ()
    status: int = 200
    prompt_tokens: int = 0
    made_tokens: int = 0  # by the engine
    decode_steps: int = 0
    accepted_tokens: int = 0  # emitted ones, past-the-end ones dropped
    model_first_s: float | None = None  # when the model's clock says that the first and last token were ready
    model_last_s: float | None = None
    finish_reason: str | None = None
    ended: str = "completed"  # or: cancelled, error, cut
    queued: bool = False  # the engine has it
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)

    @property
    def sent_tokens(self) -> int:
        return sum(self.chunk_tokens)

    def fault(self, name: str) -> Fault | None:
        return next((fault for fault in self.faults if fault.name == name), None)

    def sending(self, tokens: int) -> None:
        """Note that `tokens` tokens go to the socket now."""
        self.chunk_s.append(time.monotonic())
        self.chunk_tokens.append(tokens)

    def line(self) -> bytes:
        first, last = (self.chunk_s[0], self.chunk_s[-1]) if self.chunk_s else (None, None)
        return orjson.dumps(
            {
                "request_id": self.request_id,
                "number": self.number,
                "status": self.status,
                "ended": self.ended,
                "finish_reason": self.finish_reason,
                "faults": [fault.name for fault in self.faults],
                "received_s": self.received_s,
                "first_token_s": first,
                "last_token_s": last,
                "model_first_s": self.model_first_s,
                "model_last_s": self.model_last_s,
                "prompt_tokens": self.prompt_tokens,
                "output_tokens": self.sent_tokens,
                "made_tokens": self.made_tokens,
                "decode_steps": self.decode_steps,
                "accepted_tokens": self.accepted_tokens,
                "chunk_s": self.chunk_s,
                "chunk_tokens": self.chunk_tokens,
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )


CURRENT: ContextVar[RequestTruth | None] = ContextVar("current_request_truth", default=None)
"""The request whose response is being made; set by the wire layer, read by the engine."""


class TruthLog:
    """Appends finished requests to a file, each line written at once."""

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file
        self._open: dict[int, RequestTruth] = {}
        self.count = 0

    def begin(self, request_id: str, faults: tuple[Fault, ...]) -> RequestTruth:
        self.count += 1
        hitting = tuple(fault for fault in faults if fault.hits(self.count))
        truth = self._open[self.count] = RequestTruth(request_id or str(self.count), self.count, time.monotonic(), hitting)
        return truth

    def on_their_way(self, before_s: float) -> bool:
        """Whether a request received by then is still being read and has not reached the engine."""
        return any(not truth.queued and truth.received_s <= before_s for truth in self._open.values())

    def end(self, truth: RequestTruth) -> None:
        self._open.pop(truth.number, None)
        if self._file is not None:
            self._file.write(truth.line())
            self._file.flush()
