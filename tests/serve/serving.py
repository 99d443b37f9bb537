"""A server in a thread, on a free port, for the time of a block."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anthropic
import openai

from slipstream import LLM
from slipstream.serve.answers import Service
from slipstream.serve.config import Config
from slipstream.serve.run import Server, make_server


@dataclass
class Running:
    url: str
    service: Service
    server: Server
    thread: threading.Thread

    @property
    def model(self) -> str:
        return self.service.model

    def openai(self, key: str = "none", **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def anthropic(self, key: str = "none", **options) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, **options)

    def at_rest(self, within_s: float = 5.0) -> bool:
        """Whether no stream runs and no session is busy, soon."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if not self.service.scheduler.streams() and not self.service.pool.busy:
                return True
            time.sleep(0.01)
        return False


@contextmanager
def serving(llm: LLM, **settings) -> Iterator[Running]:
    """A server for the time of a block."""
    server, app = make_server(llm, Config(port=0, **settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", app.state.service, server, thread)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
