"""Records an agent as a trace: wraps `create` of any OpenAI-style client, notes usage and the time between calls.

    client.chat.completions.create = Recorder(client.chat.completions.create, Path("agent.jsonl"))

Asynchronous clients too. Answers pass through untouched; each turn is appended to the file when the next call starts,
or at `close`, since only then is its tool time known. Token counts are the server's own: a streamed call needs
`stream_options.include_usage`.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.bench.trace import TraceError, Turn


class Recorder:
    """A `create` that records. Calls must not overlap: a trace is a chain.

    Raises TraceError where an answer carries no usage, since a trace of guesses is worth nothing.
    """

    def __init__(self, create: Callable[..., Any], path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.create, self.path, self.clock = create, path, clock
        self._turn: Turn | None = None
        self._ended_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._write(self.clock() - self._ended_s)
        answer, stream = self.create(*args, **kwargs), bool(kwargs.get("stream"))
        if inspect.isawaitable(answer):  # an asynchronous client
            return self._awaited(answer, stream)
        if stream:
            return _Stream(answer, self._note)
        self._note(answer.usage)
        return answer

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Write the last turn; no tool follows it."""
        self._write(0.0)

    async def _awaited(self, answer: Awaitable[Any], stream: bool) -> Any:
        done = await answer
        if stream:
            return _Stream(done, self._note)
        self._note(done.usage)
        return done

    def _note(self, usage: Any) -> None:
        if usage is None:
            raise TraceError('the answer carries no usage; ask for it with stream_options={"include_usage": True}')
        details = getattr(usage, "prompt_tokens_details", None)
        cached = getattr(details, "cached_tokens", None) or 0
        self._turn = Turn(usage.prompt_tokens, cached, usage.completion_tokens)
        self._ended_s = self.clock()

    def _write(self, tool_s: float) -> None:
        if self._turn is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self._turn) | {"tool_s": round(tool_s, 6)}) + "\n")
        self._turn = None


class _Stream:
    """A client's stream, iterated or in a `with` statement, of either kind; `note` gets its usage when it has ended."""

    def __init__(self, stream: Any, note: Callable[[Any], None]) -> None:
        self._stream, self._note = stream, note
        self._usage: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        for chunk in self._stream:
            yield self._seen(chunk)
        self._note(self._usage)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for chunk in self._stream:
            yield self._seen(chunk)
        self._note(self._usage)

    def _seen(self, chunk: Any) -> Any:
        self._usage = getattr(chunk, "usage", None) or self._usage
        return chunk

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    async def __aenter__(self) -> _Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stream.close()
