"""What the stamps of one answer say about speed, and when they say nothing.

    TTFT   from the request to the first chunk that carries a token (content, reasoning or tool call)
    TTFO   from the request to the first token that is not reasoning
    TPOT   (t_last - t_first) / (N - n_first): seconds a token, after the first chunk and the n_first tokens in it
    decode      1 / TPOT
    end to end  N / t_last: waiting for the first token included

N is the server's usage. Where a tokenizer is at hand it is compared with the tokens of the whole text. Where usage is
missing or contradicts anything else, `problem` says so and there is no rate. Under speculation a chunk carries several
tokens, so gaps between chunks and gaps between tokens are two lists.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from slipstream.bench.endpoint import Answer, Question, TokenChunk, Tokenizer, Usage

CountedBy = Literal["server", "tokenizer", "one a chunk", "estimate"]


@dataclass(frozen=True)
class Figures:
    """One answer's figures; times in seconds, rates in tok/s, None where they cannot be known.

    tokens: N. local_tokens: of the whole text, by the tokenizer. counted_here: N is no usage but the tokenizer's.
    counts: tokens of each chunk, known as counted_by says. n_first: tokens that came with the first stamp; without
    counts, an estimate by length of text. peak_tokens_per_s: the best second, never the mean. problem: why the server's
    counts, and so any rate, cannot be believed. An answer that came at once has no TPOT.
    """

    ttft_s: float | None
    ttfo_s: float | None
    last_s: float | None
    chunk_gaps_s: tuple[float, ...]
    token_gaps_s: tuple[float, ...] | None = None
    tokens: int | None = None
    local_tokens: int | None = None
    counted_here: bool = False
    counts: tuple[int, ...] | None = None
    n_first: int | None = None
    counted_by: CountedBy | None = None
    tpot_s: float | None = None
    decode_tokens_per_s: float | None = None
    end_to_end_tokens_per_s: float | None = None
    peak_tokens_per_s: float | None = None
    problem: str | None = None


def figures(
    answer: Answer, question: Question, tokenizer: Tokenizer | None = None, count_locally: bool = False
) -> Figures:
    """The figures of `answer` to `question`.

    count_locally: where the server sends no usage, let the tokenizer count N (or max_tokens, where the answer was cut
    there). It is an exception to the rule, for the caller to ask for and to show.
    """
    chunks = answer.chunks
    times = [chunk.at_s for chunk in chunks]
    output = next((chunk.at_s for chunk in chunks if chunk.content or chunk.tool), None)
    gaps = tuple(after - before for before, after in pairwise(times))
    local = local_counts(chunks, tokenizer) if tokenizer and not any(chunk.tool for chunk in chunks) else None
    usage = answer.usage or Usage()
    counted_here = usage.completion_tokens is None and count_locally and local is not None
    if counted_here and local is not None:
        usage = replace(
            usage, completion_tokens=question.max_tokens if answer.finish_reason == "length" else sum(local)
        )
        answer = replace(answer, usage=usage)
    tokens = usage.completion_tokens
    base = Figures(
        ttft_s=times[0] if times else None,
        ttfo_s=output,
        last_s=times[-1] if times else None,
        chunk_gaps_s=gaps,
        tokens=tokens,
        local_tokens=sum(local) if local is not None else None,
        counted_here=counted_here,
    )
    problem = contradiction(answer, question, base.local_tokens)
    if problem or tokens is None:
        return replace(base, problem=problem)

    counts, counted_by = count_tokens(chunks, tokens, local)
    n_first = first_tokens(chunks, counts, tokens)
    stamps = [at_s for at_s, count in zip(times, counts, strict=True) for _ in range(count)] if counts else None
    base = replace(
        base,
        counts=tuple(counts) if counts else None,
        n_first=n_first,
        counted_by=counted_by,
        token_gaps_s=tuple(after - before for before, after in pairwise(stamps)) if stamps else None,
        peak_tokens_per_s=best_second(stamps) if stamps else None,
        end_to_end_tokens_per_s=tokens / times[-1],
    )
    if tokens <= n_first or times[-1] == times[0]:
        return base  # all came at once: there is no time between tokens
    tpot_s = (times[-1] - times[0]) / (tokens - n_first)
    return replace(base, tpot_s=tpot_s, decode_tokens_per_s=1 / tpot_s)


def contradiction(answer: Answer, question: Question, local_tokens: int | None) -> str | None:
    """Why the server's counts cannot be believed; None where nothing speaks against them."""
    usage, chunks = answer.usage, answer.chunks
    if not chunks:
        return "the answer carries no token"
    if usage is None or usage.completion_tokens is None:
        return "the server sent no usage"
    tokens, prompt = usage.completion_tokens, usage.prompt_tokens
    reads = len({chunk.at_s for chunk in chunks if chunk.tokens != 0})  # 0: the rest of a token sent before
    reasoned = any(chunk.reasoning for chunk in chunks)
    hidden = 1 + 4 * reasoned  # a stop token, and the tags around reasoning, are counted but not shown
    checks = (
        (answer.finish_reason is None, "the stream ended without a finish reason"),
        (tokens < reads, f"usage counts {tokens} tokens, fewer than the {reads} reads that carried one"),
        (tokens > question.max_tokens, f"usage counts {tokens} tokens where {question.max_tokens} were allowed"),
        (
            answer.finish_reason == "length" and tokens < question.max_tokens,
            f"usage counts {tokens} tokens of an answer cut at {question.max_tokens}",
        ),
        (
            question.stops == "forced" and tokens != question.max_tokens,
            f"{question.max_tokens} tokens were to be forced, usage counts {tokens}; the server ignores `ignore_eos`",
        ),
        (
            (usage.reasoning_tokens or 0) > tokens,
            f"usage counts {usage.reasoning_tokens} reasoning tokens among {tokens}",
        ),
        (
            prompt is not None and (usage.cached_tokens or 0) > prompt,
            f"usage counts {usage.cached_tokens} cached tokens in a prompt of {prompt}",
        ),
        (
            prompt is not None and usage.total_tokens not in (None, prompt + tokens),
            f"usage counts {prompt} + {tokens} tokens as {usage.total_tokens}",
        ),
        (
            local_tokens is not None and abs(tokens - local_tokens) > hidden + 0.05 * tokens,
            f"usage counts {tokens} tokens, the tokenizer {local_tokens}",
        ),
        (any((chunk.tokens or 0) < 0 for chunk in chunks), "the running usage runs backwards"),
    )
    return next((reason for wrong, reason in checks if wrong), None)


def count_tokens(
    chunks: Sequence[TokenChunk], tokens: int, local: Sequence[int] | None
) -> tuple[Sequence[int] | None, CountedBy]:
    """Tokens of each chunk, and how they are known. Up to one of `tokens`, the stop token, may be in no chunk."""
    own = [chunk.tokens for chunk in chunks if chunk.tokens is not None]
    if len(own) == len(chunks) and first_tokens(chunks, own, tokens) > 0 and sum(own) in (tokens, tokens - 1):
        return own, "server"
    if local is not None and first_tokens(chunks, local, tokens) > 0:
        return local, "tokenizer"
    if len(chunks) in (tokens, tokens - 1):
        return [1] * len(chunks), "one a chunk"
    return None, "estimate"


def first_tokens(chunks: Sequence[TokenChunk], counts: Sequence[int] | None, tokens: int) -> int:
    """Tokens of the first chunk and of those that came in the same read, since no time lies between them.

    Without counts, an estimate: as if all tokens were equally long.
    """
    first = sum(chunk.at_s == chunks[0].at_s for chunk in chunks)
    if counts:
        return sum(counts[:first])
    lengths = [len(chunk.content + chunk.reasoning + chunk.tool) for chunk in chunks]
    return max(1, round(tokens * sum(lengths[:first]) / sum(lengths)))


def local_counts(chunks: Sequence[TokenChunk], tokenizer: Tokenizer) -> list[int]:
    """Tokens that each chunk completes, of the whole content and the whole reasoning: never tokenised by chunk."""
    counts = [0] * len(chunks)
    for texts in ([chunk.content for chunk in chunks], [chunk.reasoning for chunk in chunks]):
        chunk_ends = list(accumulate(len(text.encode()) for text in texts))
        at = 0
        for token in tokenizer.encode("".join(texts)):
            at += len(tokenizer.token_bytes(token))
            counts[min(bisect_left(chunk_ends, at), len(chunks) - 1)] += 1
    return counts


def best_second(stamps: Sequence[float]) -> float | None:
    """Most tokens that any one second held, in tok/s; None for an answer shorter than a second."""
    if stamps[-1] - stamps[0] < 1:
        return None
    return float(max(bisect_left(stamps, start + 1) - i for i, start in enumerate(stamps)))
