"""Drafts of a model that guesses a block at once, cut where the next guess costs more than it is likely to bring; alone
or beside the suffix drafter, where each round goes to the one expected to win.

The model says of every guess how likely it is right if all before it are. A guess more is worth verifying where the
chance that the block survives up to it exceeds what its row takes, in the tokens that the same time brings elsewhere:

    S_i > rate * (cost(rows + 1) - cost(rows))          rate: tokens a time of one row, as lately achieved

which maximises tokens over time in the long run (Dinkelbach 1967), the draft's own time included. Where even that is
below plain decoding, the model is not asked any more, but for a try now and then.

It knows nothing about models: the engine hands it a function to ask.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence

from slipstream.drafters.base import Cost, Guess
from slipstream.drafters.suffix import SuffixDrafter

_MEMORY = 32  # rounds that the achieved rate is an average of
_FIRST_WAIT, _LONGEST_WAIT = 8, 128  # rounds between two tries where the model does not pay
_JUDGED_FROM = 200  # rounds from which on acceptance is compared with the recorded one
_FAR_BELOW = 0.6


class Record:
    """How well the model did lately, shared by the streams that ask it.

    recorded: acceptance length by task, as measured at training; a warning is given once where this falls far below.
    """

    def __init__(self, recorded: Mapping[str, float] | None = None) -> None:
        self._recorded = dict(recorded or {})
        self._tokens, self._time, self._rounds = 2.5, 1.5, 4  # a fair chance to begin with
        self._wait, self._skipped = _FIRST_WAIT, 0
        self._tried: list[int] = []  # by place in the block: guesses verified, all before them being right
        self._held: list[int] = []  # and how many of those were right

    @property
    def rate(self) -> float:
        """Tokens for the time of one row, in rounds that asked the model."""
        return self._tokens / self._time

    def worth_asking(self, rate: float) -> bool:
        """Whether the model is expected to beat `rate`, or is due for another try."""
        if self.rate > rate:
            return True
        self._skipped += 1
        return self._skipped >= self._wait

    def asked(self, promised: float) -> None:
        """The model was asked, and `promised` so many tokens for the time of one row."""
        if self._skipped >= self._wait:
            self._wait = _FIRST_WAIT if promised > 1 else min(2 * self._wait, _LONGEST_WAIT)
        self._skipped = 0

    def add(self, tokens: int, time: float, drafted: int, accepted: int) -> None:
        """A round of the model's guesses brought `tokens` in `time`, that of one row being 1."""
        self._rounds = min(self._rounds + 1, _MEMORY)
        self._tokens += (tokens - self._tokens) / self._rounds
        self._time += (time - self._time) / self._rounds
        for counts, n in ((self._tried, min(accepted + 1, drafted)), (self._held, accepted)):
            counts += [0] * (drafted - len(counts))
            for i in range(n):
                counts[i] += 1
        if self._recorded and self._tried and self._tried[0] == _JUDGED_FROM:
            self._judge()

    @property
    def acceptance(self) -> float:
        """Tokens a round if every guess were verified, from the rounds that verified each place."""
        length = survival = 1.0
        for tried, held in zip(self._tried, self._held, strict=True):
            survival *= held / tried if tried else 0.0
            length += survival
        return length

    def _judge(self) -> None:
        expected = min(self._recorded.values())
        if self.acceptance < _FAR_BELOW * expected:
            self._recorded.clear()
            warnings.warn(
                f"the block drafter brings {self.acceptance:.2f} tokens a round here, {expected:.2f} at its training; "
                "the text is unlike its training data, or it was trained for other weights; choose "
                "another, or use --drafter suffix",
                stacklevel=2,
            )


class Free:
    """The cost of a machine on which rows and drafts take no time: every guess is verified."""

    draft = 0.0
    one_row_due = False

    def __call__(self, rows: int) -> float:
        return 1.0

    def record_draft(self, seconds: float) -> None:
        """Nothing to learn."""


class BlockDrafter:
    """See the module. suffix: None uses the model's guesses alone."""

    def __init__(self, cost: Cost, record: Record | None = None, suffix: SuffixDrafter | None = None) -> None:
        self.name = "auto" if suffix else "block"
        self._cost, self._record, self._suffix = cost, record or Record(), suffix
        self._guess: Guess | None = None
        self._mine = False  # whether the round's drafts are the model's

    def attach(self, guess: Guess) -> None:
        self._guess = guess

    def begin(self, tokens: Sequence[int]) -> None:
        if self._suffix:
            self._suffix.begin(tokens)

    def propose(self, limit: int) -> Sequence[int]:
        self._mine = False
        copied, copied_rate = self._suffix.best(limit) if self._suffix else ((), 1.0)
        if self._guess is None or limit < 1:
            return copied
        if self._cost.one_row_due:
            return ()
        if not self._record.worth_asking(copied_rate):
            return copied
        started = time.perf_counter()
        tokens, confidence = self._guess(limit)
        self._cost.record_draft(time.perf_counter() - started)
        count, expected = self._worth(confidence)
        self._record.asked(expected / (self._cost.draft + self._cost(1 + count)))
        if copied_rate > expected / self._cost(1 + count):
            return copied
        self._mine = True
        return tokens[:count]

    def observe(self, committed: Sequence[int], drafted: int, accepted: int) -> None:
        if self._suffix:
            self._suffix.observe(committed, drafted, accepted)
        if self._mine:
            self._record.add(len(committed), self._cost.draft + self._cost(1 + drafted), drafted, accepted)

    def _worth(self, confidence: Sequence[float]) -> tuple[int, float]:
        """How many guesses to verify, and the tokens that such a round is expected to bring."""
        rate = max(1.0, self._record.rate)
        best, most, gain, expected, survival = 0, 0.0, 0.0, 1.0, 1.0
        tokens = 1.0
        for count, chance in enumerate(confidence, 1):
            survival *= chance
            expected += survival
            gain = expected - 1 - rate * (self._cost(1 + count) - 1)
            if gain > most:
                best, most, tokens = count, gain, expected
        return best, tokens
