"""Sessions: prefixes reused exactly, a budget kept, and files that outlive the process or are ignored."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from tiny import write_tiny_checkpoint

from slipstream import LLM, SamplingParams
from slipstream.serve.config import Sessions
from slipstream.serve.sessions import SessionPool, kv_bytes
from slipstream.serve.spill import SpillStore, fingerprint

WORDS = "The quick brown fox jumps over the lazy dog and the cat looks on. "


def run(pool: SessionPool, llm: LLM, tokens: list[int], count: int = 8) -> tuple[list[int], int]:
    """Serve `tokens` from the pool; (what was generated, how many prompt tokens were reused)."""
    live, _ = pool.acquire(tokens)
    done = live.session.generate(tokens, SamplingParams(max_tokens=count, ignore_eos=True))
    pool.release(live)
    return done.token_ids, done.cached_tokens


@pytest.fixture
def prompt(tiny_llm):
    return tiny_llm.tokenizer.encode(WORDS * 2)


def alone(llm, tokens):
    with llm.session() as session:
        return session.generate(tokens, SamplingParams(max_tokens=8, ignore_eos=True)).token_ids


def test_a_conversation_goes_on_where_it_was(tiny_llm, prompt):
    pool = SessionPool(tiny_llm, Sessions())
    answer, cached = run(pool, tiny_llm, prompt)
    assert cached == 0
    longer = [*prompt, *answer, 40, 41, 42]
    again, cached = run(pool, tiny_llm, longer)
    assert cached >= len(prompt) + len(answer) - 1
    assert again == alone(tiny_llm, longer)
    assert pool.idle == 1


def test_branches_of_a_conversation_do_not_cost_each_other(tiny_llm, prompt):
    pool = SessionPool(tiny_llm, Sessions())
    long = [*prompt, *tiny_llm.tokenizer.encode(WORDS * 2)]
    run(pool, tiny_llm, long)
    other = [*prompt, 50, 51, 52, 53]
    answer, cached = run(pool, tiny_llm, other)
    assert cached >= len(prompt)
    assert answer == alone(tiny_llm, other)
    _, cached = run(pool, tiny_llm, [*long, 60])
    assert cached >= len(long) - 1, "the first branch is still whole"


def test_the_same_prompt_again_copies_nothing(tiny_llm, prompt):
    pool = SessionPool(tiny_llm, Sessions())
    run(pool, tiny_llm, prompt, 200)  # a session far longer than the prompt
    run(pool, tiny_llm, prompt, 2)
    count = pool.idle
    for _ in range(3):
        assert run(pool, tiny_llm, prompt, 2)[1] == len(prompt) - 1
    assert pool.idle == count


def test_sliding_windows_are_reused_exactly(tmp_path):
    llm = LLM(write_tiny_checkpoint(tmp_path / "mistral", "mistral"), threads=1)
    tokens = llm.tokenizer.encode(WORDS)
    pool = SessionPool(llm, Sessions())
    answer, _ = run(pool, llm, tokens)
    for turn in ([*tokens, *answer, 40, 41], [*tokens[:20], 70, 71, 72], [*tokens, 80]):
        assert run(pool, llm, turn)[0] == alone(llm, turn)


def test_old_sessions_make_room(tiny_llm):
    one = kv_bytes(tiny_llm.spec, 128)
    pool = SessionPool(tiny_llm, Sessions(count=3))
    for i in range(6):
        run(pool, tiny_llm, [100 + i] * 100)
    assert pool.idle == 3
    pool.budget_bytes = one
    run(pool, tiny_llm, [100] * 100)
    assert pool.held_bytes <= one
    pool.close()
    assert pool.idle == pool.held_bytes == 0


@pytest.fixture
def store(tmp_path, tiny_llm):
    return lambda: SpillStore(tmp_path / "kv", fingerprint(tiny_llm), 1 << 30)


def test_a_saved_session_is_gone_on_from_bit_for_bit(tiny_llm, prompt, store):
    first = SessionPool(tiny_llm, Sessions(), store())
    answer, _ = run(first, tiny_llm, prompt)
    first.close()
    second = SessionPool(tiny_llm, Sessions(), store())
    longer = [*prompt, *answer, 40]
    again, cached = run(second, tiny_llm, longer)
    assert cached >= len(prompt) + len(answer) - 1
    assert again == alone(tiny_llm, longer)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "noise"])
def test_a_damaged_file_is_ignored_and_removed(tiny_llm, prompt, store, tmp_path, damage):
    pool = SessionPool(tiny_llm, Sessions(), store())
    run(pool, tiny_llm, prompt)
    pool.close()
    (file,) = (tmp_path / "kv").glob("*.kv")
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-7] ^= 1
    file.write_bytes({"cut": data[:-10], "empty": b"", "noise": os.urandom(500)}.get(damage, data))
    pool = SessionPool(tiny_llm, Sessions(), store())
    answer, cached = run(pool, tiny_llm, [*prompt, 40])
    assert cached == 0
    assert answer == alone(tiny_llm, [*prompt, 40])


def test_another_models_files_are_left_alone(tiny_llm, prompt, store, tmp_path):
    pool = SessionPool(tiny_llm, Sessions(), store())
    run(pool, tiny_llm, prompt)
    pool.close()
    other = LLM(write_tiny_checkpoint(tmp_path / "other", seed=1), threads=1)
    assert fingerprint(other) != fingerprint(tiny_llm)
    pool = SessionPool(other, Sessions(), SpillStore(tmp_path / "kv", fingerprint(other), 1 << 30))
    assert run(pool, other, [*prompt, 40])[1] == 0
    assert len(list((tmp_path / "kv").glob("*.kv"))) == 1


def test_files_are_private_and_the_oldest_make_room(tiny_llm, tmp_path):
    store = SpillStore(tmp_path / "kv", "m", 3000)
    for i in range(5):
        store.save([i] * 10, b"x" * 800)
    files = list((tmp_path / "kv").iterdir())
    assert sum(file.stat().st_size for file in files) <= 3000
    assert {file.suffix for file in files} == {".kv"}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert store.closest([4] * 11).shared == 10


SERVE = [sys.executable, "-m", "slipstream", "serve", "smollm2", "--context", "6144", "--port"]


def served(port: int, folder) -> subprocess.Popen:
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen([*SERVE, str(port), "--session-dir", str(folder)], stderr=out)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return process
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"the server did not start, exit status {process.wait()}:\n{log.read_text()}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_killed_in_the_middle_it_comes_back_with_its_sessions(smollm2_llm, tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    turns = [{"role": "user", "content": WORDS * 270}]

    def ask(**more):
        body = {"model": "smollm2", "messages": turns, "max_tokens": 8, "temperature": 0} | more
        return httpx.post(url, json=body, timeout=300).json()

    process = served(port, tmp_path)
    try:
        first = ask()
        assert first["usage"]["prompt_tokens"] >= 4000
        turns += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
        turns += [{"role": "user", "content": "Go on."}]
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("*.kv")):
            assert time.monotonic() < deadline, "nothing was written"
            time.sleep(0.1)
        stream = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with httpx.stream("POST", url, json=stream) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGKILL)
            process.wait()
        process = served(port, tmp_path)
        again = ask()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
