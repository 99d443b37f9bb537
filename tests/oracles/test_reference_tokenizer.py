"""Token ids against llama.cpp (where it is installed) and transformers, on text that splits in every awkward way."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.models.checkpoint import BUILT_IN, list_models, load_checkpoint
from slipstream.models.gguf_file import read_gguf
from slipstream.models.gguf_tokenizer import tokenizer_from_gguf
from slipstream.models.tokenizer import Tokenizer

SAMPLES = (
    "Hello, world! It's 2024; they'll say I'VE 1234567 things.",
    "def f(x):\n\treturn {'a': x ** 2}   # ok\r\n\r\n    pass\n\n\n",
    "naïve café ÜBER straße Ⅷ ½ ² ٣٤ हिन्दी 你好,世界 こんにちは 한국어 🙂👩‍👩‍👧 e\u0301",
    "   leading, trailing   ",
    " ",
    "a\u00a0b\u2003c\u200bd\x00e\x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>",
    "$100+20%=~^|`<>[]{}()!!??...---___***",
    "http://example.com/a?b=c&d=e#f foo_bar FooBar x1y2z3 3.14e-10",
)
PRES = ("smollm", "gpt-2", "llama-bpe", "default", "qwen2")


class Pair:
    """Our tokenizer and llama.cpp's for one file."""

    def __init__(self, path: Path, pre: str = "") -> None:
        self.form = "NFC" if pre == "qwen2" else None  # the official tokenizer composes characters, llama.cpp does not
        llama_cpp = pytest.importorskip("llama_cpp")
        self.ours: Tokenizer = tokenizer_from_gguf(read_gguf(path))
        self.theirs: Any = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    def check(self, text: str) -> None:
        for special in (True, False):
            composed = unicodedata.normalize(self.form, text) if self.form else text
            theirs = self.theirs.tokenize(composed.encode(), add_bos=False, special=special)
            assert self.ours.encode(text, special=special) == theirs, (text, special)


def write_vocabulary(path: Path, changes: dict[str, Any]) -> Path:
    """The built-in model's vocabulary as a GGUF file without tensors, some metadata changed."""
    from gguf import GGUFWriter

    if list_models()[0].path is None:
        pytest.skip("the built-in weights are not installed")
    metadata = load_checkpoint(BUILT_IN).gguf.metadata
    texts = {key: [t.decode() for t in metadata[f"tokenizer.ggml.{key}"].read()] for key in ("tokens", "merges")}
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": texts["tokens"],
        "token_type": metadata["tokenizer.ggml.token_type"].tolist(),
        "merges": texts["merges"],
        "eos_token_id": 2,
        "bos_token_id": 1,
        "add_bos_token": False,
    } | changes
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(values["model"])
    writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(values["tokens"])
    writer.add_token_types(values["token_type"])
    if values["merges"]:
        writer.add_token_merges(values["merges"])
    if "scores" in values:
        writer.add_token_scores(values["scores"])
    writer.add_eos_token_id(values["eos_token_id"])
    writer.add_bos_token_id(values["bos_token_id"])
    writer.add_add_bos_token(values["add_bos_token"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=PRES)
def byte_level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(write_vocabulary(tmp_path_factory.mktemp("pre") / "v.gguf", {"pre": request.param}), request.param)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Pieces a trainer might have found, scored by their length and rank as SentencePiece BPE does."""
    words = "▁the ▁a ▁in ▁is er on th he in an ▁t ▁s ▁w ll ing ▁He ▁Hell llo ▁Hello ▁▁ ▁▁▁▁ 00 10 12 ▁w or ld é ▁"
    pieces = list(dict.fromkeys([*words.split(" "), *map(chr, range(33, 127))]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    changes = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "merges": [],
    }
    return Pair(write_vocabulary(tmp_path_factory.mktemp("spm") / "v.gguf", changes))


@pytest.mark.parametrize("text", SAMPLES)
def test_byte_level_ids_equal_llama_cpp(byte_level: Pair, text: str) -> None:
    byte_level.check(text)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cs", "Cn"]), max_size=40))
def test_any_text_has_the_ids_of_llama_cpp(byte_level: Pair, text: str) -> None:
    byte_level.check(text)


@pytest.mark.parametrize("text", [*SAMPLES, "</s>Hello</s> the"])
def test_sentencepiece_ids_equal_llama_cpp(sentencepiece: Pair, text: str) -> None:
    sentencepiece.check(text)


@pytest.mark.parametrize("text", SAMPLES)
def test_directory_ids_equal_transformers(tiny_checkpoint: Path, text: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tiny_checkpoint / "tokenizer.json"))
    assert load_checkpoint(tiny_checkpoint).tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_chat_equals_transformers(tiny_checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert load_checkpoint(tiny_checkpoint).tokenizer.render_chat(messages) == expected
