"""The in-process engine as an endpoint: the same questions, the same chunks, no server in between.

A chunk is stamped when the engine hands it over, as a socket's read would be, before its text is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from slipstream.bench.endpoint import Answer, Counters, Question, Speculation, TokenChunk, Tokenizer, Usage
from slipstream.bench.model_costs import known_parameters
from slipstream.bench.stream_clock import EndpointError, now_ns

if TYPE_CHECKING:
    from slipstream import LLM

SCHEME = "engine:"
OPTIONS = {"backend": str, "drafter": str, "drafts": int, "context": int, "threads": int, "weights": str}


@dataclass
class EngineEndpoint:
    """An `LLM` that answers `Question`s one at a time."""

    llm: LLM
    name: str
    tier: str | None = None
    tokenizer: Tokenizer | None = None
    count_locally: bool = False
    parameters: int | None = None

    def __post_init__(self) -> None:
        self.server = f"engine {id(self.llm)}"

    def ask(self, question: Question) -> Answer:
        from slipstream import SamplingParams

        params = SamplingParams(
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            seed=question.seed,
            ignore_eos=question.stops == "forced",
        )
        sent_ns, stamped = now_ns(), []
        with self.llm.session() as session:  # its own, so that no answer reuses the prefix of the one before
            for chunk in session.stream_chat(list(question.messages), params):
                stamped.append((now_ns(), chunk))
        done = stamped[-1][1].completion
        if done is None:
            raise EndpointError(f"{self.name} ended without its completion")
        chunks, silent = [], 0  # tokens without text, such as half a character, belong to the chunk that shows it
        for at_ns, chunk in stamped:
            silent += len(chunk.pieces)
            if chunk.text:
                chunks.append(TokenChunk((at_ns - sent_ns) / 1e9, chunk.text, tokens=silent))
                silent = 0
        spoken = done.speculation
        return Answer(
            chunks=chunks,
            usage=Usage(
                prompt_tokens=done.prompt_tokens,
                completion_tokens=done.completion_tokens,
                total_tokens=done.prompt_tokens + done.completion_tokens,
                cached_tokens=done.cached_tokens,
            ),
            finish_reason=done.finish_reason,
            speculation=Speculation(spoken.rounds, spoken.drafted, spoken.accepted),
            reads=len(stamped),
        )

    def counters(self) -> Counters:
        return Counters()


def open_engine(address: str) -> EngineEndpoint:
    """`engine:MODEL`, with options of `LLM` after a question mark: `engine:smollm2?drafter=none&threads=2`.

    Raises EndpointError for an unknown option, SlipstreamError where the model cannot be loaded.
    """
    from slipstream import LLM

    model, _, query = address.removeprefix(SCHEME).partition("?")
    try:
        options = {name: OPTIONS[name](value) for name, value in parse_qsl(query, strict_parsing=bool(query))}
    except (KeyError, ValueError) as error:
        raise EndpointError(
            f"{address!r}: cannot use {error}; an engine takes {', '.join(OPTIONS)}, as in engine:smollm2?drafter=none"
        ) from None
    llm = LLM(model, **options)
    return EngineEndpoint(llm, name=address, tokenizer=llm.tokenizer, parameters=known_parameters(model))
