"""The benchmark against llama.cpp: its arithmetic, and its refusal to report speed for another text."""

from contextlib import ExitStack

import cpu_decode
import numpy as np
import pytest


class FakeWorker:
    def __init__(self, name, rate, texts=({},)):
        self.name, self.rate, self.asked = name, rate, []

    def ask(self, do, *, tokens, max_tokens, drafter="none"):
        self.asked.append((tuple(tokens), drafter))
        said = [1] * max_tokens if drafter != "liar" else [2] * max_tokens
        return {
            "tokens": said,
            "timed_tokens": max_tokens - 1,
            "ttft_s": len(tokens) / (10 * self.rate),
            "decode_s": (max_tokens - 1) / self.rate,
            "tokens_per_round": 1.0,
        }


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(cpu_decode.time, "sleep", lambda seconds: None)
    run = cpu_decode.Run("smollm2", "cpu", 2, 3, 0.1, ExitStack())
    run.__dict__ |= {"ours": FakeWorker("cpu", 200.0), "peer": FakeWorker("llama.cpp", 100.0)}
    return run


def test_ratio_is_ours_over_the_peers(run):
    row = cpu_decode.cpu_chat(run)
    assert (row.id, row.unit, row.peer) == ("cpu-chat", "tok/s", "llama.cpp")
    assert row.value == pytest.approx(200)
    assert row.ratio == pytest.approx(2)
    assert len(row.samples) == 3


def test_both_programs_get_the_same_tokens_equally_often(run):
    cpu_decode.cpu_chat(run)
    assert sorted(run.ours.asked) == sorted(run.peer.asked)
    assert len(run.ours.asked) == 5 * 3


def test_prefill_counts_prompt_tokens_to_the_first_answer_token(run):
    row = cpu_decode.cpu_prefill(run)
    assert row.value == pytest.approx(2000)
    assert row.ratio == pytest.approx(2)


def test_no_speed_is_reported_where_a_drafter_changed_the_text(run):
    with pytest.raises(RuntimeError, match="two texts"):
        run.decode_rates([(run.ours, "none"), (run.ours, "liar")], [[1, 2]], 8)


def test_divergence_of_equal_logits_is_nought_and_grows_with_the_difference():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(100, 50)).astype(np.float32)
    assert cpu_decode.divergence(truth, truth) == (pytest.approx(0, abs=1e-12), 1.0)
    near, _ = cpu_decode.divergence(truth, truth + rng.normal(0, 0.01, truth.shape).astype(np.float32))
    far, top = cpu_decode.divergence(truth, truth + rng.normal(0, 1, truth.shape).astype(np.float32))
    assert 0 < near < far
    assert top < 1


def test_divergence_ignores_a_constant_added_to_all_logits():
    truth = np.random.default_rng(1).normal(size=(10, 20)).astype(np.float32)
    assert cpu_decode.divergence(truth, truth + 3)[0] == pytest.approx(0, abs=1e-10)


def test_peak_memory_sees_what_a_process_held():
    python = __import__("sys").executable
    small, large = (cpu_decode.peak_memory([python, "-c", f"x = b'x' * {size}"]) for size in (1, 200_000_000))
    assert large - small == pytest.approx(200_000_000, rel=0.1)


def test_a_whole_run_has_every_row_of_the_table():
    assert list(cpu_decode.ROWS) == [
        "cpu-chat", "cpu-copy", "cpu-suffix-cost", "cpu-prefill", "cpu-memory", "cold-start", "cpu-accuracy",
    ]  # fmt: skip
