"""`slipstream chat`: turns, commands, Ctrl-C, and text drawn as it grows."""

import io
import os
import signal

import pytest
from fakes import fake_llm
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from slipstream import SamplingParams
from slipstream.cli.chat import Chat, _Paragraph


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=60, force_terminal=True, highlight=False, legacy_windows=False)


def talk(console, monkeypatch, *lines, show_drafts=False, max_tokens=24):
    """A chat that reads `lines`, then the end of input; returns it with what it drew."""
    said = iter(lines)

    def read(prompt: str) -> str:
        line = next(said, EOFError)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    chat = Chat(console, fake_llm(), SamplingParams(max_tokens=max_tokens), system=None, show_drafts=show_drafts)
    chat.loop()
    return chat, console.file.getvalue()


def test_every_turn_joins_the_conversation_and_reuses_its_kv_cache(console, monkeypatch):
    chat, _ = talk(console, monkeypatch, "Hello", "And then?")
    assert [m["role"] for m in chat.session.messages] == ["user", "assistant", "user", "assistant"]
    assert chat.last.cached_tokens > 0


def test_reset_forgets_the_conversation(console, monkeypatch):
    chat, drawn = talk(console, monkeypatch, "Hello", "/reset")
    assert chat.session.messages == []
    assert "new conversation" in drawn


def test_quit_leaves_before_later_lines(console, monkeypatch):
    chat, _ = talk(console, monkeypatch, "/quit", "Hello")
    assert chat.session.messages == []


def test_commands_answer(console, monkeypatch):
    _, drawn = talk(console, monkeypatch, "/help", "/stats", "Hello", "/stats", "/nope", "")
    for expected in ("/reset", "nothing answered yet", "rounds", "no command /nope"):
        assert expected in drawn


def test_ctrl_c_at_the_prompt_does_not_leave(console, monkeypatch):
    chat, _ = talk(console, monkeypatch, KeyboardInterrupt, "Hello")
    assert len(chat.session.messages) == 2


def test_a_backslash_continues_the_line(console, monkeypatch):
    chat, _ = talk(console, monkeypatch, "one\\", "two")
    assert chat.session.messages[0]["content"] == "one\ntwo"


def test_ctrl_c_stops_the_answer_and_not_the_chat(console, monkeypatch):
    chat = Chat(console, fake_llm(), SamplingParams(max_tokens=2000, ignore_eos=True), system=None, show_drafts=False)

    def with_interrupt(chunks):
        try:
            for number, chunk in enumerate(chunks):
                if number == 5:
                    os.kill(os.getpid(), signal.SIGINT)
                yield chunk
        finally:
            chunks.close()

    chat.draw(with_interrupt(chat.session.stream_chat("Hello", chat.params)))
    assert "stopped" in console.file.getvalue()
    assert 0 < len(chat.session.messages[-1]["content"]) < 200
    chat.answer("Go on")  # the session is free again
    assert len(chat.session.messages) == 4


def test_a_bad_request_is_reported_and_the_chat_goes_on(console, monkeypatch):
    chat, drawn = talk(console, monkeypatch, "x" * 5000, "Hello")
    assert "4096" in drawn
    assert len(chat.session.messages) == 2


def test_accepted_drafts_are_coloured(console, monkeypatch):
    from fakes import FakeBackend

    backend = FakeBackend(order=1)  # repeats itself soon, so that the suffix drafter guesses right
    for show in (False, True):
        chat = Chat(console, fake_llm(backend), SamplingParams(max_tokens=400), system=None, show_drafts=show)
        chat.answer("Hello")
        assert chat.last.speculation.accepted > 0
        assert ("\x1b[32m" in console.file.getvalue()) == show


def test_chat_without_a_terminal_answers_once(cli):
    done = cli("chat", "fake", "--max-tokens", "16", stdin=b"Hello")
    assert done.code == 0
    assert done.out == cli("run", "fake", "Hello", "--max-tokens", "16").out
    assert "tok/s" in done.err


@example(["0" * 14 + " ", "00000 ", "0"])
@given(
    st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]) | st.just("\n"), max_size=30), max_size=20)
)
def test_growing_text_loses_and_repeats_nothing(parts):
    def drawn(parts, live):
        console = Console(file=io.StringIO(), width=20, highlight=False)
        paragraph = _Paragraph(console)
        for part in parts:
            paragraph.append(part, "")
            if live:
                paragraph.tail("12 tok/s")
        paragraph.end()
        return console.file.getvalue().split()

    assert drawn(parts, live=True) == drawn(["".join(parts)], live=False)
