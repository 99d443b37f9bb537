"""Text to token ids and back, exactly: `Tokenizer`, and `StreamDecoder` for text that arrives token by token.

Decoding joins the bytes of the tokens and reads them as UTF-8, so it is the same one token at a time or all at once.
Building the vocabulary from GGUF metadata is `gguf_tokenizer`'s job, rendering messages `chat_template`'s.
"""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import CheckpointError, RequestError
from slipstream.models.safetensors_file import read_json

if TYPE_CHECKING:
    import tokenizers

    from slipstream.models.chat_template import ChatTemplate

_SPACE = "\u2581"  # SentencePiece's visible space


def byte_alphabet() -> dict[int, int]:
    """GPT-2's printable code point of each byte -> that byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


class Tokenizer:
    """A vocabulary with its special tokens and chat template.

    bos_token_id: None where the model has none. adds_bos: whether plain text is meant to start with it.
    eos_token_ids: tokens that end a text. chat_template: Jinja source, None where the model has none.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        byte_level: bool,
        strips_first_space: bool = False,
        bos_token_id: int | None = None,
        adds_bos: bool = False,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        special_texts: Mapping[str, str] | None = None,
    ) -> None:
        """byte_level: tokens are written in GPT-2's byte alphabet; otherwise they are SentencePiece pieces.

        strips_first_space: encoding put a space before the text, decoding takes it away. special_texts: what
        `bos_token`, `eos_token` and their like are in the chat template.
        """
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._byte_level = byte_level
        self.strips_first_space = strips_first_space
        self.bos_token_id = bos_token_id
        self.adds_bos = adds_bos
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self._special_texts = dict(special_texts or {})
        added = core.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._lock = threading.Lock()  # the core's switch for special tokens is shared
        self.vocab_size = core.get_vocab_size()

    def encode(self, text: str, special: bool = True, bos: bool = False) -> list[int]:
        """The ids of `text`. special: names of special tokens in it become those tokens; otherwise they are plain text.

        bos: start with the beginning-of-text token where `adds_bos`. A byte that the vocabulary lacks (SmolLM2 has no
        U+0004) is left out, as the model's own tokenizer does. Raises RequestError at a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text has a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}, "
                "which no encoding can carry; remove it"
            ) from None
        with self._lock:
            self._core.encode_special_tokens = not special
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        if bos and self.adds_bos and self.bos_token_id is not None:
            ids = [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens by their names; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one token stands for; none for an id outside the vocabulary."""
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._spell(id)
        return known

    def _spell(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode("utf-8", "replace")
        text = self._core.id_to_token(id) if 0 <= id < 2**32 else None
        if text is None:
            return b""
        if self._byte_level:
            return b"".join(
                bytes((_ALPHABET[ord(char)],)) if ord(char) in _ALPHABET else char.encode("utf-8", "replace")
                for char in text
            )
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace(_SPACE, " ").encode("utf-8", "replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The text of a conversation by the model's own template; `kwargs` are variables of the template.

        messages: mappings with `role` and `content`. Raises RequestError where the template refuses them or there is
        no template, CheckpointError where the template itself is broken.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template; generate from a plain prompt instead")
        variables = self._special_texts | {"messages": [dict(message) for message in messages]} | kwargs
        return self._template.render(variables | {"add_generation_prompt": add_generation_prompt})

    @cached_property
    def _template(self) -> ChatTemplate:
        from slipstream.models.chat_template import ChatTemplate  # Jinja takes a while to import

        return ChatTemplate(self.chat_template or "")


class StreamDecoder:
    """Text of one stream of tokens. All pushes and the flush together equal `Tokenizer.decode` of all ids.

    A character whose bytes are split over tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete, perhaps none yet."""
        return self._stripped(self._utf8.decode(b"".join(map(self._token_bytes, ids))))

    def flush(self) -> str:
        """What is still held back, as U+FFFD; the stream has ended."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def load_tokenizer(path: Path, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError: missing, damaged or unsupported."""
    from tokenizers import Tokenizer as Core

    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; download the checkpoint's tokenizer.json too")
    try:
        core = Core.from_file(str(file))
    except Exception as error:  # what the library raises has no type of its own
        detail = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file}: not a tokenizer ({detail}); download it again") from error
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    steps = _steps(core.decoder)
    kinds = {step.get("type") for step in steps}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise CheckpointError(f"{file}: this kind of tokenizer is not supported; byte-level and SentencePiece BPE are")
    texts = {
        key: text for key in ("bos_token", "eos_token", "unk_token", "pad_token") if (text := _text(settings.get(key)))
    }
    bos, eos = (core.token_to_id(texts[key]) if key in texts else None for key in ("bos_token", "eos_token"))
    return Tokenizer(
        core,
        byte_level="ByteLevel" in kinds,
        strips_first_space=any(
            (step["type"] == "Strip" and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        ),
        bos_token_id=bos,
        adds_bos=bos is not None and core.encode("").ids[:1] == [bos],
        eos_token_ids=eos_token_ids or ([] if eos is None else [eos]),
        chat_template=_directory_template(path, settings),
        special_texts=texts,
    )


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """A decoder's steps as the JSON objects of tokenizer.json."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    return list(state.get("decoders", [state] if state else []))


def _text(token: Any) -> str | None:
    """A token of tokenizer_config.json, which is text or an object around it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _directory_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or the entry of tokenizer_config.json: text, or a list with one named default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8", "replace")
    entry = settings.get("chat_template")
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None
