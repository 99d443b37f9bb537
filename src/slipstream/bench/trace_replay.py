"""Replays a trace against a real endpoint: conversations of the same lengths, answers of the same lengths, timed.

    Turn -> a question that goes on where the last answer ended -> Endpoint -> `figures` -> Replayed

Prompts are filled with real text. Where a turn's prompt is longer than the conversation so far, the conversation goes
on, so that the server may reuse its prefix as the agent's did; where it is not, or nothing of it was cached, a new one
begins. Text is no exact measure of tokens: the server's own counts say what it got. Tools are not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from slipstream.bench.endpoint import Endpoint, Question
from slipstream.bench.endpoint_figures import figures
from slipstream.bench.endpoint_questions import pool
from slipstream.bench.stream_clock import EndpointError
from slipstream.bench.trace import Clock, Turn

TEMPLATE_TOKENS = 8
"""What a chat template puts around a message, about."""


@dataclass(frozen=True)
class Replayed:
    """A turn as the trace has it, as the endpoint counted it, and how long it took."""

    turn: Turn
    done: Turn
    ttft_s: float
    decode_s: float


def replay_on(
    endpoint: Endpoint,
    turns: Sequence[Turn],
    *,
    seed: int = 0,
    progress: Callable[[Replayed], None] = lambda done: None,
) -> list[Replayed]:
    """Ask `turns` in their order. Raises EndpointError where an answer fails or its counts cannot be believed."""
    words, chars_a_token = _words(seed), 4.5
    messages: list[dict[str, str]] = []
    held = sent_chars = 0
    made: list[Replayed] = []
    for number, turn in enumerate(turns, 1):
        if turn.cached_tokens == 0 or turn.prompt_tokens <= held:
            messages, held, sent_chars = [], 0, 0
        text = _text(words, (turn.prompt_tokens - held - TEMPLATE_TOKENS) * chars_a_token)
        messages.append({"role": "user", "content": f"Note {seed + 1}.{number}. {text}" if not messages else text})
        sent_chars += len(messages[-1]["content"])
        question = Question(f"turn-{number}", tuple(messages), max(1, turn.output_tokens), "forced", seed + number)
        answer = endpoint.ask(question)
        found = figures(answer, question, endpoint.tokenizer, endpoint.count_locally)
        usage = answer.usage
        if found.problem or usage is None or found.ttft_s is None or found.last_s is None:
            raise EndpointError(f"turn {number} cannot be timed: {found.problem or 'the server sent no usage'}")
        prompt = usage.prompt_tokens or 0
        done = replace(
            turn, prompt_tokens=prompt, cached_tokens=usage.cached_tokens or 0, output_tokens=found.tokens or 0
        )
        made.append(Replayed(turn, done, found.ttft_s, found.last_s - found.ttft_s))
        progress(made[-1])
        reply = "".join(chunk.content or chunk.reasoning for chunk in answer.chunks)
        messages.append({"role": "assistant", "content": reply})
        sent_chars += len(reply)
        held = prompt + done.output_tokens
        chars_a_token = min(max(sent_chars / max(held, 1), 1.0), 10.0)
    return made


def clock(done: Sequence[Replayed]) -> Clock:
    """Where the time went: `prefill_s` is all waiting for first tokens, tools are the trace's."""
    return Clock(
        decode_s=sum(x.decode_s for x in done),
        prefill_s=sum(x.ttft_s for x in done),
        call_s=0.0,
        tool_s=sum(x.turn.tool_s for x in done),
    )


def to_json(done: Sequence[Replayed]) -> dict[str, Any]:
    """Totals in the words of `bench agent --json`, and every turn."""
    total = clock(done)
    return {
        "ttft_s": total.prefill_s,
        "decode_s": total.decode_s,
        "tool_s": total.tool_s,
        "total_s": total.total_s,
        "turns": [vars(x.done) | {"ttft_s": x.ttft_s, "decode_s": x.decode_s} for x in done],
    }


def _words(seed: int) -> Iterator[str]:
    sentences = [str(prompt.messages[0]["content"]) for prompt in pool("mixed", seed)]
    return cycle(" ".join(sentences).split())


def _text(words: Iterator[str], chars: float) -> str:
    made = [next(words)]
    length = len(made[0])
    while length < chars:
        made.append(next(words))
        length += 1 + len(made[-1])
    return " ".join(made)
