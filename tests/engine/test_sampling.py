"""The sampling rule: its noise is Philox to the bit, its draws follow the filtered softmax, its ties are settled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.request import SamplingParams
from slipstream.engine.sampling import Sampler, gumbel, keep, log_softmax, philox4x32, sample, token_logprob
from slipstream.errors import BackendError, RequestError

OFF = (0, 1.0, 0.0)  # top_k, top_p, min_p


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # kat_vectors of Random123: philox 4x32, 10 rounds
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    assert [int(w) for w in philox4x32(tuple(np.array(c, np.uint64) for c in counter), key)] == words


def test_noise_of_a_token_does_not_depend_on_its_company():
    table = gumbel(7, np.arange(50)[:, None], np.arange(64))
    assert table[31, 17] == gumbel(7, 31, 17) == gumbel(7, 31, np.array([17, 3]))[0]


def test_noise_uses_all_64_bits_of_seed_and_position():
    noise = [gumbel(s, p, 0) for s in (1, 1 + 2**32, 1 + 2**63) for p in (5, 5 + 2**32)]
    assert len({float(g) for g in noise}) == 6


def chi_square_z(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic as a standard normal deviate (Wilson and Hilferty 1931)."""
    expected = probabilities * counts.sum()
    k = len(counts) - 1
    x = float(((counts - expected) ** 2 / expected).sum())
    return ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / (2 / (9 * k)) ** 0.5


@pytest.mark.parametrize("filters", [OFF, (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.15), (6, 0.9, 0.05)])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_draws_follow_the_filtered_softmax(filters, temperature):
    logits = np.random.default_rng(3).permutation(np.linspace(0, 1.6, 9)).astype(np.float32)
    probabilities = np.exp(logits.astype(float) / temperature)
    order = np.argsort(-logits)
    top_k, top_p, min_p = filters
    if top_k:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    below = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[below >= top_p]] = 0
    probabilities[probabilities < min_p * probabilities.max()] = 0
    probabilities /= probabilities.sum()

    ids = keep(logits, temperature, *filters)
    scores = logits[ids].astype(float) / temperature + gumbel(11, np.arange(50_000)[:, None], ids)
    drawn = ids[scores.argmax(axis=1)]
    counts = np.bincount(drawn, minlength=9)
    assert (counts[probabilities == 0] == 0).all()
    kept = probabilities > 0
    assert kept.sum() >= 3
    assert abs(chi_square_z(counts[kept], probabilities[kept])) < 4
    assert drawn[:200].tolist() == [sample(logits, temperature, *filters, 11, p) for p in range(200)]


def test_ties_go_to_the_lowest_id():
    tied = row(1, 2, 2, 0, 2)
    assert sample(tied, 0.0, *OFF, 0, 0) == 1
    assert keep(tied, 1.0, 2, 1.0, 0.0).tolist() == [1, 2]
    assert keep(tied, 1.0, 0, 0.5, 0.0).tolist() == [1, 2]


def test_top_p_keeps_at_least_one_token():
    assert keep(row(0, 5, 1), 1.0, 0, 1e-9, 0.0).tolist() == [1]


def test_banned_logits_are_never_drawn():
    logits = row(0, -np.inf, 0, -np.inf)
    assert {sample(logits, 2.0, *OFF, 5, p) for p in range(200)} == {0, 2}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=12), st.integers(1, 12), st.floats(0.05, 1), st.floats(0, 0.9))
def test_filters_keep_a_prefix_of_the_order(values, top_k, top_p, min_p):
    logits = row(*values)
    kept = keep(logits, 0.9, top_k, top_p, min_p).tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert sorted(kept) == sorted(order[: len(kept)])
    assert kept


def test_penalties_follow_the_formula():
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: 9.0})
    rows: list[np.ndarray] = []

    def record(logits, *_):
        rows.append(logits.copy())
        return 1

    sampler = Sampler(params, 0, [0, 3], 5, row=record)
    raw = row(4, 4, 4, -4, 0)
    for p in range(3):
        sampler.choose(raw, p)
    assert rows[0].tolist() == [2, 4, 4, -8, 9]
    assert rows[2].tolist() == [2, 2 - 0.5 - 2 * 0.25, 4, -8, 9]
    assert raw.tolist() == [4, 4, 4, -4, 0]


def test_mask_sees_the_output_and_decides():
    def mask(output, logits):
        logits[:] = np.where(np.arange(len(logits)) == len(output), 0, -np.inf)

    sampler = Sampler(SamplingParams(), 0, [], 4, mask=mask)
    assert [sampler.choose(row(9, 8, 7, 6), p) for p in range(3)] == [0, 1, 2]


def test_logprobs_are_of_the_raw_logits():
    logits = row(1, 3, 2)
    sampler = Sampler(SamplingParams(logprobs=2, logit_bias={0: 50.0}, temperature=2.0), 0, [], 3)
    sampler.choose(logits, 0)
    (entry,) = sampler.logprobs
    assert (entry.token_id, [i for i, _ in entry.top]) == (0, [1, 2])
    np.testing.assert_allclose(np.exp(log_softmax(logits)).sum(), 1, rtol=1e-6)
    assert entry.logprob == float(log_softmax(logits)[0])
    assert token_logprob(logits, 2, 0).top == ()


def test_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(RequestError, match="token 9"):
        Sampler(SamplingParams(logit_bias={9: 1.0}), 0, [], 4)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": float("nan")},
        {"temperature": -1},
        {"temperature": 1e-300},
        {"max_tokens": 0},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: 1e300}},
        {"temperature": 1e300},
        {"frequency_penalty": 1e300},
        {"presence_penalty": float("nan")},
        {"repetition_penalty": 1e-300},
        {"top_k": 2**32 + 1},
    ],
)
def test_senseless_parameters_are_refused(bad):
    with pytest.raises(RequestError):
        SamplingParams(**bad)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_every_token_is_refused(temperature):
    params = SamplingParams(temperature=temperature, logit_bias={i: -1e300 for i in range(4)})
    with pytest.raises(RequestError, match="ban every token"):
        Sampler(params, 0, [], 4).choose(row(1, 2, 3, 4), 0)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "min_p": 0.1}])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_name_damaged_weights(params, wrong):
    with pytest.raises(BackendError, match="weights are damaged"):
        Sampler(SamplingParams(**params), 0, [], 4).choose(np.full(4, wrong, np.float32), 0)
