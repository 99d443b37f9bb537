"""Training texts: prompts from files, answered by the target through the engine, kept token for token.

A drafter learns what its target says, not what is right, so answers are always the target's own. Half are greedy and
half sampled, as both are what it will be asked to guess. A run that was cut off goes on after its last whole answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.engine.engine import LLM
from slipstream.engine.request import SamplingParams
from slipstream.engine.session import user_message
from slipstream.errors import RequestError
from slipstream.models.checkpoint import Checkpoint

TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Text:
    """tokens (n,) int32: a prompt of `prompt` tokens and its answer."""

    tokens: npt.NDArray[np.int32]
    prompt: int


def read_prompts(path: Path) -> list[list[dict[str, Any]]]:
    """Conversations of a JSON Lines file: `messages`, or the text of a user's turn as `prompt` or `question`.

    Raises RequestError, with the line, for what is none of these.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # other line breaks may stand within JSON
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: {error}; --data is a JSON Lines file of prompts") from error
    found: list[list[dict[str, Any]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RequestError(f"{path}, line {number}: not JSON: {error.msg}") from error
        row = row if isinstance(row, dict) else {}
        text = row.get("prompt") or row.get("question")
        messages = row.get("messages") or ([dict(m) for m in user_message(text)] if isinstance(text, str) else None)
        if not (isinstance(messages, list) and all(isinstance(m, dict) and "content" in m for m in messages)):
            raise RequestError(f"{path}, line {number}: needs messages, or a text as prompt or question")
        found.append(messages)
    if not found:
        raise RequestError(f"{path}: no prompts in it")
    return found


def answer(checkpoint: Checkpoint, backend: str, prompts: Sequence[list[dict[str, Any]]], file: Path, max_tokens: int,
           progress: Callable[[str, int, int], None]) -> list[Text]:  # fmt: skip
    """The target's answers, of at most `max_tokens` each, appended to `file` as they come; those in it are kept.

    Raises RequestError where those are answers to other prompts.
    """
    texts = _kept(file)[: len(prompts)]
    t = checkpoint.tokenizer
    for text, messages in zip(texts, prompts, strict=False):
        if text.tokens[: text.prompt].tolist() != t.encode(t.render_chat(messages, add_generation_prompt=True)):
            raise RequestError(f"{file} holds answers to other prompts; choose another --out")
    if len(texts) == len(prompts):
        return texts
    with LLM(checkpoint, backend=backend) as llm, file.open("a", encoding="utf-8") as out:
        for i in range(len(texts), len(prompts)):
            tokens = llm.chat_tokens(prompts[i])
            params = SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURES[i % 2], seed=i)
            said = llm.generate(tokens, params).token_ids
            out.write(json.dumps({"tokens": [*tokens, *said], "prompt": len(tokens)}) + "\n")
            out.flush()
            texts.append(Text(np.array([*tokens, *said], np.int32), len(tokens)))
            progress("answers", i + 1, len(prompts))
    return texts


def _kept(file: Path) -> list[Text]:
    """Whole lines of an earlier run; half a line at the end is removed."""
    if not file.is_file():
        return []
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0]
    file.write_text(whole + "\n" if whole else "", encoding="utf-8")
    rows = [json.loads(line) for line in whole.splitlines()]
    return [Text(np.array(row["tokens"], np.int32), row["prompt"]) for row in rows]


def draft_vocabulary(texts: Sequence[Text], size: int, vocab: int) -> npt.NDArray[np.int32]:
    """The `size` tokens that answers use most, ascending; filled up from the lowest ids."""
    counts = Counter[int]()
    for text in texts:
        counts.update(text.tokens[text.prompt :].tolist())
    chosen = [token for token, _ in counts.most_common(size)]
    seen = set(chosen)
    chosen += [token for token in range(vocab) if token not in seen][: max(0, size - len(chosen))]
    return np.sort(np.array(chosen[: min(size, vocab)], np.int32))
