"""The drafter's benchmark: with against without, on the same prompts, at the same temperature."""

from contextlib import ExitStack

import cpu_decode
import cpu_drafter
import pytest


class FakeWorker:
    name = "cpu"

    def __init__(self):
        self.asked = []

    def ask(self, do, *, tokens, max_tokens, drafter, temperature):
        self.asked.append((drafter, tuple(tokens), temperature))
        seconds = max_tokens / (300 if drafter == "auto" else 200)
        return {"tokens": [1], "timed_tokens": max_tokens, "decode_s": seconds, "ttft_s": 1, "tokens_per_round": 2.5}


def test_with_and_without_decode_the_same_prompts(monkeypatch):
    monkeypatch.setattr(cpu_decode.time, "sleep", lambda seconds: None)
    run = cpu_drafter.DrafterRun("smollm2", "cpu", 2, 3, 0.1, ExitStack())
    worker = run.__dict__["ours"] = FakeWorker()
    row = cpu_drafter.speed(run, "draft-cpu", "chat prompts", "chat", 128, temperature=0.8)
    assert row.ratio == pytest.approx(1.5)
    assert row.peer == "no drafter"
    assert "2.50 tokens a round" in row.work
    asked = {drafter: [a[1:] for a in worker.asked if a[0] == drafter] for drafter in ("auto", "none")}
    assert sorted(asked["auto"]) == sorted(asked["none"])
    assert {temperature for _, temperature in asked["auto"]} == {0.8}
