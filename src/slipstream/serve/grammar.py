"""Answers that keep to a grammar, by llguidance: a mask over each row's logits, and a filter for drafts.

The mask is applied to the row of every draft in order, so that grammar and speculation do not know of each other: an
accepted draft was the choice under the mask.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from slipstream.backends.base import FloatArray
from slipstream.engine.engine import LLM
from slipstream.serve.errors import invalid

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to space JSON: small models otherwise fill answers with blank lines."""


class _Vocabulary:
    """The tokens as llguidance wants to see them."""

    def __init__(self, llm: LLM) -> None:
        tokenizer = llm.tokenizer
        self._encode = tokenizer.encode
        special = set(getattr(tokenizer, "special_ids", ())) | set(llm.eos_token_ids)
        self.tokens = [self._bytes(tokenizer.token_bytes(i), i in special) for i in range(llm.spec.vocab)]
        self.special_token_ids = sorted(special)
        self.eos_token_id = llm.eos_token_ids[0]
        self.bos_token_id = None

    @staticmethod
    def _bytes(text: bytes, special: bool) -> bytes:
        return text or b"<unused>" if special else text

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._encode(text, special=False)


class GrammarCompiler:
    """Compiles grammars for one model; made once, as it reads the whole vocabulary."""

    def __init__(self, llm: LLM) -> None:
        self._token_bytes, self._encode = llm.tokenizer.token_bytes, llm.tokenizer.encode
        self._vocab = llm.spec.vocab
        self._eos = tuple(llm.eos_token_ids)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(llm)), n_vocab=llm.spec.vocab, eos_token=list(self._eos), slices=[]
        )

    def lark(self, source: str, param: str, after: str = "", trigger: str = "") -> Grammar:
        """A grammar in llguidance's Lark dialect. Raises ApiError 400 naming `param` where it cannot be compiled.

        after: text that the answer must reach before the grammar holds, such as the end of a thought.
        trigger: text after each occurrence of which the grammar holds until it is complete; the rest is free.
        """
        grammar = LLMatcher.grammar_from_lark(source)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()  # a grammar without a first token is told now
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split(" 1 | ")[0].split())  # without the grammar, which is ours
            raise invalid(f"the schema cannot be compiled: {reason[:300]}", param, "invalid_schema")
        return Grammar(matcher, self._vocab, self._eos, after, self._token_bytes, trigger, self._encode)


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """`schema` as an expression of a Lark grammar."""
    styled = {"x-guidance": JSON_STYLE} | dict(schema) if isinstance(schema, Mapping) else {"x-guidance": JSON_STYLE}
    return "%json " + json.dumps(styled)


def check_schema(schema: Any, depth: int, size: int, param: str) -> None:
    """Raises ApiError 400 where a schema is too large, too deep, or no object."""
    if not isinstance(schema, Mapping):
        raise invalid("the schema must be a JSON object", param, "invalid_schema")
    if len(json.dumps(schema)) > size:
        raise invalid(f"the schema is longer than {size} bytes", param, "invalid_schema")
    level: list[Any] = [schema]
    for _ in range(depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ())
            if isinstance(child, Mapping | list)
        ]
        if not level:
            return
    raise invalid(f"the schema is nested deeper than {depth} levels", param, "invalid_schema")


class Grammar:
    """One answer's state: a `LogitMask`, and the filter of its drafts. It holds at once, or as `lark` says."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab: int,
        eos: Sequence[int],
        after: str,
        token_bytes: Callable[[int], bytes],
        trigger: str,
        encode: Callable[[str], list[int]],
    ) -> None:
        self._made = (vocab, eos, after, token_bytes, trigger, encode)
        self._start, self._eos, self._token_bytes, self._encode = matcher, list(eos), token_bytes, encode
        self._after, self._trigger = after.encode(), trigger.encode()
        self._matcher: LLMatcher | None = None if after or trigger else matcher.deep_copy()
        self._mask = np.zeros((vocab + 31) // 32, np.int32)
        self._output: Sequence[int] = ()
        self._consumed = 0
        self._text = b""

    def fresh(self) -> Grammar:
        """The same grammar for another answer."""
        return Grammar(self._start, *self._made)

    def __call__(self, output: Sequence[int], row: FloatArray) -> None:
        self._output = output
        self._catch_up()
        if self._matcher is None:
            if not self._trigger:
                row[self._eos] = -np.inf
        elif self._matcher.is_stopped():  # complete, or broken by a limit of its own: the answer ends
            keep = row[self._eos].copy()
            row[:] = -np.inf
            row[self._eos] = np.where(np.isfinite(keep), keep, 0.0)
        else:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: len(row)]
            row[allowed == 0] = -np.inf

    def allowed(self, drafts: Sequence[int]) -> int:
        self._catch_up()
        if self._matcher is None:
            return len(drafts)
        return 0 if self._matcher.is_stopped() else int(self._matcher.validate_tokens(list(drafts)))

    def _catch_up(self) -> None:
        while self._consumed < len(self._output):
            token = self._output[self._consumed]
            self._consumed += 1
            if self._matcher is None:
                self._await(self._token_bytes(token))
            elif not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                if self._trigger and self._matcher.is_stopped() and not self._matcher.is_error():
                    self._matcher = None  # that call is complete

    def _await(self, text: bytes) -> None:
        """Look for what the grammar waits for in the text so far."""
        self._text = (self._text + text)[-4096:]
        if self._after:
            _, found, rest = self._text.partition(self._after)
            if not found:
                return
            self._after, self._text = b"", rest
            if not self._trigger:
                self._matcher, self._text = self._start.deep_copy(), b""
                return
        _, found, rest = self._text.partition(self._trigger)
        if found:
            self._matcher, self._text = self._start.deep_copy(), b""
            for token in self._encode(rest.decode("utf-8", "replace")) if rest else ():
                self._matcher.consume_token(token)  # what the trigger's last token brought along
