"""The round: draft, verify in one pass over the weights, sample row by row, accept what matches, commit.

    tokens of the text    ... anchor             the newest token, not yet in the KV cache
    rows of the pass      anchor d1 d2 d3        d: what the drafter guesses to follow
    sampled               t1     t2 t3 ..        the row of the anchor gives t1; that of d1 gives t2 if d1 == t1; ...
    committed             t1 .. tk               up to the first t that is no draft: k - 1 drafts and one token more

The committed tokens are those of a decode without drafts, because each is a function of its row's logits, the seed and
its position alone (`engine.sampling`), and a row's logits do not depend on the rows beside it
(`Backend.row_invariant`).
Speculative decoding by exact match: Leviathan et al. 2023, arXiv:2211.17192; here the noise is fixed by the position.

It knows nothing about text, stop strings or sessions.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator

import numpy as np

from slipstream.backends.base import Backend, KVCache, Round
from slipstream.drafters.base import Drafter
from slipstream.engine.cost import RoundCost
from slipstream.engine.sampling import Sampler


def host_rounds(
    backend: Backend,
    cache: KVCache,
    anchor: int,
    *,
    drafter: Drafter,
    sampler: Sampler,
    drafts: int,
    limit: int,
    stop_token_ids: Container[int],
    cost: RoundCost,
) -> Iterator[Round]:
    """Decode on from `anchor`, everything before it being in the cache, for `limit` tokens or to a stop token.

    The host drives every round; a backend with `DeviceRounds` has its own loop. After each round the cache holds the
    whole text but its last token. drafts: most guesses a round, at most MAX_DRAFTS.
    """
    rows = np.empty(1 + drafts, np.int32)
    position = cache.length + 1  # of the token to choose next
    verify, choose, propose, observe = backend.verify, sampler.choose, drafter.propose, drafter.observe
    stopped = False
    while limit > 0 and not stopped:
        room = min(drafts, limit - 1)
        draft = propose(room)[:room]
        drafted = len(draft)
        started = time.perf_counter()
        rows[0] = anchor
        rows[1 : 1 + drafted] = draft
        logits = verify(cache, rows[: 1 + drafted])
        committed: list[int] = []
        accepted = 0
        for row in range(1 + drafted):
            anchor = choose(logits[row], position + row)
            committed.append(anchor)
            matches = row < drafted and anchor == draft[row]
            accepted += matches
            stopped = anchor in stop_token_ids
            if stopped or not matches:
                break
        position += len(committed)
        limit -= len(committed)
        if len(committed) <= drafted:
            cache.rewind(position - 1)
        cost.record(1 + drafted, time.perf_counter() - started)
        observe(committed, drafted, accepted)
        yield Round(committed, drafted, accepted)
