"""Sessions on disk, so that a restart costs no prefill.

A file is `magic, header length, header (JSON), cache state`; the header names the model, the tokens and the SHA-256 of
the state. It is written aside, flushed and renamed, so that a crash leaves the old file or the new one. What does not
check out (another model, a torn or damaged file) is ignored and removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.engine.engine import LLM
from slipstream.engine.kv import common_prefix

MAGIC = b"SLIPKV1\n"
log = logging.getLogger("slipstream.serve")


@dataclass(frozen=True)
class Stored:
    """A file that shares `shared` leading tokens with a prompt."""

    name: str
    shared: int


def fingerprint(llm: LLM) -> str:
    """What must be equal for a cache to fit: shapes, backend, vocabulary, and a sample of the weights themselves."""
    digest = hashlib.sha256(repr((llm.spec, llm.backend.name)).encode())
    for name, tensor in sorted(getattr(llm.checkpoint, "tensors", {}).items()):
        digest.update(repr((name, tensor.format, tensor.shape)).encode())
        if len(tensor.shape) == 1:  # norms: small, and different in every training
            digest.update(tensor.float32().tobytes())
    return digest.hexdigest()


class SpillStore:
    """The files of one directory that belong to one model. limit_bytes: the oldest make room."""

    def __init__(self, folder: Path, model: str, limit_bytes: int) -> None:
        self._folder, self._model, self._limit = folder, model, limit_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._index: dict[str, list[int]] = {}
        for path in sorted(folder.glob("*.kv"), key=lambda p: p.stat().st_mtime):
            header = self._header(path)
            if header is not None:
                self._index[path.name] = header[0]
        for path in folder.glob("*.tmp"):
            path.unlink(missing_ok=True)  # a crash while writing

    def __len__(self) -> int:
        return len(self._index)

    def closest(self, tokens: Sequence[int]) -> Stored | None:
        best = None
        for name, stored in self._index.items():
            shared = min(common_prefix(stored, tokens), len(tokens) - 1)
            if best is None or shared > best.shared:
                best = Stored(name, shared)
        return best

    def save(self, tokens: list[int], state: bytes, replaces: str | None = None) -> str:
        """Write a session, in place of the file `replaces`; returns the new file's name."""
        name = f"{uuid.uuid4().hex}.kv"
        packed = array("I", tokens).tobytes()
        header = {"model": self._model, "tokens": len(tokens), "sha256": hashlib.sha256(packed + state).hexdigest()}
        text = json.dumps(header).encode()
        path = self._folder / name
        aside = path.with_suffix(".tmp")
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for part in (MAGIC, struct.pack("<I", len(text)), text, packed, state):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        self._index[name] = list(tokens)
        if replaces:
            self.remove(replaces)
        self._shrink()
        return name

    def load(self, name: str) -> tuple[list[int], bytes] | None:
        """(tokens, state), or None where the file is gone or damaged; a damaged one is removed."""
        path = self._folder / name
        header = self._header(path)
        if header is not None:
            tokens, at, sha256 = header
            with path.open("rb") as file:
                file.seek(at)
                body = file.read()
            if hashlib.sha256(body).hexdigest() == sha256:
                return tokens, body[4 * len(tokens) :]
            log.warning("session file %s is damaged; ignoring and removing it", name)
        self.remove(name)
        return None

    def remove(self, name: str) -> None:
        self._index.pop(name, None)
        (self._folder / name).unlink(missing_ok=True)

    def _header(self, path: Path) -> tuple[list[int], int, str] | None:
        """(tokens, where the body starts, its checksum), or None for a file that is no session of this model."""
        try:
            with path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise ValueError("not a session")
                (length,) = struct.unpack("<I", file.read(4))
                header = json.loads(file.read(min(length, 1 << 16)))
                if header["model"] != self._model:
                    return None  # it may still serve that other model
                tokens = array("I")
                tokens.frombytes(file.read(4 * int(header["tokens"])))
                if len(tokens) != header["tokens"]:
                    raise ValueError("cut short")
                return list(tokens), len(MAGIC) + 4 + length, str(header["sha256"])
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            log.warning("session file %s cannot be read (%s); ignoring it", path.name, error)
            return None

    def _shrink(self) -> None:
        sizes = {name: (self._folder / name).stat().st_size for name in self._index if (self._folder / name).exists()}
        for name in list(self._index):
            if sum(sizes.values()) <= self._limit or len(sizes) <= 1:
                break
            sizes.pop(name, 0)
            self.remove(name)
