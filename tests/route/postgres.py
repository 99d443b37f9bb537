"""A PostgreSQL server of the tests' own, where its programs are installed: on a free port of loopback, in a folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def programs() -> Path | None:
    """The folder with initdb and postgres; None where there is none."""
    on_path = shutil.which("initdb")
    folders = [Path(on_path).parent] if on_path else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def server(bin: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """The URL of its database, and the process."""
    own = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}  # it refuses root
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **own}
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        if own:
            shutil.chown(folder, "nobody", "nogroup")
        make = [bin / "initdb", "-D", f"{folder}/data", "-U", "router", "-A", "trust", "--no-sync"]
        subprocess.run(make, check=True, cwd=folder, **quiet)
        settings = ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}"]
        run = [bin / "postgres", "-D", f"{folder}/data", "-p", str(port), *settings]
        process = subprocess.Popen(run, cwd=folder, **quiet)
        try:
            wait_for(port, process)
            yield f"postgresql://router@127.0.0.1:{port}/postgres", process
        finally:
            process.kill()
            process.wait()


def wait_for(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while subprocess.run(["pg_isready", "-h", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL).returncode:
        assert process.poll() is None, "PostgreSQL did not start"
        assert time.monotonic() < deadline
        time.sleep(0.05)
