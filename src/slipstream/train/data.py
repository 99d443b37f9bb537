"""Training texts: prompts from files, answered by the target through the engine, kept token for token.

A drafter learns what its target says, not what is right, so answers are always the target's own. Half are greedy and
half sampled, as both are what it will be asked to guess. A run that was cut off goes on after its last whole answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
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
from slipstream.train.ranks import ALONE, Ranks
from slipstream.train.respond import Wish

TEMPERATURES = (0.0, 0.8)
OWN_TOKENS, OWN_LEAST, OWN_HEAT = 200, 12, 0.8
"""Of a prompt by the target itself: tokens at most, characters at least, temperature."""
FIRST = 64
"""Prompts that answers of an earlier run are compared with."""

Progress = Callable[[str, int, int], None]
Writer = Callable[[Iterator[Wish]], Iterator[tuple[int, npt.NDArray[np.int32]]]]
"""Writes (index, prompt and answer) of every wish, in any order."""


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


def wishes(checkpoint: Checkpoint, prompts: Sequence[list[dict[str, Any]]], max_tokens: int,
           skip: Container[int] = (), ranks: Ranks = ALONE) -> Iterator[Wish]:  # fmt: skip
    """For every prompt of this rank that is not skipped an answer of at most `max_tokens`; even ones are greedy."""
    t = checkpoint.tokenizer
    for i, messages in enumerate(prompts):
        if i // 2 % ranks.world == ranks.rank and i not in skip:
            tokens = t.encode(t.render_chat(messages, add_generation_prompt=True))
            yield Wish(i, tokens, len(tokens) + max_tokens, TEMPERATURES[i % 2])


def own_prompts(checkpoint: Checkpoint, writer: Writer, count: int, seed: int,
                progress: Progress) -> list[list[dict[str, Any]]]:  # fmt: skip
    """Up to `count` users' turns that the target makes up itself from the beginning of one (Magpie, arXiv:2406.08464).

    Turns that do not end, or are the same as another, are left out.
    """
    t, mark = checkpoint.tokenizer, "Hi"
    before, found, after = t.render_chat([{"role": "user", "content": mark}]).partition(mark)
    if not (found and after):
        raise RequestError("the chat template hides where a user's turn begins; give --data alone")
    start, turns = t.encode(before), set[str]()
    for done, (_, tokens) in enumerate(
        writer(Wish(i, start, len(start) + OWN_TOKENS, OWN_HEAT) for i in range(count)), 1
    ):
        if tokens[-1] in t.eos_token_ids:
            turns.add(t.decode(tokens[len(start) : -1].tolist()).strip())
        if done % 256 == 0 or done == count:
            progress("prompts of its own", done, count)
    kept = sorted(turn for turn in turns if len(turn) >= OWN_LEAST)
    np.random.default_rng(seed).shuffle(kept)
    return [[{"role": "user", "content": turn}] for turn in kept]


def answer(checkpoint: Checkpoint, writer: Writer, prompts: Sequence[list[dict[str, Any]]], folder: Path,
           max_tokens: int, ranks: Ranks, progress: Progress) -> list[Text]:  # fmt: skip
    """The target's answers, of at most `max_tokens` each, in the order of the prompts; kept in `folder` as they come.

    Raises RequestError where answers in it are to other prompts.
    """
    file = folder / (f"responses.{ranks.rank}.jsonl" if ranks.rank else "responses.jsonl")
    _end_with_a_line(file)
    ranks.wait()
    texts = _kept(folder)
    ranks.wait()
    for wish in wishes(checkpoint, prompts[:FIRST], max_tokens):
        if wish.index in texts and texts[wish.index].tokens[: len(wish.tokens)].tolist() != wish.tokens:
            raise RequestError(f"{folder} holds answers to other prompts; choose another --out")
    asked: dict[int, int] = {}  # tokens of a prompt

    def noted() -> Iterator[Wish]:
        for wish in wishes(checkpoint, prompts, max_tokens, texts, ranks):
            asked[wish.index] = len(wish.tokens)
            yield wish

    with file.open("a", encoding="utf-8") as out:
        for index, tokens in writer(noted()):
            texts[index] = Text(tokens, asked[index])
            row = {"index": index, "tokens": tokens.tolist(), "prompt": asked[index]}
            out.write(json.dumps(row, separators=(",", ":")) + "\n")
            if len(texts) % 64 == 0 or len(texts) == len(prompts):
                out.flush()
                progress("answers", len(texts), len(prompts))
    if ranks.world > 1:
        ranks.wait()
        texts = _kept(folder)
    return [texts[i] for i in range(len(prompts))]


def engine_writer(checkpoint: Checkpoint, backend: str) -> Writer:
    """Answers by the engine, one text at a time."""

    def write(wishes: Iterator[Wish]) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
        with LLM(checkpoint, backend=backend) as llm:
            for wish in wishes:
                params = SamplingParams(max_tokens=wish.most - len(wish.tokens), temperature=wish.temperature,
                                        seed=wish.index)  # fmt: skip
                said = llm.generate(wish.tokens, params).token_ids
                yield wish.index, np.array([*wish.tokens, *said], np.int32)

    return write


def _end_with_a_line(file: Path) -> None:
    """Half a line that a run left at the end of `file` is removed."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not text.endswith("\n"):
        file.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


def _kept(folder: Path) -> dict[int, Text]:
    """Answers of all ranks so far, by their prompt's index."""
    lines = [line for file in folder.glob("responses*.jsonl") for line in file.read_text(encoding="utf-8").splitlines()]
    rows = map(json.loads, lines)
    return {row["index"]: Text(np.array(row["tokens"], np.int32), row["prompt"]) for row in rows}


def draft_vocabulary(texts: Sequence[Text], size: int, vocab: int) -> npt.NDArray[np.int32]:
    """The `size` tokens that answers use most, ascending; filled up from the lowest ids."""
    counts = Counter[int]()
    for text in texts:
        counts.update(text.tokens[text.prompt :].tolist())
    chosen = [token for token, _ in counts.most_common(size)]
    seen = set(chosen)
    chosen += [token for token in range(vocab) if token not in seen][: max(0, size - len(chosen))]
    return np.sort(np.array(chosen[: min(size, vocab)], np.int32))
