"""What a caller asks for and what comes back, as small typed values that check themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.errors import RequestError

FinishReason = Literal["stop", "length"]

_LARGEST = 1e30
"""A temperature, penalty or bias up to here keeps every logit finite in float32."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a generation ends.

    temperature: 0 is greedy. top_k: 0 is off. top_p and min_p: shares in (0, 1] and [0, 1).
    repetition_penalty divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL,
    arXiv:1909.05858); presence and frequency penalties are subtracted for tokens of the output (OpenAI API).
    seed: None draws one, and the result names it. logprobs: how many alternatives to report; None is none.
    logit_bias: token id to a number added to its logit; -inf bans it.
    stop: strings that end the text, not included in it. ignore_eos decodes through end-of-text tokens.
    Raises RequestError where a value is out of range.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))

        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise RequestError(f"{name} must be {what}, got {getattr(self, name)!r}")

        need(self.max_tokens >= 1, "max_tokens", "at least 1")
        hot = 1e-9 <= self.temperature <= _LARGEST  # below, logits / temperature may overflow
        need(self.temperature == 0 or hot, "temperature", "0 (greedy) or a positive number")
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(0 <= self.top_k < 2**31, "top_k", "0 (off) or a positive count")
        need(0 <= self.min_p < 1, "min_p", "in [0, 1)")
        need(1 / _LARGEST <= self.repetition_penalty <= _LARGEST, "repetition_penalty", "positive")
        need(abs(self.presence_penalty) <= _LARGEST, "presence_penalty", "a finite number")
        need(abs(self.frequency_penalty) <= _LARGEST, "frequency_penalty", "a finite number")
        need(self.seed is None or 0 <= self.seed < 2**64, "seed", "in [0, 2**64)")
        need(all(self.stop), "stop", "non-empty strings")
        need(all(b <= _LARGEST for b in self.logit_bias.values()), "logit_bias", "finite numbers, or -inf to ban")
        need(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "in [0, 20]")


@dataclass
class SpeculationStats:
    """Counts over one generation. A round verifies `drafted` tokens and commits one more than it accepts."""

    drafter: str = "none"
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_round(self) -> float:
        """Acceptance length: committed tokens a round, before any cut at a stop."""
        return (self.rounds + self.accepted) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probabilities under the raw logits: of the chosen token, and of the most likely `top` ids."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """One token of the output and the text it adds: empty while a UTF-8 character is unfinished, and at a stop."""

    text: str
    token_id: int
    drafted: bool
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds of wall time.

    load_s: opening the model, once. ttft_s: from the call to the first token chosen, prefill_s of it in prefill.
    decode_s: from the first round's end to the last's. tokens_per_s: the tokens after the first round over decode_s,
    0 where one round was all.
    """

    load_s: float = 0.0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens_per_s: float = 0.0


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    text ends right before a stop string and never holds a stop token's text. token_ids ends with the token that ended
    the generation: the end-of-text or stop token, or the token that completed a stop string; they are counted in
    completion_tokens, as OpenAI's API does. cached_tokens of the prompt_tokens were reused, not prefilled.
    finish_reason: `stop`, or `length` for max_tokens or the end of the context. A cancelled stream has no completion.
    seed reproduces a draw.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    seed: int
    timing: Timing
    speculation: SpeculationStats
    logprobs: list[TokenLogprob] | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Chunk:
    """What one round adds to a stream; the last chunk carries the whole `completion`.

    Text that may be the start of a stop string is held back, with its tokens, until that is settled, so a chunk may
    be empty. The chunks' pieces together are exactly the completion's tokens and text.
    drafted, accepted: what the round verified, and how many drafts were right.
    """

    pieces: list[Piece]
    drafted: int = 0
    accepted: int = 0
    completion: Completion | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> list[int]:
        return [piece.token_id for piece in self.pieces]
