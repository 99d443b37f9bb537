"""What the commands say in words: the speed line, and model text made safe for a terminal."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream import Completion

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Model text without control characters, so that an answer cannot steer the terminal."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def speed_line(completion: Completion) -> str:
    """One line: how many tokens, how fast, and what the drafter added."""
    timing, speculation = completion.timing, completion.speculation
    parts = [
        f"{completion.completion_tokens} tokens, {timing.tokens_per_s:.0f} tok/s",
        f"first token {timing.ttft_s * 1e3:.0f} ms",
    ]
    if completion.cached_tokens:
        parts.append(f"{completion.cached_tokens} of {completion.prompt_tokens} prompt tokens reused")
    if speculation.accepted:
        parts.append(f"{speculation.drafter} drafter {speculation.tokens_per_round:.1f} tokens a round")
    if completion.finish_reason == "length":
        parts.append("cut at the token limit")
    return " · ".join(parts)


def read_stdin() -> str:
    """All of standard input as text. Raises RequestError where it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text (byte {error.start}); convert it first") from None
