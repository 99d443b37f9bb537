"""From token ids to text, one token at a time, up to a stop: the piece of text each token adds.

Text that may be the start of a stop string is held back until it is settled. Whether and where a text stops depends on
its tokens alone, never on how they were grouped into rounds.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from slipstream.engine.request import Piece, TokenLogprob
from slipstream.models.tokenizer import StreamDecoder


class TextStream:
    """Pieces of one generation: `push` tokens until `stopped`, `take` what is settled, `finish` before the last take.

    stop: strings that end the text right before them. stop_token_ids: tokens that end it and add no text.
    Where one token completes several stop strings, the one that starts first counts.
    """

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str], stop_token_ids: Container[int]) -> None:
        self.stopped = False
        self._decoder, self._stop, self._stop_token_ids = decoder, stop, stop_token_ids
        self._held: list[Piece] = []

    def push(self, token: int, drafted: bool, logprob: TokenLogprob | None = None) -> None:
        """One more token; nothing may follow once `stopped`."""
        if token in self._stop_token_ids:
            self.stopped = True
            self._held.append(Piece("", token, drafted, logprob))
            self._flush()
        else:
            self._held.append(Piece(self._decoder.push((token,)), token, drafted, logprob))
            if self._stop:
                self._cut()

    def finish(self) -> None:
        """No more tokens come: bytes of an unfinished character become U+FFFD, and held text is settled."""
        if not self.stopped:
            self._flush()
            self._stop = ()

    def take(self) -> list[Piece]:
        """The pieces settled since the last call, in order."""
        count = len(self._held) if self.stopped or not self._stop else self._settled()
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _flush(self) -> None:
        rest = self._decoder.flush()
        if rest and self._held:
            self._held[-1] = replace(self._held[-1], text=self._held[-1].text + rest)
            self._cut()

    def _cut(self) -> None:
        """End the text at the first stop string in what is held."""
        text = "".join(piece.text for piece in self._held)
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if not found:
            return
        self.stopped, left = True, min(found)
        for i, piece in enumerate(self._held):
            self._held[i] = replace(piece, text=piece.text[:left])
            left -= len(self._held[i].text)

    def _settled(self) -> int:
        """How many held pieces lie wholly before the first place where a stop string may have begun."""
        text = "".join(piece.text for piece in self._held)
        first = min((_partial(text, stop) for stop in self._stop), default=len(text))
        if first == len(text):
            return len(self._held)
        for count, piece in enumerate(self._held):
            first -= len(piece.text)
            if first < 0:
                return count
        return len(self._held)


def _partial(text: str, stop: str) -> int:
    """Where the longest end of `text` that begins `stop` starts; len(text) where there is none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
