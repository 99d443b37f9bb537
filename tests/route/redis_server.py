"""A Redis of the tests' own on a free port of loopback: the server where it is installed, else one in Python."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from fakeredis import TcpFakeServer
from postgres import free_port


@contextmanager
def redis_server() -> Iterator[str]:
    """Its URL."""
    if (program := shutil.which("redis-server")) is None:
        server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
        server.shutdown()
        server.server_close()
        return
    port = free_port()
    process = subprocess.Popen([program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", "/tmp"])
    try:
        wait_for(f"redis://127.0.0.1:{port}/0", process)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def wait_for(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            redis.Redis.from_url(url).ping()
            return
        except redis.ConnectionError:
            assert process.poll() is None, "Redis did not start"
            assert time.monotonic() < deadline
            time.sleep(0.02)
