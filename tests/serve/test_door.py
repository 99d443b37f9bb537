"""Keys, limits and logs: what is kept out, and what never gets into a log."""

import json
import logging
import socket
import time

import httpx
import openai
import pytest
from serving import serving

from slipstream.serve.auth import Client, Doorkeeper, hash_key
from slipstream.serve.config import ConfigError, Key, Limits, load_config
from slipstream.serve.errors import ApiError
from slipstream.serve.run import JsonLines

SECRET = "sk-this-is-the-secret"
QUESTION = [{"role": "user", "content": "a private question"}]


@pytest.fixture(scope="module")
def locked(tiny_llm):
    with serving(tiny_llm, keys=(Key(name="ada", hash=hash_key(SECRET)),), limits=Limits(body_bytes=20_000)) as running:
        yield running


def ask(client, running, **options):
    return client.chat.completions.create(model=running.model, messages=QUESTION, max_tokens=4, **options)


def test_only_a_known_key_is_let_in(locked):
    assert ask(locked.openai(SECRET), locked).choices
    with pytest.raises(openai.AuthenticationError):
        ask(locked.openai("sk-wrong"), locked)
    assert httpx.get(f"{locked.url}/v1/models").status_code == 401
    assert httpx.get(f"{locked.url}/metrics").status_code == 401
    assert httpx.get(f"{locked.url}/openapi.json").status_code == 401
    wrong = httpx.post(f"{locked.url}/v1/messages", headers={"x-api-key": "no"}, json={})
    assert wrong.status_code == 401
    assert wrong.json()["error"]["type"] == "authentication_error"
    assert locked.anthropic(SECRET).messages.create(model=locked.model, max_tokens=2, messages=QUESTION)
    for path in ("/", "/health", "/ready"):
        assert httpx.get(locked.url + path).status_code == 200


def test_every_key_is_compared_whoever_asks(monkeypatch):
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append(a) or a == b)
    door = Doorkeeper([Key(name=name, hash=hash_key(name)) for name in ("a", "b", "c")])
    assert door.admit("Bearer a", None).name == "a"
    with pytest.raises(ApiError):
        door.admit("Bearer x", None)
    assert len(compared) == 6


def test_no_key_and_no_prompt_gets_into_the_log(locked, caplog):
    with caplog.at_level(logging.DEBUG):
        ask(locked.openai(SECRET), locked)
        with pytest.raises(openai.BadRequestError):
            ask(locked.openai(SECRET), locked, extra_body={"x": SECRET})
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("slipstream", "uvicorn"))]
    lines = [json.loads(line) for line in ours if line.startswith("{")]
    served = {"path": "/v1/chat/completions", "status": 200, "key": "ada"}
    assert any(served.items() <= line.items() for line in lines)
    for text in ours:
        assert SECRET not in text
        assert "private" not in text


def test_a_log_line_is_one_json_object():
    record = logging.LogRecord("slipstream.serve", logging.INFO, "", 0, 'he said "%s"\n', ("hi",), None)
    assert json.loads(JsonLines().format(record))["message"] == 'he said "hi"\n'


def test_a_large_body_is_refused_before_it_is_read(locked):
    headers = {"authorization": f"Bearer {SECRET}"}
    big = {"model": "m", "messages": [{"role": "user", "content": "x" * 30_000}]}
    assert httpx.post(f"{locked.url}/v1/chat/completions", json=big, headers=headers).status_code == 413

    def pieces():
        for _ in range(40):
            yield b"x" * 1000

    assert httpx.post(f"{locked.url}/v1/messages", content=pieces(), headers=headers).status_code == 413


def test_a_rate_limit_is_a_429_that_says_when_to_come_back():
    now = [0.0]
    client = Client(Key(name="k", hash=hash_key("x"), requests_per_minute=2, tokens_per_minute=100), lambda: now[0])
    client.admit()
    client.admit()
    with pytest.raises(ApiError) as refused:
        client.admit()
    assert refused.value.status == 429
    assert refused.value.headers == {"Retry-After": "60"}
    now[0] = 61
    client.admit()
    client.spend_tokens(500)
    with pytest.raises(ApiError):
        client.admit()
    now[0] = 122
    client.admit()


def test_broken_json_and_unknown_paths_are_told_in_the_api_s_shape(tiny):
    broken = httpx.post(f"{tiny.url}/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400
    assert broken.json()["error"]["code"] == "invalid_json"
    missing = httpx.get(f"{tiny.url}/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"


def test_browsers_of_other_origins_are_not_let_in(tiny):
    answer = httpx.get(f"{tiny.url}/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_settings_say_what_is_wrong_with_them(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text("[tiers.slow]\nrank = 0\n\n[limits]\nchoices = 0\n\n[sessions]\nmemory_mb = 10\n")
    with pytest.raises(ConfigError, match=r"limits\.choices"):
        load_config(path)
    path.write_text('auto = "warp"\n')
    with pytest.raises(ConfigError, match="warp"):
        load_config(path)
    path.write_text('colour = "blue"\n')
    with pytest.raises(ConfigError, match="colour"):
        load_config(path)
    path.write_text("port = 9000\n[sessions]\nmemory_mb = 10\n")
    config = load_config(path, port=9001, session_dir=tmp_path, host=None)
    assert (config.port, config.sessions.memory_mb, config.sessions.dir) == (9001, 10, tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")


def test_a_body_that_never_comes_is_not_waited_for(tiny, monkeypatch):
    monkeypatch.setattr("slipstream.serve.door.BODY_S", 0.2)
    host, port = tiny.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as link:
        link.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        started = time.monotonic()
        assert b" 408 " in link.recv(1000)
        assert time.monotonic() - started < 3
