"""Runs a command that nobody trusts much: on Linux with what any user may ask of the kernel, elsewhere with less.

    sandbox.run -> this file as a program, in a process of its own -> limits, namespaces, Landlock -> command

    limits       processor time, memory, size and number of open files; the caller keeps the wall clock
    network      a network namespace without any link, or Landlock without TCP
    processes    a process namespace: it sees and signals none but its own, and all of them end with it
    files        Landlock: it opens its own directory, the interpreter and the system's libraries, and nothing else

What a kernel does not offer is left out, and `protections` says what holds. Not guarded: bugs of the kernel, the names
and sizes of other files, the number of files in its directory, memory of many processes together. The program imports
the standard library alone, so that it starts fast and the command's interpreter need see nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
OPEN_FILES = 64
PYTHON = os.path.realpath(sys.executable)
"""The interpreter itself, not the link to it in a virtual environment, which the command need not see."""


@dataclass(frozen=True)
class Outcome:
    """code: None where time ran out. said: the end of what it wrote, standard error included."""

    code: int | None
    said: str


def run(root: Path, command: Sequence[str], *, seconds: int, chars: int = 4000) -> Outcome:
    """Run `command` in the directory `root`, with an environment that holds a path and that directory alone."""
    with tempfile.TemporaryFile() as output:  # a file, whose size is limited; a pipe's reader would take it all
        process = subprocess.Popen(
            [PYTHON, "-I", "-S", __file__, str(seconds), str(root), *command],
            cwd=root,
            env={"PATH": os.defpath, "HOME": str(root), "TMPDIR": str(root)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - 4 * chars))
        return Outcome(code, output.read().decode("utf-8", "replace")[-chars:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever the command started ends with it."""
    if os.name == "posix":
        with suppress(ProcessLookupError):  # all gone already
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


@cache
def protections() -> tuple[str, ...]:
    """Which of limits, network, processes and files hold on this machine."""
    with tempfile.TemporaryDirectory() as root:
        return tuple(json.loads(run(Path(root).resolve(), ["--protections"], seconds=20).said))


# ---- the program: everything below runs in the new process ----

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many rights to files each version of Landlock knows; 16 from the fifth on."""


def main(seconds: str, root: str, *command: str) -> int:
    held = _limit(int(seconds))
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    spaces = libc is not None and _leave_namespaces(libc)
    if not spaces:
        held += _lock(libc, root) if libc else []
        return _become(command, held)
    held += ["network", "processes"]
    child = os.fork()  # a process namespace begins with the first child
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status if status >= 0 else 128 - status
    assert libc is not None
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return _become(command, sorted({*held, *_lock(libc, root)}))


def _become(command: Sequence[str], held: list[str]) -> int:
    if command[0] == "--protections":
        print(json.dumps(sorted(set(held))))
        return 0
    sys.stdout.flush()
    os.execv(command[0], list(command))


def _limit(seconds: int) -> list[str]:
    try:
        import resource
    except ImportError:  # Windows
        return []
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # a lower limit stands already
            resource.setrlimit(what, (most, most))
    return ["limits"]


def _leave_namespaces(libc: ctypes.CDLL) -> bool:
    """Whether an ordinary user may here leave the machine's network and processes behind; then it has.

    A child tries first: some systems let a process in and then give it nothing there, and there is no way back.
    """
    probe = os.fork()
    if not probe:
        os._exit(not _enter_namespaces(libc))
    return os.waitpid(probe, 0)[1] == 0 and _enter_namespaces(libc)


def _enter_namespaces(libc: ctypes.CDLL) -> bool:
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC):
        return False
    # Inside it is nobody, so that exec drops the rights that came with the namespace.
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
        try:
            Path(f"/proc/self/{name}").write_text(text)
        except OSError:
            return False
    return True


def _lock(libc: ctypes.CDLL, root: str) -> list[str]:
    """Landlock (Linux 5.13): what was not allowed by path is refused from here on, for all that follows."""
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1 or libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return []
    everything = (1 << RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("QQQ", everything, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint(0))
    if rules < 0:
        return []
    reading = EXECUTE | READ_FILE | READ_DIR
    system = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/nix", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")
    allowed = {path: reading for path in (*system, os.path.realpath(sys.base_prefix), PYTHON)}
    allowed |= {"/dev/null": READ_FILE | WRITE_FILE | TRUNCATE, root: everything}
    for path, rights in allowed.items():
        with suppress(OSError):  # not every system has all of them
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if not os.path.isdir(path):
                rights &= EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE
            rule = struct.pack("=Qi", rights & everything, place)
            if libc.syscall(ADD_RULE, rules, ctypes.c_int(1), rule, ctypes.c_uint(0)):
                return []
            os.close(place)
    if libc.syscall(RESTRICT_SELF, rules, ctypes.c_uint(0)):
        return []
    return ["files", "network"] if version >= 4 else ["files"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
