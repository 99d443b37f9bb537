"""The page at `/`, as a browser runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time

import httpx
import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


class Page:
    """A page in headless Chromium, driven by the DevTools protocol over two pipes (file descriptors 3 and 4)."""

    def __init__(self, url: str) -> None:
        (inward, self._send), (self._receive, outward) = os.pipe(), os.pipe()
        command = (
            f'exec "{BROWSER}" --headless --no-sandbox --disable-gpu --remote-debugging-pipe 3<&{inward} 4>&{outward}'
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(inward, outward), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        for end in (inward, outward):
            os.close(end)
        self._count, self._rest, self._session = 0, b"", None
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._receive, 65536)
                assert data, "the browser ended"
                self._rest += data
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._count:
                return answer["result"]

    def js(self, code: str):
        return self.call("Runtime.evaluate", expression=code, returnByValue=True)["result"].get("value")

    def until(self, code: str, within_s: float = 40) -> None:
        deadline = time.monotonic() + within_s
        while not self.js(code):
            assert time.monotonic() < deadline, (
                f"{code} did not become true; page: {self.js('document.body.innerText')}"
            )
            time.sleep(0.05)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._send)
        os.close(self._receive)


@pytest.fixture
def page(smollm2):
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    page = Page(smollm2.url)
    yield page
    page.close()


def test_the_page_needs_nothing_but_itself(tiny):
    page = httpx.get(tiny.url)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"(?:src|href)=|https?://|@import", page.text)


def test_a_chat_in_the_browser_streams_and_shows_its_rounds(page, smollm2):
    page.until("document.querySelectorAll('#tier option').length === 5")
    page.js("document.getElementById('tier').value = 'ultrafast'; document.getElementById('tokens').value = 60")
    page.js("document.getElementById('text').value = 'List the days of the week, twice.'")
    page.js("document.getElementById('send').click()")
    page.until("document.querySelectorAll('.assistant .round').length > 3")
    page.until("document.getElementById('send').textContent === 'Send'")
    assert "Monday" in page.js("document.querySelector('.assistant').textContent")
    figures = page.js("document.getElementById('figures').textContent")
    assert re.match(r"\d+ tok/s60 tokens in \d+ rounds|\d+ tok/s\d+ tokens in \d+ rounds", figures), figures
    assert "ultrafast" in figures
    coloured = page.js("[...document.querySelectorAll('.round')].filter(r => r.style.background).length")
    several = page.js("[...document.querySelectorAll('.round')].filter(r => / [1-9]\\d* of /.test(r.title)).length")
    assert coloured == several > 0
    guesses = page.js(
        "[...document.querySelectorAll('.guess')].filter(g => g.style.background).map(g => g.textContent)"
    )
    assert guesses
    assert all(guesses), "what was guessed is marked, and nothing else"
    whole = page.js(
        "[...document.querySelectorAll('.round')].filter(r => !/ 0 of /.test(r.title)).map(r => r.textContent)"
    )
    assert len("".join(guesses)) < len("".join(whole)), "the round's last token is the model's own"


def test_stop_in_the_browser_frees_the_machine(page, smollm2):
    page.until("document.querySelectorAll('#tier option').length === 5")
    page.js("document.getElementById('tokens').value = 2000")
    page.js("document.getElementById('text').value = 'Count from one to a thousand, in words.'")
    page.js("document.getElementById('send').click()")
    page.until("document.querySelectorAll('.assistant .round').length > 3")
    page.js("document.getElementById('send').click()")
    assert smollm2.at_rest()
    page.until("document.getElementById('send').textContent === 'Send'")
