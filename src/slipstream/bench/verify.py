"""The exactness gate: speculation, prefill chunks, reused prefixes and repetition must not change one token.

`verify` decodes 20 prompts, greedy and sampled, plainly and in every other way the engine can, and compares token ids;
it compares the bits of logits where rows or chunks differ; and it tests the sampled distribution against the softmax.

A backend that is not row-invariant stands on library matrix products whose last bits change with the shape. It is held
to the drafter part alone, on few prompts: there, equal tokens show that the engine is right, while a mismatch may be a
tie that such a bit has turned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product

import numpy as np

from slipstream.backends.base import MAX_DRAFTS, Backend, DeviceRounds, FloatArray, NativeSampler
from slipstream.bench.workloads import CHAT, CODE
from slipstream.drafters import Drafter
from slipstream.drafters.base import Guess, Guided
from slipstream.drafters.block import BlockDrafter, Free
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.drafters.testing import ScriptedDrafter
from slipstream.engine.engine import LLM
from slipstream.engine.request import Completion, SamplingParams
from slipstream.engine.sampling import gumbel, keep, sample
from slipstream.engine.session import Session

DRAFTS = (1, 3, 7)
CHUNKS = (1, 7, 128, None)
LONG_PROMPT = 2_000
DRAWS = 50_000

COPY = (
    "Repeat this twice: The ferry leaves at nine, the bus at ten, the ferry returns at five, the bus at six.",
    "Write this list backwards, then as it is: amber, birch, cedar, dogwood, elm, fir, ginkgo, hazel, ivy, juniper.",
    "Correct the one misspelt word and repeat the rest: A slow river carrys silt, a fast river carries stones.",
)
UNICODE = (
    "Übersetze ins Englische: Der Zug fährt über die Brücke, während es schneit. ❄️🚆",
    "次の文を短くしてください。春の朝、川辺の桜が満開で、人々が写真を撮っていた。",
    "Объясни, почему зимой дни короче, чем летом. Ответь в двух предложениях.",
    "Which of these is one character: \U0001f469\u200d\U0001f469\u200d\U0001f467, e\u0301, \u00e9, \ufdfd? \x00",
)


@dataclass(frozen=True)
class Check:
    """One line of the gate's verdict. detail: what was compared, or the first difference."""

    name: str
    passed: bool
    detail: str


class Tally:
    """Comparisons of one kind. What was never compared has not passed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.compared = 0
        self.failures: list[str] = []
        self.note = ""

    def same(self, where: str, got: Sequence[int], expected: Sequence[int]) -> None:
        self.compared += 1
        if list(got) != list(expected):
            pairs = enumerate(zip(got, expected, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
            self.failures.append(f"{where}: token {at} is {got[at : at + 1]}, not {expected[at : at + 1]}")

    def same_bits(self, where: str, got: FloatArray, expected: FloatArray) -> None:
        """Two arrays of logits (rows, vocab)."""
        self.compared += len(got)
        differs = (got.view(np.uint32) != expected.view(np.uint32)).any(axis=1)
        if differs.any():
            row = int(differs.argmax())
            off = float(np.abs(got[row] - expected[row]).max())
            self.failures.append(f"{where}: logits of row {row} differ by up to {off:.2g}")

    def holds(self, where: str, ok: bool, what: str) -> None:
        self.compared += 1
        if not ok:
            self.failures.append(f"{where}: {what}")

    def check(self, unit: str = "decodes") -> Check:
        passed = bool(self.compared) and not self.failures
        detail = f"{self.compared} {unit} equal{self.note}"
        if self.failures:
            detail = f"{len(self.failures)} of {self.compared} differ; {self.failures[0]}"
        return Check(self.name, passed, detail if self.compared else "nothing was compared")


@dataclass(frozen=True)
class Text:
    """A prompt of the gate."""

    name: str
    tokens: list[int]


class Switch:
    """Lends one session, and so one prefilled cache, to several drafters in turn."""

    name = "switch"

    def __init__(self) -> None:
        self.inner: Drafter = NoDrafter()
        self.drafts = 0

    def attach(self, guess: Guess) -> None:
        if isinstance(self.inner, Guided):
            self.inner.attach(guess)

    def begin(self, tokens: Sequence[int]) -> None:
        self.inner.begin(tokens)

    def propose(self, limit: int) -> Sequence[int]:
        return self.inner.propose(min(limit, self.drafts))

    def observe(self, committed: Sequence[int], drafted: int, accepted: int) -> None:
        self.inner.observe(committed, drafted, accepted)


def verify(
    model: str | os.PathLike[str] | LLM,
    *,
    backend: str = "auto",
    drafter: str = "auto",
    threads: int | None = None,
    weights: str = "auto",
    quick: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Check]:
    """Every check, passed or not. quick: four prompts and fewer modes. progress: told what comes next.

    drafter: `auto` includes the model's block drafter, or the folder of one; drafters without weights always run.

    Raises SlipstreamError where the model cannot be loaded.
    """
    if not isinstance(model, LLM):
        with LLM(model, backend=backend, drafter=drafter, threads=threads, weights=weights) as llm:
            return verify(llm, quick=quick, progress=progress)
    llm = model
    invariant = llm.backend.row_invariant
    texts = list(_texts(llm))
    if quick or not invariant:
        texts = [next(text for text in texts if text.name.startswith(kind)) for kind in ("chat", "code", "copy", "uni")]
    gate = _Gate(llm, _modes(quick or not invariant))
    for i, text in enumerate(texts):
        progress(f"{text.name}: prompt {i + 1} of {len(texts)}, {len(text.tokens)} tokens")
        gate.drafters(text)
        if invariant:
            gate.prefill(text)
            gate.rows(text)
    checks = gate.checks()
    progress(f"distribution of {DRAWS} draws")
    return [*checks, *_sampling_checks(llm, texts)]


def _texts(llm: LLM) -> Iterator[Text]:
    """20 prompts: chat, code, copy, unicode, and one of 2,000 tokens, where the context is that long."""
    room = llm.context - 64
    kinds = {"chat": CHAT[:7], "code": CODE[:5], "copy": COPY, "unicode": UNICODE}
    for kind, prompts in kinds.items():
        for i, prompt in enumerate(prompts):
            message = {"role": "user", "content": prompt}
            tokens = llm.chat_tokens([message]) if llm.has_chat_template else llm.tokenizer.encode(prompt, bos=True)
            yield Text(f"{kind}-{i + 1}", tokens[-room:])
    long = files("slipstream.bench").joinpath("texts/lighthouse.txt").read_text("utf-8")
    tokens = llm.tokenizer.encode(long, bos=True)
    tokens = (tokens * (1 + LONG_PROMPT // len(tokens)))[:LONG_PROMPT]
    yield Text("long", tokens[-room:])


def _modes(few: bool) -> list[SamplingParams]:
    """Greedy first, then sampled: temperatures 0.8 and 1.2, three seeds each. All decode through end-of-text."""
    greedy = SamplingParams(max_tokens=32, ignore_eos=True)
    draws = [(0.8, 1), (1.2, 2)] if few else list(product((0.8, 1.2), (1, 2, 3)))
    return [greedy] + [
        SamplingParams(max_tokens=16, ignore_eos=True, temperature=temperature, top_p=0.9, seed=seed)
        for temperature, seed in draws
    ]


class _Gate:
    """The comparisons of token ids and logits, prompt by prompt."""

    def __init__(self, llm: LLM, modes: list[SamplingParams]) -> None:
        self.llm, self.modes = llm, modes
        names = ("suffix", *(("block",) if llm.record else ()), "always wrong", "always right")
        self.drafted = {kind: Tally(f"drafter {kind[0]}, drafts {kind[1]}") for kind in product(names, DRAFTS)}
        self.accepted = dict.fromkeys(self.drafted, 0)
        self.guesses = Tally("drafters right and wrong are what they say")
        self.device = Tally("rounds on the device")
        self.repeat = Tally("repeated")
        self.reused = Tally("reused prefix")
        self.chunked = {chunk: Tally(f"fresh session, prefill in chunks of {chunk or 'all'}") for chunk in CHUNKS}
        self.chunk_bits = Tally("prefill chunks leave the same bits")
        self.reuse_bits = Tally("a reused prefix leaves the same bits")
        self.row_bits = Tally("a row alone or among 16 has the same bits")
        self.plain: dict[str, list[list[int]]] = {}  # token ids of the plain decode, by prompt and mode

    def checks(self) -> list[Check]:
        tallies = [*self.drafted.values(), self.guesses]
        if isinstance(self.llm.backend, DeviceRounds):
            tallies.append(self.device)
        if self.llm.backend.row_invariant:
            tallies += [*self.chunked.values(), self.reused, self.repeat]
        checks = [tally.check() for tally in tallies]
        if self.llm.backend.row_invariant:
            checks += [tally.check("rows") for tally in (self.chunk_bits, self.reuse_bits, self.row_bits)]
        return checks

    def drafters(self, text: Text) -> None:
        """Plain decodes, then the same with every drafter: all draft lengths greedy, and in turn where sampled."""
        switch = Switch()
        with self.llm.session(drafter=switch, drafts=max(DRAFTS)) as session:
            plain = self.plain[text.name] = [session.generate(text.tokens, mode).token_ids for mode in self.modes]
            for i, (mode, expected) in enumerate(zip(self.modes, plain, strict=True)):
                for name, drafts in self.drafted:
                    if i and drafts != DRAFTS[i % len(DRAFTS)]:
                        continue
                    switch.inner, switch.drafts = self._drafter(name, text, expected), drafts
                    self._compare(
                        name, drafts, f"{text.name}, {_label(mode)}", session.generate(text.tokens, mode), expected
                    )
            if self.llm.backend.row_invariant:
                switch.inner, switch.drafts = NoDrafter(), 0
                self._again(text, session)
        if isinstance(self.llm.backend, DeviceRounds):
            self._on_device(text)

    def _drafter(self, name: str, text: Text, expected: list[int]) -> Drafter:
        if name == "suffix":
            return SuffixDrafter()  # with free drafts, so that it tries many
        if name == "block":
            return BlockDrafter(Free())
        vocab = self.llm.spec.vocab if name == "always wrong" else None
        return ScriptedDrafter(len(text.tokens), expected, vocab)

    def _compare(self, name: str, drafts: int, where: str, got: Completion, expected: list[int]) -> None:
        tally, stats = self.drafted[name, drafts], got.speculation
        tally.same(where, got.token_ids, expected)
        self.accepted[name, drafts] += stats.accepted
        tally.note = f", {self.accepted[name, drafts]} drafts accepted"
        if name.startswith("always"):
            right = stats.drafted if name == "always right" else 0
            ok = stats.drafted > 0 and stats.accepted == right
            self.guesses.holds(where, ok, f"{name}: {stats.accepted} of {stats.drafted} drafts accepted")

    def _again(self, text: Text, session: Session) -> None:
        """The same decode once more; and after another text with which it shares half its tokens."""
        plain, tokens = self.plain[text.name], text.tokens
        for i in (0, len(self.modes) - 1):
            where = f"{text.name}, {_label(self.modes[i])}"
            self.repeat.same(where, session.generate(tokens, self.modes[i]).token_ids, plain[i])
        half = len(tokens) // 2
        session.generate([*tokens[:half], *tokens[half:][::-1]], SamplingParams(max_tokens=4, ignore_eos=True))
        self.reused.same(text.name, session.generate(tokens, self.modes[0]).token_ids, plain[0])
        follow_up = [*tokens, *plain[0], *tokens[-8:]]
        with self.llm.session(drafter="none") as fresh:
            expected = fresh.generate(follow_up, self.modes[-1]).token_ids
        self.reused.same(f"{text.name}, next turn", session.generate(follow_up, self.modes[-1]).token_ids, expected)

    def _on_device(self, text: Text) -> None:
        names = ("suffix", *(("block", "auto") if self.llm.record else ()))
        for name, drafts in (("none", 0), *product(names, DRAFTS)):
            with self.llm.session(drafter=name, drafts=drafts) as session:
                for mode, expected in zip(self.modes, self.plain[text.name], strict=True):
                    where = f"{text.name}, {_label(mode)}, {name} {drafts}"
                    self.device.same(where, session.generate(text.tokens, mode).token_ids, expected)

    def prefill(self, text: Text) -> None:
        """A fresh session for each chunk size: the bits of the first row, then the tokens of a decode.

        And the bits of that row where its cache held another text before, that differs from the middle on: a wrong key
        or two seldom change a token.
        """
        anchor = np.array(text.tokens[-1:], np.int32)
        first: FloatArray | None = None
        for i, (chunk, tally) in enumerate(reversed(self.chunked.items())):
            with self.llm.session(drafter="none", prefill_chunk=chunk) as session:
                session.kv.prepare(text.tokens, chunk)
                bits = self.llm.backend.verify(session.kv.cache, anchor).copy()
                session.kv.cache.rewind(len(text.tokens) - 1)
                first = bits if first is None else first
                self.chunk_bits.same_bits(f"{text.name}, chunks of {chunk or 'all'}", bits, first)
                mode = i % len(self.modes)
                ids = session.generate(text.tokens, self.modes[mode]).token_ids
                tally.same(f"{text.name}, {_label(self.modes[mode])}", ids, self.plain[text.name][mode])
        assert first is not None
        half = len(text.tokens) // 2
        with self.llm.session(drafter="none") as session:
            session.kv.prepare([*text.tokens[:half], *text.tokens[half:][::-1]])
            session.kv.prepare(text.tokens)
            self.reuse_bits.same_bits(text.name, self.llm.backend.verify(session.kv.cache, anchor), first)

    def rows(self, text: Text) -> None:
        """The same rows in passes of other sizes, straight through the backend."""
        backend, start = self.llm.backend, len(text.tokens) - 1
        rows = np.array([text.tokens[-1], *self.plain[text.name][0]][: 1 + MAX_DRAFTS], np.int32)
        cache = backend.new_cache(start + len(rows))
        try:
            backend.prefill(cache, np.array(text.tokens[:-1], np.int32))
            together = backend.verify(cache, rows).copy()
            for sizes in ([8], [1] * 8, [2, 6], [3, 5], [4, 4], [7, 1]):
                cache.rewind(start)
                for at, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
                    got = backend.verify(cache, rows[at : at + size])
                    self.row_bits.same_bits(f"{text.name}, passes of {sizes}", got, together[at : at + size])
        finally:
            cache.close()


def _label(mode: SamplingParams) -> str:
    return "greedy" if mode.temperature == 0 else f"temperature {mode.temperature}, seed {mode.seed}"


def _sampling_checks(llm: LLM, texts: list[Text]) -> list[Check]:
    """The backend's sampler against the rule, token by token; and 50,000 draws against the softmax."""
    backend = llm.backend
    rows = np.stack([_first_row(backend, text) for text in sorted(texts, key=lambda text: len(text.tokens))[:4]])
    checks = []
    if isinstance(backend, NativeSampler):
        native = Tally("the backend samples by the rule")
        filters = [
            (0.0, 0, 1.0, 0.0),
            (0.8, 0, 0.9, 0.0),
            (1.2, 0, 1.0, 0.0),
            (1.0, 40, 0.95, 0.0),
            (1.5, 0, 1.0, 0.02),
        ]
        for row, parameters, position in product(rows, filters, (1, 77, 2**33 + 5)):
            got = backend.sample(row, *parameters, 2**40 + 3, position)
            native.same(f"{parameters}", [got], [sample(row, *parameters, 2**40 + 3, position)])
        checks.append(native.check("draws"))
    for temperature in (0.8, 1.2):
        checks.append(_distribution(backend, rows[0], temperature))
    return checks


def _first_row(backend: Backend, text: Text) -> FloatArray:
    cache = backend.new_cache(len(text.tokens))
    try:
        backend.prefill(cache, np.array(text.tokens[:-1], np.int32))
        row: FloatArray = backend.verify(cache, np.array(text.tokens[-1:], np.int32))[0].copy()
        return row
    finally:
        cache.close()


def _distribution(backend: Backend, row: FloatArray, temperature: float, top_k: int = 8) -> Check:
    """Pearson's chi-square of draws at 50,000 positions against the softmax over the `top_k` likeliest tokens."""
    ids = np.argsort(-row, kind="stable")[:top_k]
    weights = np.exp((row[ids].astype(np.float64) - row.max()) / temperature)
    expected = DRAWS * weights / weights.sum()
    if isinstance(backend, NativeSampler):
        drawn = np.array([backend.sample(row, temperature, top_k, 1.0, 0.0, 9, p) for p in range(DRAWS)])
    else:
        kept = keep(row, temperature, top_k, 1.0, 0.0)
        scores = row[kept].astype(np.float64) / temperature + gumbel(9, np.arange(DRAWS)[:, None], kept)
        drawn = kept[scores.argmax(axis=1)]
    counts = np.array([(drawn == i).sum() for i in ids], np.float64)
    rare = expected < 5  # too rare for the statistic by themselves
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    degrees = len(counts) - 1
    name = f"distribution at temperature {temperature}"
    if degrees < 1 or counts.sum() != DRAWS:
        return Check(name, False, f"{int(counts.sum())} of {DRAWS} draws are among the {top_k} likeliest tokens")
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Wilson and Hilferty 1931: the cube root is nearly normal. Beyond 4.5 deviations chance is 1 in 300,000.
    deviations = ((statistic / degrees) ** (1 / 3) - 1 + 2 / (9 * degrees)) / (2 / (9 * degrees)) ** 0.5
    detail = f"chi-square {statistic:.1f} with {degrees} degrees of freedom over {DRAWS} draws"
    return Check(name, deviations < 4.5, detail)
