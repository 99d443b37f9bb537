"""What a caller asks for and what comes back, as small typed values that check themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a generation ends.

    temperature: 0 is greedy. top_k: 0 is off. top_p and min_p: shares in (0, 1] and [0, 1).
    repetition_penalty divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL,
    arXiv:1909.05858); presence and frequency penalties are subtracted for tokens of the output (OpenAI API).
    seed: None draws one, and the result names it. logprobs: how many alternatives to report; None is none.
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
        need(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "0 (greedy) or a positive number")
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(self.top_k >= 0, "top_k", "0 (off) or a positive count")
        need(0 <= self.min_p < 1, "min_p", "in [0, 1)")
        need(math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", "positive")
        need(math.isfinite(self.presence_penalty), "presence_penalty", "a finite number")
        need(math.isfinite(self.frequency_penalty), "frequency_penalty", "a finite number")
        need(self.seed is None or 0 <= self.seed < 2**64, "seed", "in [0, 2**64)")
        need(all(self.stop), "stop", "non-empty strings")
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
