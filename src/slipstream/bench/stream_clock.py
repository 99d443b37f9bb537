"""One HTTP request over a socket whose every read is stamped before anything looks at it, and the events in the answer.

    socket.recv -> stamp -> h11 (HTTP/1.1) -> `Read` ... then, once the answer is over: `events` -> (stamp, data)

Nothing is decoded while the answer streams, so that parsing one chunk never delays the stamp of the next. The clock is
monotonic, in nanoseconds. It knows nothing of models or tokens, nor of proxies and redirects, which would be measured
instead of the endpoint.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from slipstream.errors import SlipstreamError

READ_BYTES = 65536
now_ns = time.perf_counter_ns


class EndpointError(SlipstreamError):
    """An endpoint that cannot be reached, refuses, or does not answer as its API says."""


@dataclass(frozen=True)
class Read:
    """What one read of the socket added to the body, and when it returned."""

    at_ns: int
    body: bytes


@dataclass
class Exchange:
    """One request and its answer. connect_s: name look-up, TCP and TLS. sent_ns: before the first byte was sent."""

    connect_s: float
    sent_ns: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(read.body for read in self.reads)


def exchange(
    url: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float = 120.0,
    end: bytes | None = None,
) -> Exchange:
    """GET `url`, or POST `body` to it, on a connection of its own.

    timeout_s bounds the whole exchange. end: last words of an answer (white space aside), after which a server may hold
    the connection open. Raises EndpointError where no whole answer comes; any status is an answer.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EndpointError(f"{url!r} is no http:// or https:// address")
    limit = time.monotonic() + timeout_s
    try:
        started = now_ns()
        with _connect(parts.hostname, parts.port or _PORTS[parts.scheme], parts.scheme == "https", timeout_s) as link:
            done = Exchange((now_ns() - started) / 1e9, 0)
            http = h11.Connection(h11.CLIENT)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            request = _request(http, parts.netloc.rpartition("@")[2], target, body, headers or {})
            done.sent_ns = now_ns()
            link.sendall(request)
            _receive(link, http, done, limit, end)
    except TimeoutError:
        raise EndpointError(f"{url} did not finish within {timeout_s:g} s; raise the timeout or ask for less") from None
    except h11.RemoteProtocolError as error:
        raise EndpointError(f"{url} broke off or does not speak HTTP/1.1: {error}") from None
    except OSError as error:
        raise EndpointError(f"cannot talk to {url}: {error.strerror or error}") from None
    return done


_PORTS = {"http": 80, "https": 443}


def _connect(host: str, port: int, secure: bool, timeout_s: float) -> socket.socket:
    link = socket.create_connection((host, port), timeout_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not secure:
        return link
    try:
        return ssl.create_default_context().wrap_socket(link, server_hostname=host)
    except BaseException:
        link.close()
        raise


def _request(http: h11.Connection, host: str, target: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
    sent = {"Host": host, "Accept-Encoding": "identity", "Connection": "close", "User-Agent": "slipstream-bench"}
    if body is not None:
        sent |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    try:
        message = h11.Request(
            method="GET" if body is None else "POST", target=target, headers=list((sent | dict(headers)).items())
        )
    except (h11.LocalProtocolError, UnicodeEncodeError) as error:
        raise EndpointError(f"the request cannot be sent: {error}") from None
    parts = (message, *((h11.Data(data=body),) if body else ()), h11.EndOfMessage())
    return b"".join(http.send(part) or b"" for part in parts)


def _receive(link: socket.socket, http: h11.Connection, done: Exchange, limit: float, end: bytes | None) -> None:
    at_ns, tail = 0, b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            if end is not None and tail.rstrip().endswith(end):
                return
            left = limit - time.monotonic()
            if left <= 0:
                raise TimeoutError
            link.settimeout(left)
            data = link.recv(READ_BYTES)
            at_ns = now_ns()
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            done.status = event.status_code
            done.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            done.reads.append(Read(at_ns, bytes(event.data)))
            tail = (tail + done.reads[-1].body)[-64:]
        elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
            return


def events(reads: Iterable[Read]) -> Iterator[tuple[int, str]]:
    """(stamp in ns, data) of each server-sent event (WHATWG HTML, 9.2.6), at the read that completed it.

    Comments and other fields are skipped. An event that no empty line ended does not count, as the standard says.
    """
    data: list[bytes] = []
    for at_ns, line in _lines(reads):
        if not line:
            if data:
                yield at_ns, b"\n".join(data).decode("utf-8", "replace")
            data = []
        elif line == b"data" or line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))


def _lines(reads: Iterable[Read]) -> Iterator[tuple[int, bytes]]:
    """Lines that end in LF, CR or CRLF, without their ends, wherever reads may have cut them."""
    start, after_cr, first = b"", False, True
    for read in reads:
        text = read.body
        if after_cr and text.startswith(b"\n"):
            text = text[1:]
        if read.body:
            after_cr = text.endswith(b"\r")
        *whole, start = re.split(rb"\r\n|\n|\r", start + text)
        for line in whole:
            yield read.at_ns, line.removeprefix(b"\xef\xbb\xbf") if first else line
            first = False
