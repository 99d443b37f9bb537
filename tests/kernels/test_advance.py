"""The end of a round against plain Python: acceptance, stops, limits, the ring and the device's drafter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels import advance, launch
from slipstream.kernels.launch import FIRST_STOP, LEFT, ROWS, RUN_ROWS, START, STATE_SIZE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ints(values, size=None):
    out = torch.zeros(size or len(values), dtype=torch.int32)
    out[: len(values)] = torch.tensor(values, dtype=torch.int32)
    return out.to(DEVICE)


def state_of(**slots):
    state = torch.zeros(STATE_SIZE, dtype=torch.int32)
    for name, value in slots.items():
        state[getattr(launch, name)] = value
    return state.to(DEVICE)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 15), st.integers(1, 20))
def test_device_drafts_are_those_of_the_plain_drafter(text, drafts, left):
    tokens, rows = ints(text, 100), ints([], ROWS)
    state = state_of(START=len(text) - 1, LEFT=left, DRAFTS=drafts, CAPACITY=100)
    advance.begin(tokens, rows, state)
    expected = advance.propose(text, min(drafts, left - 1))
    assert int(state[RUN_ROWS]) == 1 + len(expected)
    assert rows[: 1 + len(expected)].tolist() == [text[-1], *expected]


def one_round(text, drafts, sampled, left=100, stops=(), cancel=0):
    """What the ring says and the state after a round in which row i sampled `sampled[i]`."""
    rows = 1 + len(drafts)
    state = state_of(START=len(text) - 1, RUN_ROWS=rows, LEFT=left, ROUND=6, STOPS=len(stops), CAPACITY=100)
    state[FIRST_STOP : FIRST_STOP + len(stops)] = ints(list(stops)) if stops else state[:0]
    tokens, row_tokens = ints(text, 100), ints([text[-1], *drafts], ROWS)
    scores = torch.full((ROWS, 3), -1.0, dtype=torch.float64, device=DEVICE)
    best = torch.full((ROWS, 3), 9, dtype=torch.int32, device=DEVICE)
    for i, token in enumerate(sampled):
        scores[i, i % 3], best[i, i % 3] = 2.0, token
    ring = torch.zeros(4, advance.RING_WORDS, dtype=torch.int64, device=DEVICE)
    advance.advance(scores, best, tokens, row_tokens, ring, ints([cancel]), state)
    head = int(ring[2, 0])
    count = head >> 16 & 0xFF
    assert all(int(w) >> 32 == 7 for w in ring[2, : 1 + count])
    committed = [int(w) & 0xFFFFFFFF for w in ring[2, 1 : 1 + count]]
    assert bool(head >> 25 & 1) == (-1 in sampled[: (head & 0xFF) + 1])
    assert tokens[: len(text) + count].tolist() == [*text, *committed]
    assert int(state[START]) == len(text) - 1 + count
    assert int(state[LEFT]) == left - count
    done = bool(head >> 24 & 1)
    assert (int(state[RUN_ROWS]) == 0) == done
    return committed, head & 0xFF, done


@pytest.mark.parametrize(
    ("drafts", "sampled", "options", "expected"),
    [
        ([], [5], {}, ([5], 0, False)),
        ([1, 2, 3], [1, 2, 3, 4], {}, ([1, 2, 3, 4], 3, False)),
        ([1, 2, 3], [1, 7, 3, 4], {}, ([1, 7], 1, False)),
        ([1, 2, 3], [1, 2, 3, 4], {"left": 2}, ([1, 2], 3, True)),
        ([1, 2, 3], [1, 2, 3, 4], {"stops": (8, 2)}, ([1, 2], 3, True)),
        ([1, 2, 3], [5, 2, 3, 4], {"stops": (2,)}, ([5], 0, False)),
        ([1], [1, 4], {"cancel": 1}, ([1, 4], 1, True)),
        (list(range(15)), list(range(16)), {}, (list(range(16)), 15, False)),
        ([], [-1], {}, ([], 0, True)),  # decided by logits that are not numbers
        ([1, 2, 3], [1, 2, -1, 4], {}, ([1, 2], 2, True)),
        ([1, 2, 3], [1, 7, -1, 4], {}, ([1, 7], 1, False)),  # as was a row that is rejected anyway
    ],
)
def test_a_round_commits_the_longest_right_prefix_and_one_more(drafts, sampled, options, expected):
    assert one_round([4, 0], drafts, sampled, **options) == expected


def test_a_finished_stream_does_nothing():
    state = state_of(START=3, RUN_ROWS=0, LEFT=0, ROUND=2)
    before, ring = state.clone(), torch.zeros(4, advance.RING_WORDS, dtype=torch.int64, device=DEVICE)
    scores = torch.zeros(ROWS, 1, dtype=torch.float64, device=DEVICE)
    zero = torch.zeros(ROWS, 1, dtype=torch.int32, device=DEVICE)
    advance.advance(scores, zero, ints([1], 100), ints([1], ROWS), ring, ints([0]), state)
    assert torch.equal(state, before)
    assert not ring.any()
