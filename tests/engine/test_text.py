"""Text and stops: what a stream shows is exactly the completion, however tokens were grouped."""

from __future__ import annotations

from fakes import EOS, ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.text import TextStream
from slipstream.models.tokenizer import StreamDecoder


def run(data: bytes, stop=(), eos_at=None, take_every=1):
    """Feed bytes as tokens; returns (pieces, what was taken before the end, the stream)."""
    stream = TextStream(StreamDecoder(ByteTokenizer()), stop, {EOS})
    pieces, groups = [], []
    tokens = [*data[:eos_at], EOS] if eos_at is not None else list(data)
    for i, token in enumerate(tokens):
        stream.push(token, False)
        if stream.stopped:
            break
        if i % take_every == 0 and i + 1 < len(tokens):
            pieces += (taken := stream.take())
            groups.append("".join(p.text for p in taken))
    stream.finish()
    pieces += stream.take()
    return pieces, groups, stream


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


@given(st.text(max_size=40), st.integers(1, 9))
def test_pieces_add_up_to_the_text_and_tokens(text, every):
    pieces, _, stream = run(text.encode(), take_every=every)
    assert text_of(pieces) == text
    assert bytes(piece.token_id for piece in pieces) == text.encode()
    assert not stream.stopped


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_stop_string_cuts_text_and_tokens_where_it_is_completed(text, stops, every):
    end = next((i for i in range(len(text) + 1) if any(stop in text[:i] for stop in stops)), None)
    pieces, groups, stream = run(text.encode(), stops, take_every=every)
    assert stream.stopped == (end is not None)
    if end is None:
        assert text_of(pieces) == text
    else:
        assert text_of(pieces) == text[: min(i for stop in stops if (i := text[:end].find(stop)) >= 0)]
        assert len(pieces) == end
    assert text_of(pieces).startswith("".join(groups))  # nothing was shown that had to be taken back


def test_possible_start_of_a_stop_is_held_back_and_released():
    _, groups, _ = run(b"xENx.", ["END"])
    assert groups == ["x", "", "", "ENx"]


def test_stop_string_inside_one_token_keeps_what_precedes_it():
    class Words(ByteTokenizer):
        def token_bytes(self, id):
            return [b"one two", b" three"][id]

    stream = TextStream(StreamDecoder(Words()), ["wo th"], ())
    stream.push(0, False)
    assert stream.take() == []
    stream.push(1, True)
    assert stream.stopped
    assert [(p.text, p.token_id, p.drafted) for p in stream.take()] == [("one t", 0, False), ("", 1, True)]


def test_end_of_text_adds_no_text_but_is_a_token():
    pieces, _, stream = run(b"hello", eos_at=5)
    assert stream.stopped
    assert (text_of(pieces), pieces[-1].token_id) == ("hello", EOS)


def test_unfinished_character_becomes_a_replacement_at_the_end():
    pieces, _, _ = run("né".encode()[:-1])
    assert text_of(pieces) == "n\ufffd"
    pieces, _, _ = run("né".encode()[:-1], eos_at=2)
    assert text_of(pieces) == "n\ufffd"
