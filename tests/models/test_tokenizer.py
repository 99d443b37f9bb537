"""Encoding and decoding lose nothing, whole or token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, EOS, SPECIALS, write_tiny_checkpoint, write_tiny_gguf

from slipstream.errors import CheckpointError, RequestError
from slipstream.models.checkpoint import BUILT_IN, list_models, load_checkpoint
from slipstream.models.tokenizer import StreamDecoder, Tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SMOLLM2_LACKS = dict.fromkeys([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, *range(0x40000, 0xC0000)])
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return load_checkpoint(tiny_checkpoint).tokenizer


@pytest.fixture(scope="module")
def built_in() -> Tokenizer:
    if list_models()[0].path is None:
        pytest.skip("the built-in weights are not installed")
    return load_checkpoint(BUILT_IN).tokenizer


@settings(deadline=None)
@given(
    text=TEXTS | st.sampled_from(["\x00", "a\x00b", "\ufeff", "\r\n \t", EOS, f"x{EOS}y", "e\u0301"]),
    special=st.booleans(),
)
def test_decode_inverts_encode(tokenizer: Tokenizer, built_in: Tokenizer, text: str, special: bool) -> None:
    assert tokenizer.decode(tokenizer.encode(text, special=special)) == text
    text = text.translate(SMOLLM2_LACKS)
    assert built_in.decode(built_in.encode(text, special=special)) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 300)), cuts=st.lists(st.integers(1, 5)))
def test_stream_equals_decode_of_all(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    stream, text, at = StreamDecoder(tokenizer), "", 0
    for cut in [*cuts, *[1] * len(ids)]:
        text += stream.push(ids[at : at + cut])
        at += cut
    assert text + stream.flush() == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=TEXTS)
def test_stream_never_emits_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push([id]) for id in tokenizer.encode(text.replace("\ufffd", ""))]
    assert "\ufffd" not in "".join(pieces)
    assert stream.flush() == ""


def test_a_cut_off_character_is_not_lost(tokenizer: Tokenizer) -> None:
    stream = StreamDecoder(tokenizer)
    ids = tokenizer.encode("é")
    assert stream.push(ids[:1]) == ""
    assert stream.flush() == "\ufffd"


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer.json as Llama 2 and Mistral have it: spaces made visible, one put first, bytes as a fallback."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "t", "h", "e", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    core = Core(models.BPE({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    core.add_special_tokens(["<s>", "</s>"])
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("spm"))
    core.save(str(path / "tokenizer.json"))
    return load_checkpoint(path).tokenizer


@settings(deadline=None)
@given(text=TEXTS.filter(lambda text: "▁" not in text) | st.sampled_from(["the  the", " the", "  ", "", "thé"]))
def test_sentencepiece_loses_nothing_either(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    stream = StreamDecoder(sentencepiece)
    assert sentencepiece.decode(ids) == text
    assert "".join(stream.push([id]) for id in ids) + stream.flush() == text


def test_special_tokens_are_plain_text_on_request(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(EOS)) == 1
    assert len(tokenizer.encode(EOS, special=False)) > 1


def test_a_lone_surrogate_is_refused_by_position(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D800\) at position 3"):
        tokenizer.encode("abc\ud800")


def test_ids_outside_the_vocabulary_stand_for_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_bytes(2**40) == b""


def test_gguf_and_directory_tokenize_alike(tmp_path: Path) -> None:
    directory = load_checkpoint(write_tiny_checkpoint(tmp_path / "d")).tokenizer
    gguf = load_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", pre="gpt-2")).tokenizer
    text = f"the inner then 12 {EOS} café's\n"
    assert gguf.encode(text) == directory.encode(text)
    assert gguf.vocab_size == directory.vocab_size
    assert gguf.eos_token_ids[:1] == directory.eos_token_ids
    assert gguf.bos_token_id == directory.bos_token_id
    assert gguf.chat_template == directory.chat_template == CHAT_TEMPLATE


def test_chat_ends_where_the_assistant_begins(tokenizer: Tokenizer) -> None:
    start = SPECIALS[1]
    assert tokenizer.render_chat(MESSAGES) == f"{start}user\nhi{EOS}\n{start}assistant\n"
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False) == f"{start}user\nhi{EOS}\n"


def test_no_template_and_no_tokenizer_are_named(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path)
    (path / "tokenizer_config.json").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        load_checkpoint(path).tokenizer.render_chat(MESSAGES)
    (path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        _ = load_checkpoint(path).tokenizer
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        _ = load_checkpoint(path).tokenizer


def test_a_template_file_comes_before_the_config(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path)
    (path / "chat_template.jinja").write_text("{{ eos_token }}{{ extra }}")
    assert load_checkpoint(path).tokenizer.render_chat(MESSAGES, extra=1) == EOS + "1"


def test_an_unknown_pre_tokenizer_names_the_known(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", pre="martian"))
    with pytest.raises(CheckpointError, match=r"'martian' is not supported; supported are default, gpt-2, smollm"):
        _ = checkpoint.tokenizer
