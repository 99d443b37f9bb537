"""The judge of drafters: its lengths are those of the rounds, its intervals hold them, its prompts are its own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from fakes import FakeBackend, fake_llm

from slipstream.bench import drafter_eval
from slipstream.bench.drafter_eval import evaluate_drafter, summarise
from slipstream.bench.drafter_prompts import TASKS, task_prompts
from slipstream.cli import app
from slipstream.drafters.block import Record
from slipstream.engine.guide import BlockGuide
from slipstream.errors import RequestError


class HalfRight(FakeBackend):
    """Its first three guesses are right, the others wrong; it says so."""

    def load_drafter(self, drafter):
        """Nothing to load."""

    def draft(self, cache, anchor, *, temperature, seed, limit):
        text, guesses = [*cache.tokens, anchor], []
        for i in range(limit):
            token = int(self.row(text).argmax())
            text.append(token)
            guesses.append(token if i < 3 else (token + 1) % 256)
        return np.array(guesses, np.int32), np.array([1.0, 1.0, 1.0, 0, 0, 0, 0][:limit], np.float32)


@pytest.fixture
def llm():
    backend = HalfRight()
    llm = fake_llm(backend)
    llm.guide, llm.record = BlockGuide(backend, {}), Record()
    return llm


def test_lengths_are_those_of_the_rounds(llm):
    (row,) = evaluate_drafter(llm, tasks=["math"], temperatures=[0.0])
    assert row.tokens_per_round == row.low == row.high == row.promised == 4
    assert row.held == (1, 1, 1, 0, 0, 0, 0)
    assert row.prompts == len(task_prompts("math"))


def test_fewer_drafts_make_shorter_rounds(llm):
    (row,) = evaluate_drafter(llm, tasks=["math"], temperatures=[0.0], drafts=2)
    assert row.tokens_per_round == 3
    assert row.held == (1, 1)


def test_intervals_hold_the_length_and_narrow_with_more_prompts():
    rng = np.random.default_rng(1)

    def judged(prompts):
        answers = [np.tile([7, rng.integers(0, 8), 3.0], (20, 1)) for _ in range(prompts)]
        return summarise("chat", 0.0, answers)

    few, many = judged(6), judged(200)
    for row in (few, many):
        assert row.low < row.tokens_per_round < row.high
    assert many.high - many.low < few.high - few.low


def test_unknown_tasks_and_empty_answers_are_refused(llm):
    with pytest.raises(RequestError, match="no task 'poems'; choose of chat, code, copy, math"):
        evaluate_drafter(llm, tasks=["poems"])
    with pytest.raises(RequestError, match="too short"):
        summarise("chat", 0.0, [np.zeros((0, 3))])


def test_every_task_has_prompts_of_its_own():
    texts = [prompt.messages[-1]["content"] for task in TASKS for prompt in task_prompts(task)]
    assert len(set(texts)) == len(texts) > 45


def test_the_command_prints_a_table_or_json(llm, monkeypatch):
    real = evaluate_drafter
    monkeypatch.setattr(drafter_eval, "evaluate_drafter", lambda model, **options: real(llm, tasks=options["tasks"]))
    plain = CliRunner().invoke(app, ["eval-drafter", "smollm2", "--tasks", "math"])
    assert "4.00 (4.00-4.00)" in plain.output
    rows = json.loads(CliRunner().invoke(app, ["eval-drafter", "x", "--tasks", "math", "--json"]).output)
    assert [row["temperature"] for row in rows] == [0.0, 0.8]
