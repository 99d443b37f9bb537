"""Which token a row of logits becomes: the rule in numpy, and the oracle of every backend that samples by itself.

The token at absolute position p (its index in the whole sequence, prompt included) is a function of the row's logits,
the parameters, the seed and p alone. It never depends on drafts, on rounds or on who else runs:

    token(p) = argmax over the kept ids i of  float64(l_i) / T + Gumbel(seed, p, i)        equal scores: the lowest id
    token(p) = argmax l_i                                             temperature T = 0    equal logits: the lowest id

The argmax of logits plus Gumbel noise is a draw from their softmax (Gumbel 1954; Maddison et al. 2014,
arXiv:1411.0030).

Noise. Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with
    key     = (seed & 0xffffffff, seed >> 32)
    counter = (i // 4, 0, p & 0xffffffff, p >> 32)          for token id i
    w       = output word i % 4,  v = (w + 0.5) * 2**-32,  Gumbel = -log(-log1p(-v))      all in float64

Order of work on the float32 logits of a row:
    1. repetition penalty r, ids of prompt and output:  l / r where l > 0, else l * r               (float32)
    2. l - presence where the id is in the output, then l - frequency * count in the output         (float32)
    3. l + bias                                                                                     (float32)
    4. the caller's mask (a grammar's), which may set logits to -inf
    5. T = 0 stops here with the argmax. Else the ids are ordered by (logit descending, id ascending) and filtered:
       top-k   keep the first k; off at 0
       top-p   with w_i = exp((l_i - l_max) / T) over what is left, in float64: keep the shortest prefix of the order
               whose sum of w reaches top_p times the whole sum, at least one id; off at 1
       min-p   keep ids with w_i >= min_p; w is 1 at the most likely id; off at 0
    6. the argmax with noise over what is kept; no token, -1, where the largest logit is not finite

Steps 1-4 are `Sampler`, in numpy on the host; 5-6 are `sample`, which a `NativeSampler` backend replaces. Reported
log-probabilities are the log-softmax of the raw logits, before step 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from slipstream.backends.base import FloatArray
from slipstream.engine.request import SamplingParams, TokenLogprob
from slipstream.errors import BackendError, RequestError

LogitMask = Callable[[Sequence[int], FloatArray], None]
"""Called with the output tokens so far and a row's logits (vocab,), which it edits in place; keep one id finite."""

SampleRow = Callable[[FloatArray, float, int, float, float, int, int], int]
"""(logits (vocab,), temperature, top_k, top_p, min_p, seed, position) -> token, as in `NativeSampler.sample`."""

UInt64 = npt.NDArray[np.uint64]
Float64 = npt.NDArray[np.float64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox4x32(counter: tuple[UInt64, UInt64, UInt64, UInt64], key: tuple[int, int]) -> tuple[UInt64, ...]:
    """Philox4x32-10: four 32-bit words for each counter, all held in uint64 arrays that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 32 x 32 bits fit in 64
        c0, c1, c2, c3 = (
            (right >> _HALF) ^ c1 ^ np.uint64(k0),
            right & _LOW,
            (left >> _HALF) ^ c3 ^ np.uint64(k1),
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(seed: int, positions: npt.ArrayLike, ids: npt.ArrayLike) -> Float64:
    """Standard Gumbel noise of token `ids` at `positions`; the two broadcast together."""
    p, i = np.asarray(positions, np.uint64), np.asarray(ids, np.uint64)
    zero = np.zeros((), np.uint64)
    words = philox4x32((i >> np.uint64(2), zero, p & _LOW, p >> _HALF), (seed & 0xFFFFFFFF, seed >> 32))
    chosen = np.choose(i.astype(np.intp) & 3, words)
    v = (chosen.astype(np.float64) + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log1p(-v)), np.float64)


def keep(logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.intp]:
    """The ids that survive top-k, top-p and min-p, by (logit descending, id ascending) where a filter is on."""
    vocab = logits.shape[0]
    filtered = 0 < top_k < vocab or top_p < 1
    if not filtered and min_p == 0:
        return np.arange(vocab)
    ids = np.arange(vocab)
    if 0 < top_k < vocab:
        # Sorting only what can be among the k first; ties with the k-th are cut by the stable sort below.
        ids = np.flatnonzero(logits >= np.partition(logits, vocab - top_k)[vocab - top_k])
    if filtered:
        ids = ids[np.argsort(-logits[ids], kind="stable")]
    if 0 < top_k < vocab:
        ids = ids[:top_k]
    scaled = logits[ids].astype(np.float64)
    w = np.exp((scaled - scaled.max()) / temperature)
    if top_p < 1:
        mass = np.cumsum(w)
        n = int(np.searchsorted(mass, top_p * mass[-1])) + 1
        ids, w = ids[:n], w[:n]
    return ids[w >= min_p] if min_p > 0 else ids


def sample(
    logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """The token of one row (vocab,): steps 5 and 6 of the rule."""
    if temperature == 0:
        return int(logits.argmax())
    if not np.isfinite(logits.max()):
        return -1
    ids = keep(logits, temperature, top_k, top_p, min_p)
    scores = logits[ids].astype(np.float64) / temperature + gumbel(seed, position, ids)
    return int(ids[scores == scores.max()].min())


def log_softmax(logits: FloatArray) -> FloatArray:
    """Natural-log probabilities (vocab,), summed in float64."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float32)


def token_logprob(logits: FloatArray, token: int, top: int) -> TokenLogprob:
    """The log-probability of `token` and of the `top` most likely ids, by (probability descending, id ascending)."""
    logprobs = log_softmax(logits)
    best = keep(logprobs, 1.0, top, 1.0, 0.0)[:top] if top else ()
    return TokenLogprob(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


class Sampler:
    """Chooses the tokens of one generation in order, keeping the counts that penalties need.

    row: what samples a row once penalties and bias are in (a backend's own, or `sample`).
    mask: a grammar's hook. Every chosen token counts as committed: choose none past a rejected draft.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Iterable[int],
        vocab: int,
        row: SampleRow = sample,
        mask: LogitMask | None = None,
    ) -> None:
        p = self.params = params
        self.seed = seed
        self.logprobs: list[TokenLogprob] = []
        self._output: list[int] = []
        self._row, self._mask = row, mask
        self._penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        self._bias = self._bias_arrays(p, vocab) if p.logit_bias else None
        self.plain = not (self._penalised or self._bias or mask or p.logprobs is not None)
        """Whether the row alone decides, so that a device may sample it without the host."""
        if self._penalised:
            self._seen = np.zeros(vocab, bool)
            self._seen[np.fromiter(prompt, np.intp)] = True
            self._counts = np.zeros(vocab, np.float32)

    @staticmethod
    def _bias_arrays(params: SamplingParams, vocab: int) -> tuple[npt.NDArray[np.intp], FloatArray]:
        ids = np.fromiter(params.logit_bias.keys(), np.intp)
        if (wrong := ids[(ids < 0) | (ids >= vocab)]).size:
            raise RequestError(f"logit_bias names token {wrong[0]}, but the vocabulary has ids 0 to {vocab - 1}")
        with np.errstate(over="ignore"):  # what is below float32 is -inf
            return ids, np.fromiter(params.logit_bias.values(), np.float32)

    def choose(self, logits: FloatArray, position: int) -> int:
        """The token at `position` from its row of logits (vocab,), which stay untouched.

        Raises RequestError where bias and mask ban every token, BackendError where the logits are not numbers.
        """
        p = self.params
        row = logits if self.plain else self._prepare(logits)
        token = self._row(row, p.temperature, p.top_k, p.top_p, p.min_p, self.seed, position)
        if token < 0 or not math.isfinite(row[token]):
            self._refuse(logits)
        if not self.plain:
            self._append(token, logits)
        return token

    def _prepare(self, logits: FloatArray) -> FloatArray:
        row, p = logits.copy(), self.params
        if self._penalised:
            if p.repetition_penalty != 1:
                r, seen = np.float32(p.repetition_penalty), row[self._seen]
                row[self._seen] = np.where(seen > 0, seen / r, seen * r)
            row[self._counts > 0] -= np.float32(p.presence_penalty)
            row -= np.float32(p.frequency_penalty) * self._counts
        if self._bias:
            row[self._bias[0]] += self._bias[1]
        if self._mask:
            self._mask(self._output, row)
        return row

    def _refuse(self, logits: FloatArray) -> NoReturn:
        if np.isfinite(logits.max()):
            raise RequestError("logit_bias or the mask ban every token; leave one to choose")
        raise BackendError("the model computes no finite logits: its weights are damaged; download it again")

    def _append(self, token: int, logits: FloatArray) -> None:
        self._output.append(token)
        if self._penalised:
            self._seen[token] = True
            self._counts[token] += 1
        if self.params.logprobs is not None:
            self.logprobs.append(token_logprob(logits, token, self.params.logprobs))
