"""Events keep their content and their stamp however the network cuts them, and a broken answer is an error."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import HEAD, Script, ScriptedServer, event

from slipstream.bench.stream_clock import EndpointError, Read, events, exchange

STREAM = (
    b"\xef\xbb\xbf: hello\n\ndata: one\n\n"
    + ": keep-alive\r\n\r\nid: 7\r\nevent: chunk\r\ndata: zwölf 🚆\r\n\r\n".encode()
    + b"data:three\rdata:  lines\rdata\r\r"
    + b"\n\nretry: 10\n\ndata: four\n\ndata: cut off"
)
DATA = ["one", "zwölf 🚆", "three\n lines\n", "four"]
ENDS = [end.encode() for end in ("data: one\n\n", "🚆\r\n\r", "data\r\r", "data: four\n\n")]


@given(st.lists(st.integers(1, len(STREAM) - 1)))
def test_an_event_has_its_data_and_the_stamp_of_the_read_that_completed_it(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reads = [Read(end, STREAM[start:end]) for start, end in pairwise(edges)]
    found = list(events(reads))
    assert [data for _, data in found] == DATA
    for (at_ns, _), end in zip(found, ENDS, strict=True):
        assert at_ns == min(edge for edge in edges[1:] if edge >= STREAM.index(end) + len(end))


def test_an_answer_ends_with_its_last_chunk_though_the_connection_stays_open() -> None:
    script = Script([(0, event("hello")), (0, event("[DONE]"))], hold_s=5)
    with ScriptedServer(script) as server:
        start = time.monotonic()
        done = exchange(server.url + "/x", b"{}", end=b"data: [DONE]")
        assert time.monotonic() - start < 3
    assert [data for _, data in events(done.reads)] == ["hello", "[DONE]"]


@pytest.mark.parametrize("chunked", [True, False])
def test_the_body_is_whole_in_either_framing(chunked: bool) -> None:
    with ScriptedServer(Script([(0, b"ab"), (0.02, b"cd")], chunked=chunked)) as server:
        done = exchange(server.url, b"{}")
    assert done.body == b"abcd"
    assert done.status == 200


def test_an_answer_that_breaks_off_is_an_error() -> None:
    with ScriptedServer(Script([(0, b"ab")], cut=True)) as server, pytest.raises(EndpointError, match="broke off"):
        exchange(server.url, b"{}")


def test_an_answer_that_takes_too_long_is_an_error_even_if_it_never_stalls() -> None:
    drip = Script([(0.05, b": still here\n\n")] * 100)
    with ScriptedServer(drip) as server, pytest.raises(EndpointError, match=r"did not finish within 0\.3 s"):
        exchange(server.url, b"{}", timeout_s=0.3)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://example.com", "no http:// or https:// address"),
        ("nonsense", "no http:// or https:// address"),
        ("http://127.0.0.1:1/v1", "cannot talk to http://127.0.0.1:1/v1"),
    ],
)
def test_an_endpoint_that_is_not_there_is_named(url: str, message: str) -> None:
    with pytest.raises(EndpointError, match=message):
        exchange(url)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1, signed by itself, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    path = tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key.pem"), "-out", str(path)]
    subprocess.run(made, check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "key.pem").read_text())
    return path


def test_tls_is_checked_and_stamped_like_the_rest(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with ScriptedServer(Script([(0, b"ab"), (0.1, b"cd")]), tls=tls) as server:
        with pytest.raises(EndpointError, match="certificate"):
            exchange(server.url, b"{}")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        done = exchange(server.url, b"{}")
    assert done.body == b"abcd"
    assert done.reads[-1].at_ns - done.reads[0].at_ns > 0.07e9


def test_what_does_not_speak_http_is_an_error() -> None:
    with (
        ScriptedServer(Script([], head="SSH-2.0-OpenSSH\r\n")) as server,
        pytest.raises(EndpointError, match="does not speak HTTP"),
    ):
        exchange(server.url, b"{}")
    assert HEAD.startswith("HTTP")


def test_headers_cannot_be_smuggled_into_a_request() -> None:
    with ScriptedServer(Script([])) as server, pytest.raises(EndpointError, match="cannot be sent"):
        exchange(server.url, b"{}", {"Authorization": "Bearer a\r\nX: b"})
