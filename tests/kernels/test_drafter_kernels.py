"""The block drafter's kernels against their references, on fresh random inputs, their outputs poisoned before."""

import numpy as np
import pytest
import torch

from slipstream.engine.sampling import gumbel
from slipstream.kernels import attention, block_rows, candidates, fuse
from slipstream.kernels.launch import CAPACITY, DRAFTS, LEFT, MATCHED, ROWS, RUN_ROWS, START, STATE_SIZE, TRUST
from slipstream.kernels.markov import markov

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 1e-5, F16: 1e-3, BF16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])


def check(case, dtype):
    case.run()
    for name, expected in case.expected().items():
        error = (case.outputs[name].double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"  # NaN fails too


@pytest.mark.parametrize(("start", "window", "first"), [(0, None, 0), (300, 100, 7), (300, 100, 290), (300, None, 7)])
def test_block_rows_are_the_anchor_and_masks_and_see_the_window_of_an_unbroken_text(start, window, first, device):
    check(block_rows.case(96, F16, device, start, window, first), F32)


@dtypes
@pytest.mark.parametrize("rows", [2, ROWS])
def test_fuse_sums_over_the_taps_of_the_rows_that_run(dtype, rows, device):
    check(fuse.case(3, k=96, hidden=48, dtype=dtype, device=device, rows=rows), dtype)


def test_fuse_norms_taps_wider_than_a_tile(device):
    check(fuse.case(2, k=1088, hidden=16, dtype=F32, device=device), F32)


@dtypes
@pytest.mark.parametrize(("start", "seen_from"), [(300, 0), (300, 170), (300, 299), (5, 5)])
def test_the_rows_of_a_block_see_each_other_and_the_text_from_where_it_is_unbroken(dtype, start, seen_from, device):
    check(attention.case(6, 2, 16, dtype, device, rows=7, start=start, seen_from=seen_from), dtype)


@pytest.mark.parametrize("vocab", [20, 200, 5000, 16389])
@pytest.mark.parametrize("count", [5, 16])
def test_candidates_are_the_greatest_logits_in_order(vocab, count, device):
    check(candidates.case(vocab, count, device), F32)


def test_candidates_of_what_is_no_number_are_in_the_vocabulary(device):
    ids, values = torch.full((2, 8), -1, dtype=torch.int32, device=device), torch.zeros(2, 8, device=device)
    logits = torch.full((2, 100), float("nan"), device=device)
    logits[1] *= -1
    candidates.candidates(logits, ids, values, 77)
    assert (ids >= 0).all()
    assert (ids < 77).all()


def walked(logits, ids, vocab, before, bias, states, evidence, p, b, head, anchor, start, temperature, seed):
    """Tokens and chances, one after the other, in float64."""
    tokens, chances, token = [], [], anchor
    for r in range(len(ids)):
        x = before[token] + states[r]
        x = x / (1 + np.exp(-x))
        scores, names = logits[r] + bias[ids[r]] @ x, vocab[ids[r]]
        drawn = scores / temperature + gumbel(seed, start + r + 1, names) if temperature else scores
        chosen = int(drawn.argmax())
        said = evidence[r] + head @ x + b + p * (scores[chosen] - np.log(np.exp(scores).sum()))
        token = int(names[chosen])
        tokens.append(token)
        chances.append(1 / (1 + np.exp(-said)))
    return tokens, np.array(chances)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("rows", "count", "rank"), [(7, 16, 64), (1, 5, 20), (15, 3, 300)])
def test_markov_walks_what_each_token_leads_to(temperature, rows, count, rank, device):
    rng, start, seed = np.random.default_rng(), 9, 2**63 + 11
    vocab = np.sort(rng.permutation(90)[:70]).astype(np.int32)
    logits, states, evidence = rng.normal(size=(rows, count)), rng.normal(size=(rows, rank)), rng.normal(size=rows)
    before, head, (p, b) = rng.normal(size=(90, rank)), rng.normal(size=rank) / rank, rng.normal(size=2)
    bias = rng.normal(size=(70, rank)) * 3 / rank**0.5
    ids = np.stack([rng.permutation(70)[:count] for _ in range(rows)])
    want, likely = walked(logits, ids, vocab, before, bias, states, evidence, p, b, head, 5, start, temperature, seed)
    least = float(np.prod(likely[: rows // 2 + 1])) * 0.999  # so many, and as many more as are sure
    verified = int((np.cumprod(likely) >= least).cumprod().sum())

    def f32(x):
        return torch.tensor(x, dtype=F32, device=device)

    def i32(x):
        return torch.tensor(x, dtype=torch.int32, device=device)

    out = f32(np.concatenate([states, evidence[:, None]], 1))
    for drafts, matched, done in ((rows, 0, False), (2, 0, False), (rows, 6, False), (rows, 0, True)):
        guesses, chances = i32([-1] * rows), f32([float("nan")] * rows)
        state = torch.zeros(STATE_SIZE, dtype=torch.int32, device=device)
        slots = {START: start, CAPACITY: 100, LEFT: 50, DRAFTS: drafts, MATCHED: matched, TRUST: 6, RUN_ROWS: 3}
        for slot, value in slots.items():
            state[slot] = value
        if done:
            state[RUN_ROWS] = 0
        row_tokens = i32([-1] * ROWS)
        markov(f32(logits), i32(ids), i32(vocab), f32(before), f32(bias), out[:, :rank], out[:, rank], f32([p, b]),
               f32(head), torch.tensor([temperature, 1, 0], dtype=torch.float64, device=device),
               torch.tensor([seed - 2**64], dtype=torch.int64, device=device), i32([5] * 40), row_tokens, guesses,
               chances, state, least)  # fmt: skip
        assert guesses.tolist() == want
        np.testing.assert_allclose(chances.cpu(), likely, rtol=1e-4)
        kept = min(verified, drafts)
        if done or matched:  # another's drafts stand
            assert int(state[RUN_ROWS]) == (0 if done else 3)
            assert row_tokens.tolist() == [-1] * ROWS
        else:
            assert int(state[RUN_ROWS]) == 1 + kept
            assert row_tokens.tolist()[1 : 1 + kept] == want[:kept]
