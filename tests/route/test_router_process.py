"""`slipstream route CONFIG.toml` as a process: it serves, takes a changed file, and a kill -9 loses nothing told."""

import json
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from upstreams import Fake, table, targets

from slipstream.route.ledger import read_rows


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_it_serves_reloads_and_keeps_its_ledger_through_kill_9(tmp_path, port):
    slow, quick = Fake("openai-chat", delay_s=0.3), Fake("anthropic")
    head = f'[server]\nreload_s = 0.05\n[ledger]\npath = "{tmp_path / "route.db"}"\n'
    with targets(slow, quick):
        path = tmp_path / "route.toml"
        path.write_text(head + table("a", quick) + "[routes.auto]\n")
        command = [sys.executable, "-m", "slipstream", "route", str(path), "--port", str(port)]
        router = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
            body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
            assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
            path.write_text(head + "[targets")  # a mistake changes nothing
            time.sleep(0.2)
            assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
            path.write_text(head + table("a", slow) + "[routes.auto]\n")
            wait_for(lambda: httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200 and slow.requests)
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}) as answer:
                blocks = answer.iter_raw()
                next(blocks)
                id = answer.headers["x-slipstream-request"]
                router.send_signal(signal.SIGKILL)
                router.wait()
        finally:
            router.kill()
            log = [json.loads(line) for line in router.stderr.read().splitlines() if line.startswith(b"{")]
    (row,) = read_rows(tmp_path / "route.db", id=id)
    assert (row["target"], row["cost"]) == ("a", None)
    told = [r for r in read_rows(tmp_path / "route.db") if r["id"] != id]
    assert len(told) == len(quick.requests) + len(slow.requests) - 1
    assert all(r["status"] == "ok" for r in told)
    assert {"reload refused", "reloaded"} <= {line.get("event") for line in log}


def wait_for(ready) -> None:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError("it did not come to pass")
