"""Server-sent events, from bytes as the socket gives them (WHATWG HTML, section 9.2.6, with the leniency that engines need)."""

from __future__ import annotations

Event = tuple[bytes, bytes]  # name (empty for the default), data


class EventParser:
    r"""Cuts a byte stream into events.

    Lines end with ``\n`` alone or ``\r\n``; nothing else ends one, since U+2028, U+0085 or a form feed inside a JSON string are
    text (`str.splitlines` would cut there). Bytes are kept until their line is whole, so a character or an event may be cut
    anywhere between two reads.
    """

    __slots__ = ("_data", "_name", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes."""
        # Nearly every read is one whole event, and this is where the client's time goes.
        if (
            not (self._rest or self._data or self._name)
            and data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2
        ):
            return [(b"", data[6:-2].removesuffix(b"\r"))]
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        events: list[Event] = []
        for line in lines:
            self._line(line, events)
        return events

    def close(self) -> list[Event]:
        """The stream ended: an event whose closing blank line is missing counts all the same."""
        events: list[Event] = []
        if self._rest:
            self._line(self._rest, events)
            self._rest = b""
        self._line(b"", events)
        return events

    def _line(self, line: bytes, events: list[Event]) -> None:
        if line.endswith(b"\r"):
            line = line[:-1]
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif not line:
            if self._data:
                events.append((self._name, b"\n".join(self._data)))
                self._data = []
            self._name = b""
        elif line.startswith(b"event:"):
            self._name = line[6:].strip()
        # Anything else is a comment (keep-alive) or a field that no engine uses (id, retry).
