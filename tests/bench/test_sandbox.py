"""What a command in the sandbox can and cannot do; each protection is tested wherever the kernel offers it."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.bench import sandbox
from slipstream.bench.sandbox import Outcome, protections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is one on Linux alone")


def python(root: Path, code: str, seconds: int = 20) -> Outcome:
    return sandbox.run(root, [sandbox.PYTHON, "-I", "-S", "-c", code], seconds=seconds)


def needs(protection: str) -> None:
    if protection not in protections():
        pytest.skip(f"this kernel gives an ordinary user no protection of {protection}")


def test_every_protection_that_this_kernel_offers_is_used() -> None:
    version = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))  # Landlock's
    namespaces = ["unshare", "--map-root-user", "--net", "--pid", "--ipc", "--fork", "true"]
    spaces = subprocess.run(namespaces, capture_output=True)
    assert "limits" in protections()
    assert ("files" in protections()) == (version >= 1)
    assert ("processes" in protections()) == (spaces.returncode == 0)
    assert ("network" in protections()) == (spaces.returncode == 0 or version >= 4)


def test_a_command_works_in_its_directory_and_its_exit_code_and_last_words_come_back(tmp_path: Path) -> None:
    code = "import os, sys; open('new', 'w').write('x'); os.mkdir('d'); print('a' * 9000, 'end'); sys.exit(7)"
    done = python(tmp_path, code)
    assert (done.code, done.said[-4:], len(done.said)) == (7, "end\n", 4000)
    assert (tmp_path / "new").read_text() == "x"


@pytest.mark.parametrize(
    "code",
    [
        "open(SECRET).read()",
        "open(SECRET, 'w')",
        "open(SECRET + '.new', 'w')",
        "os.unlink(SECRET)",
        "os.listdir(os.path.dirname(SECRET))",
        "open('link').read()",
        "open('/etc/passwd').read()",
        "open('/proc/1/environ').read()",
    ],
)
def test_no_file_outside_is_read_written_or_listed(tmp_path: Path, code: str) -> None:
    needs("files")
    secret, root = tmp_path / "secret", tmp_path / "root"
    secret.write_text("hidden")
    root.mkdir()
    (root / "link").symlink_to(secret)
    done = python(root, f"import os; SECRET = {str(secret)!r}\ntry: {code}\nexcept OSError as e: print(e.errno)")
    assert done.said.strip() in ("2", "13"), done.said  # no such file, or not permitted
    assert secret.read_text() == "hidden"


def test_nothing_can_be_reached_over_the_network(tmp_path: Path) -> None:
    needs("network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        done = python(tmp_path, f"import socket\nsocket.create_connection({address!r}, 5)")
    assert done.code == 1
    assert "Error" in done.said


def test_other_processes_are_neither_seen_nor_signalled(tmp_path: Path) -> None:
    needs("processes")
    done = python(
        tmp_path, f"import os\nprint(os.getpid())\ntry: os.kill({os.getpid()}, 0)\nexcept OSError: print('no')"
    )
    assert done.said.split() == ["1", "no"]


def test_a_command_that_never_ends_is_ended_with_all_it_started(tmp_path: Path) -> None:
    needs("processes")
    child = "import os, time\nos.setsid()\nwhile True: open('alive', 'a').write('x'); time.sleep(0.02)"
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-S', '-c', {child!r}])\ntime.sleep(60)"
    assert python(tmp_path, code, seconds=3).code is None
    size = (tmp_path / "alive").stat().st_size
    time.sleep(0.5)
    assert size > 0
    assert (tmp_path / "alive").stat().st_size == size


def test_output_without_end_takes_neither_memory_nor_disk(tmp_path: Path) -> None:
    done = python(tmp_path, "import os\nwhile True: os.write(1, b'x' * 65536)")
    assert done.code not in (0, None)
    assert len(done.said) == 4000


def test_the_environment_is_a_path_and_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    done = python(tmp_path, "import os; print(sorted(set(os.environ) - {'LC_CTYPE'}))")
    assert done.said.strip() == "['HOME', 'PATH', 'TMPDIR']"
