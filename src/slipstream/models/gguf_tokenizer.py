"""Builds a `Tokenizer` from GGUF metadata, the keys under `tokenizer.ggml.`.

Two kinds: "gpt2" is byte-level BPE whose split into words is named by `pre`; "llama" is SentencePiece BPE, whose merges
follow from the scores of the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream.errors import CheckpointError
from slipstream.models.gguf_file import GGUFFile, StringArray

if TYPE_CHECKING:
    import tokenizers

from slipstream.models.tokenizer import Tokenizer

_AT = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"  # GPT-2
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_WORDS,),
    "smollm": (r"\p{N}", _WORDS),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
}
_WHOLE_WORDS_FIRST = {"llama-bpe"}  # a word that is a token is not merged up to
_ADD_BOS = {"llama-bpe"}
_NFC = {"qwen2"}


def tokenizer_from_gguf(file: GGUFFile, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """Raises CheckpointError where the metadata is missing, damaged or of an unsupported kind."""
    metadata = file.metadata
    kind = metadata.get(_AT + "model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{file.path}: tokenizer {ascii(kind)[:40]} is not supported; 'gpt2' and 'llama' are")
    pieces = _strings(file, "tokens")
    types = _numbers(file, "token_type", len(pieces)) or [1] * len(pieces)
    pre = metadata.get(_AT + "pre", "default")
    if kind == "gpt2" and pre not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {ascii(pre)[:40]} is not supported; supported are {', '.join(_SPLITS)}"
        )
    try:
        core = _byte_level(file, pieces, pre) if kind == "gpt2" else _sentencepiece(file, pieces, types)
        _add_special(core, pieces, types)
    except CheckpointError:
        raise
    except Exception as error:  # what the library raises has no type of its own
        detail = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file.path}: damaged tokenizer ({detail}); download it again") from error
    texts, ids = {}, {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        id = metadata.get(f"{_AT}{key}_token_id")
        if isinstance(id, int) and 0 <= id < len(pieces):
            ids[name], texts[name + "_token"] = id, pieces[id]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        core,
        byte_level=kind == "gpt2",
        strips_first_space=kind == "llama" and bool(metadata.get(_AT + "add_space_prefix", True)),
        bos_token_id=ids.get("bos"),
        adds_bos=bool(metadata.get(_AT + "add_bos_token", kind == "llama" or pre in _ADD_BOS)),
        eos_token_ids=eos_token_ids or ([ids["eos"]] if "eos" in ids else []),
        chat_template=template if isinstance(template, str) else None,
        special_texts=texts,
    )


def _strings(file: GGUFFile, key: str) -> list[str]:
    array = file.metadata.get(_AT + key)
    if not isinstance(array, StringArray):
        raise CheckpointError(
            f"{file.path}: metadata '{_AT}{key}' is missing; choose a file that carries its tokenizer"
        )
    return [text.decode("utf-8", "replace") for text in array.read()]


def _numbers(file: GGUFFile, key: str, count: int) -> list[Any] | None:
    values = file.metadata.get(_AT + key)
    if values is None:
        return None
    if not hasattr(values, "tolist") or len(values) != count:
        raise CheckpointError(f"{file.path}: metadata '{_AT}{key}' does not list {count} numbers; download it again")
    return list(values.tolist())


def _byte_level(file: GGUFFile, pieces: list[str], pre: str) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges: list[Any] = [tuple(text.split(" ", 1)) for text in _strings(file, "merges")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    if pre in _NFC:
        core.normalizer = normalizers.NFC()
    return core


def _sentencepiece(file: GGUFFile, pieces: list[str], types: list[Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models, normalizers

    scores = _numbers(file, "scores", len(pieces))
    if scores is None:
        raise CheckpointError(
            f"{file.path}: metadata '{_AT}scores' is missing; choose a file that carries its tokenizer"
        )
    vocab = {piece: i for i, piece in enumerate(pieces)}
    unknown = next((piece for piece, kind in zip(pieces, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_by_score(vocab, scores)
    core = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token=unknown, fuse_unk=True))
    spaces: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if file.metadata.get(_AT + "add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("\u2581"))
    core.normalizer = normalizers.Sequence(spaces)
    return core


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[Any]:
    """Every pair of pieces that joins to a piece, best joined score first: SentencePiece's order of merging."""
    pairs = [
        (-scores[i], i, piece[:cut], piece[cut:])
        for piece, i in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    pairs.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in pairs]


def _add_special(core: tokenizers.Tokenizer, pieces: list[str], types: list[Any]) -> None:
    from tokenizers import AddedToken

    def of(kind: int) -> list[Any]:
        texts = [piece for piece, k in zip(pieces, types, strict=True) if k == kind and piece]
        return [AddedToken(text, special=kind == _CONTROL, normalized=False) for text in texts]

    core.add_special_tokens(of(_CONTROL))
    core.add_tokens(of(_USER_DEFINED))
