"""Server-sent events as bytes arrive (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from typing import NamedTuple

LONGEST = 16 << 20
"""Bytes of one event; a target that sends more is broken."""


class Sse(NamedTuple):
    """One event. raw: its bytes with the blank line, to pass on unchanged."""

    name: str
    data: str
    raw: bytes


class SseReader:
    """Cuts a stream of bytes into events. Comments are kept in `raw`; an event without data is skipped."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, block: bytes) -> list[Sse]:
        """The events that `block` completes. Raises ValueError for one that is too long or no UTF-8."""
        held = self._held + block
        if b"\r" in held:
            end = held[-1:] == b"\r"  # it may be half of a line's end
            held = (held[:-1] if end else held).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if end else b"")
        *blocks, self._held = held.split(b"\n\n")
        if len(self._held) > LONGEST:
            raise ValueError(f"an event has more than {LONGEST} bytes")
        return [event for one in blocks if (event := _event(one)) is not None]

    @property
    def unfinished(self) -> bool:
        """Whether the stream ended within an event."""
        return bool(self._held.strip())


def _event(block: bytes) -> Sse | None:
    name, data = "", []
    for line in block.decode().split("\n"):
        key, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if key == "event":
            name = value
        elif key == "data":
            data.append(value)
    return Sse(name, "\n".join(data), block + b"\n\n") if data else None
