"""`bench decode`: what the report says of known answers."""

import json

import pytest
from fakes import FakeBackend, fake_llm

from slipstream import SamplingParams
from slipstream.bench import decode
from slipstream.cli import main


@pytest.fixture(autouse=True)
def fake_model(monkeypatch):
    def load(model, *, backend="auto", threads=None, **options):
        return fake_llm(FakeBackend(order=1), **options)

    monkeypatch.setattr(decode, "LLM", load)
    monkeypatch.setattr(decode, "read_bandwidth", lambda threads: 30e9)


def test_every_prompt_is_answered_as_often_as_asked():
    report = decode.measure_decode("fake", "code", repeats=2, max_tokens=12, drafter="none")
    assert report.answers == 2 * 7
    assert report.tokens == report.answers * 12
    assert len(report.tokens_per_s.samples) == len(report.ttft_s.samples) == report.answers
    assert len(report.round_s.samples) == report.answers * 11
    assert (report.drafter, report.tokens_per_round) == ("none", 1.0)


def test_a_drafter_shows_in_tokens_a_round():
    report = decode.measure_decode("fake", "chat", repeats=1, max_tokens=200, drafter="suffix")
    assert report.tokens_per_round > 1.5
    assert len(report.round_s.samples) < report.tokens


def test_no_answer_learns_from_an_earlier_one():
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    llm = fake_llm()  # never repeats itself, so only an earlier answer could tell what comes
    with llm.session() as session:
        session.chat("Hello", params)
    with llm.session() as session:
        assert session.chat("Hello", params).speculation.accepted > 100
    for _ in range(2):
        with decode.fresh_session(llm, "suffix") as session:
            answer = session.chat("Hello", params)
        assert answer.cached_tokens == 0
        assert answer.speculation.accepted < 20


def test_the_floor_is_weights_over_bandwidth(monkeypatch):
    backend = FakeBackend()
    backend.name = "cpu"
    backend.memory_bytes = lambda: 30_000_000
    llm = fake_llm(backend)
    monkeypatch.setattr(decode, "LLM", lambda *args, **options: llm)
    report = decode.measure_decode("fake", "code", repeats=1, max_tokens=8)
    assert report.floor_fraction == pytest.approx(0.001 / report.round_s.median)


def test_command_prints_a_table_and_one_json_object(capsys):
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as stop:
            main(["bench", "decode", "fake", "--repeats", "1", "--max-tokens", "8", *more])
        assert not stop.value.code
        out = capsys.readouterr().out
        if more:
            assert json.loads(out)["weight_bytes"] == 1
        else:
            for word in ("first token", "tok/s", "tokens a round", "p10", "p90"):
                assert word in out
