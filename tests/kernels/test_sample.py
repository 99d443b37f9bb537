"""Device sampling against its reference and against the rule in `engine.sampling`, which is the oracle."""

import numpy as np
import pytest
import torch

from slipstream.engine import sampling
from slipstream.kernels import sample
from slipstream.kernels.launch import ROWS, RUN_ROWS, STATE_SIZE, TOP_K

START = 7


def noise(seed, vocab, device):
    positions = START + 1 + np.arange(ROWS)[:, None]
    return torch.from_numpy(sampling.gumbel(seed, positions, np.arange(vocab)[None])).to(device)


@pytest.mark.parametrize("vocab", [512, 3000])
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 5},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.5},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_rule(vocab, filters, device):
    seed = int(np.random.default_rng().integers(2**63))
    case = sample.case(vocab, device, seed=seed, start=START, noise=noise(seed, vocab, device), **filters)
    case.run()
    assert case.outputs["token"].tolist() == case.expected()["token"].tolist()


def test_the_reference_here_is_the_rule_of_the_engine(device):
    logits = torch.randn(ROWS, 700) * 3
    logits[:, 3:9] = logits[:, 2:3]
    filters = {"temperature": 1.1, "top_k": 30, "top_p": 0.8, "min_p": 0.01}
    ours = sample.reference(logits, noise=noise(3, 700, "cpu"), **filters)
    rule = [sampling.sample(row.numpy(), **filters, seed=3, position=START + 1 + i) for i, row in enumerate(logits)]
    assert ours.tolist() == rule


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (0.9, 5)])
def test_a_logit_that_is_not_finite_decides_for_no_token(temperature, top_k, device):
    logits = torch.randn(ROWS, 5000, device=device)
    logits[3, 2100], logits[4, 7] = float("nan"), float("inf")
    state = torch.zeros(STATE_SIZE, dtype=torch.int32, device=device)
    state[RUN_ROWS], state[TOP_K] = ROWS, top_k
    knobs = torch.tensor([temperature, 1.0, 0.0], dtype=torch.float64, device=device)
    cuts = torch.zeros(ROWS, 2, dtype=torch.int32, device=device)
    scores = torch.full((ROWS, sample.blocks(5000)), float("nan"), dtype=torch.float64, device=device)
    tokens = torch.full(scores.shape, -7, dtype=torch.int32, device=device)
    sample.best(logits, knobs, knobs.long(), cuts, scores, tokens, state, top_k > 0)
    found = tokens.masked_fill(scores < scores.amax(1, keepdim=True), 5000).amin(1).tolist()
    assert found[3:5] == [-1, -1]
    assert min(found[:3] + found[5:]) >= 0
