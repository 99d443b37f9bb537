"""An HTTP server that sends given bytes after given delays, and notes when it really did.

The truth that a measurement must find is `Served`: stamps of the same clock, taken right before each piece is sent.
"""

from __future__ import annotations

import functools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


def patiently(test: Callable[..., None]) -> Callable[..., None]:
    """Tries up to five times: a busy machine delays a thread now and then, a wrong figure is wrong every time."""

    @functools.wraps(test)
    def again(*args: Any, **kwargs: Any) -> None:
        for _ in range(4):
            with suppress(AssertionError):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return again


@dataclass
class Script:
    """pieces: (seconds to wait, bytes to send). chunked: HTTP chunks; otherwise the body ends with the connection.

    hold_s: how long the connection stays open after the last piece, unfinished. cut: close without the last HTTP chunk.
    """

    pieces: Sequence[tuple[float, bytes]]
    chunked: bool = True
    hold_s: float = 0.0
    cut: bool = False
    head: str = HEAD


@dataclass
class Served:
    request: dict[str, Any]
    arrived_ns: int
    sent_ns: list[int] = field(default_factory=list)

    def seconds(self, piece: int) -> float:
        """When a piece was sent, after the request had come."""
        return (self.sent_ns[piece] - self.arrived_ns) / 1e9


class ScriptedServer:
    """Plays `scripts` in turn, the last one for ever. Use as a context manager."""

    def __init__(self, *scripts: Script, metrics: Sequence[str] = (), tls: ssl.SSLContext | None = None) -> None:
        self.scripts, self.metrics, self.tls = list(scripts), list(metrics), tls
        self.served: list[Served] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> ScriptedServer:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self.socket.accept()
            except OSError:
                return
            with link:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with suppress(OSError):  # the client may leave, or not trust us
                    self._answer(self.tls.wrap_socket(link, server_side=True) if self.tls else link)

    def _answer(self, link: socket.socket) -> None:
        file = link.makefile("rb")
        line = file.readline().decode()
        length = 0
        while (header := file.readline().strip()) != b"":
            if header.lower().startswith(b"content-length:"):
                length = int(header.split(b":")[1])
        body = file.read(length)
        if len(body) < length or not line:
            return  # it left before it had asked
        if line.startswith("GET"):
            link.sendall(self._page(line.split()[1]))
            return
        served = Served(json.loads(body), time.perf_counter_ns())
        self.served.append(served)
        script = self.scripts[min(len(self.served), len(self.scripts)) - 1]
        self._play(link, script, served)

    def _play(self, link: socket.socket, script: Script, served: Served) -> None:
        framing = "Transfer-Encoding: chunked\r\n" if script.chunked else "Connection: close\r\n"
        link.sendall((script.head + framing + "\r\n").encode())
        due = time.perf_counter()
        for wait_s, data in script.pieces:
            due += wait_s
            time.sleep(max(0.0, due - time.perf_counter()))
            served.sent_ns.append(time.perf_counter_ns())
            link.sendall(b"%x\r\n%s\r\n" % (len(data), data) if script.chunked else data)
        if script.hold_s:
            link.settimeout(script.hold_s)
            link.recv(1)
        if script.chunked and not script.cut:
            link.sendall(b"0\r\n\r\n")

    def _page(self, path: str) -> bytes:
        if path == "/metrics" and self.metrics:
            text, kind = (self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]), "text/plain"
        elif path == "/v1/models":
            text, kind = json.dumps({"data": [{"id": "scripted"}]}), "application/json"
        else:
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def event(document: object, end: str = "\n\n") -> bytes:
    return f"data: {document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)}{end}".encode()


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        "usage": None,
    }


def usage(completion: int, prompt: int = 10, **more: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"choices": [], "usage": counts | more}


def plain(texts: Sequence[str], gap_s: float, first_s: float, tokens: int, finish: str = "stop") -> Script:
    """Role, then `texts` a gap apart, then finish and usage."""
    pieces = [(0.0, event(chunk(role="assistant", content="")))]
    pieces += [(gap_s if i else first_s, event(chunk(content=text))) for i, text in enumerate(texts)]
    return Script([*pieces, (0.0, event(chunk(finish)) + event(usage(tokens)) + event("[DONE]"))])
