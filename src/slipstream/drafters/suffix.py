"""Drafts from text already seen: find where the newest tokens stood before, guess what followed there.

    text    ... the cat sat on the mat . then the cat sat on
                |---- matched -----|> the mat . then ...         |---- newest ----|> the mat . then: the guess

Prompt lookup (Saxena 2023) and suffix decoding (Oliaro et al. 2024, arXiv:2411.04975) with one hash table a match
length: the n-gram that ends at each position leads to the position after it, the most recent one winning. The longest
of a ladder of lengths is looked up first, in this conversation, then in a bounded memory of earlier texts. While
guesses come true the match only grows, so nothing is looked up at all.

How many tokens to draft is a bet: the chance that a guess holds is learned by match length, from rounds that drafted
and, unspent, from rounds that did not; the cost of a longer round is told by the engine. The drafter proposes what
maximises expected tokens over expected time, which is nothing where that does not pay.

It knows nothing about text, models or sampling.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

LADDER = (8, 3, 1)
"""Match lengths that have a table, longest first."""

_LONGEST = 32  # matches are measured up to here; longer ones are equally trusted
_BULK = 64  # from here on numpy is faster than a loop
_REVISION = 32  # dropping at most this many tokens is a correction of the text, more is another text


_BUCKET = tuple(length.bit_length() for length in range(1 + _LONGEST))


def _free(rows: int) -> float:
    return 1.0


class TextIndex:
    """A growing text and where each n-gram of the ladder last ended in it.

    The n-gram at the very end is entered once a token follows it, so that the end never matches itself. A table is a
    power of two of slots, at least four for each token; a slot forgets the older of two n-grams that fall into it.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._mask = 0  # slots - 1
        self._tables: list[array[int]] = []

    def extend(self, new: Sequence[int]) -> None:
        start, end = len(self.tokens), len(self.tokens) + len(new)
        self.tokens.extend(new)
        if 4 * end >= self._mask:
            self._mask = max((1 << (8 * end).bit_length()) - 1, 4095)
            self._tables = [array("i", bytes(4 + 4 * self._mask)) for _ in LADDER]
            start = 0
        tokens, mask = self.tokens, self._mask
        for n, table in zip(LADDER, self._tables, strict=True):
            first = max(start, n)  # the n-grams that end right before positions first..end-1
            if end - first < _BULK:
                for at in range(first, end):
                    table[hash(tuple(tokens[at - n : at])) & mask] = at
            else:
                grams = zip(*(tokens[first - n + i : end - n + i] for i in range(n)), strict=True)
                slots = np.fromiter(map(hash, grams), np.int64, end - first) & mask
                np.frombuffer(table, np.int32)[slots] = np.arange(first, end)  # the last of equal slots stays

    def truncate(self, length: int) -> None:
        """Forget tokens from `length` on. Table entries may go stale; `find` checks them."""
        del self.tokens[length:]

    def find(self, rung: int, gram: list[int], key: int) -> int:
        """The position after the last known n-gram `gram`, LADDER[rung] tokens whose hash is `key`; 0 if none."""
        if self._tables and (at := self._tables[rung][key & self._mask]):
            n = len(gram)
            if n <= at < len(self.tokens) and self.tokens[at - n : at] == gram:
                return at
        return 0


class Memory:
    """The texts of earlier conversations, and how well guesses did, shared by the drafters of one model."""

    def __init__(self, texts: int = 8, tokens: int = 1 << 17) -> None:
        self.texts: deque[TextIndex] = deque(maxlen=texts)
        self.odds = Odds()
        self._tokens = tokens

    def add(self, text: TextIndex) -> None:
        """Keep a text that will not grow any more; the oldest ones make room."""
        self.texts.appendleft(text)
        while sum(len(kept.tokens) for kept in tuple(self.texts)) > self._tokens:
            self.texts.pop()


class Odds:
    """The chance that a guess holds, by the length of the match it follows: moving averages of what happened.

    Lengths share a bucket between powers of two, the last one from 32 tokens on.
    """

    def __init__(self) -> None:
        self.chance = [0.0, 0.1, 0.3, 0.5, 0.65, 0.8, 0.9]  # rough figures for chat, worth four guesses
        self._seen = [4] * len(self.chance)

    def update(self, match: int, held: int, missed: bool) -> None:
        """After a match of `match` tokens, `held` guesses in a row came true; the next one was `missed`, or unknown."""
        for length in range(match, match + held + missed):
            bucket = _BUCKET[length] if length < _LONGEST else _BUCKET[_LONGEST]
            if self._seen[bucket] < 40:
                self._seen[bucket] += 1
            self.chance[bucket] += ((length < match + held) - self.chance[bucket]) / self._seen[bucket]


class SuffixDrafter:
    """See the module. cost: time of a round of n rows over that of one row; further rows are free where it is None.

    memory: earlier texts to draw on.
    """

    name = "suffix"

    def __init__(self, cost: Callable[[int], float] | None = None, memory: Memory | None = None) -> None:
        self._cost = cost or _free
        self._memory = memory or Memory()
        self._odds = self._memory.odds
        self._text = TextIndex()
        self._source: TextIndex | None = None  # where the current match lies, if there is one
        self._at = 0  # the position after the match in the source
        self._match = 0  # its length
        self._guess: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        known, new = self._text.tokens, list(tokens)
        if new[: len(known)] != known:
            both = zip(known, new, strict=False)
            shared = next((i for i, (a, b) in enumerate(both) if a != b), min(len(known), len(new)))
            if len(known) - shared <= _REVISION:
                self._text.truncate(shared)
            else:
                self._memory.add(self._text)
                self._text = TextIndex()
        self._text.extend(new[len(self._text.tokens) :])
        self._source = None
        self._guess = []

    def propose(self, limit: int) -> Sequence[int]:
        return self.best(limit)[0]

    def best(self, limit: int) -> tuple[Sequence[int], float]:
        """What to draft, and the tokens it is expected to bring for the time of one row: 1 where there is nothing."""
        if self._source is None and not self._look_up():
            self._guess = []
            return (), 1.0
        self._guess = self._continuation(limit + 1)  # one more than may be drafted, to check the round's last token
        count, rate = self._worth(min(limit, len(self._guess)))
        return self._guess[:count], rate

    def observe(self, committed: Sequence[int], drafted: int, accepted: int) -> None:
        self._text.extend(committed)
        if self._source is None:
            return
        held, count = 0, len(committed)
        for guess, token in zip(self._guess, committed, strict=False):
            if guess != token:
                break
            held += 1
        self._odds.update(self._match, held, missed=held < min(count, len(self._guess)))
        if held == count and self._at + count < len(self._source.tokens):
            self._at += count
            self._match += count
        else:
            self._source = None  # a wrong guess, or an earlier text ended here

    def _look_up(self) -> bool:
        """Find the match to guess from: the longest rung of the ladder, the newest text first."""
        tokens = self._text.tokens
        sources = (self._text, *self._memory.texts)
        for rung, n in enumerate(LADDER):
            gram = tokens[-n:]
            key = hash(tuple(gram))
            for source in sources:
                if at := source.find(rung, gram, key):
                    self._source, self._at, self._match = source, at, self._measure(source.tokens, at, n)
                    return True
        return False

    def _measure(self, source: list[int], at: int, known: int) -> int:
        """How many tokens before `at` equal the newest ones, `known` of them already compared."""
        tokens = self._text.tokens
        most = min(_LONGEST, at, len(tokens))
        while known < most and source[at - known - 1] == tokens[-known - 1]:
            known += 1
        return known

    def _continuation(self, limit: int) -> list[int]:
        """Up to `limit` tokens that followed the match; at the end of this very text it goes round in a loop."""
        assert self._source is not None
        guess = self._source.tokens[self._at : self._at + limit]
        while self._source is self._text and len(guess) < limit:
            guess += guess[: limit - len(guess)]
        return guess

    def _worth(self, limit: int) -> tuple[int, float]:
        """How many drafts give the most expected tokens for their time, and how many; 0 and 1 where none pays."""
        best, best_rate, expected, chance, match = 0, 1.0, 1.0, 1.0, self._match
        for drafts in range(1, limit + 1):
            chance *= self._odds.chance[_BUCKET[match] if match < _LONGEST else _BUCKET[_LONGEST]]
            match += 1
            expected += chance
            rate = expected / self._cost(1 + drafts)
            if rate > best_rate:
                best, best_rate = drafts, rate
        return best, best_rate
