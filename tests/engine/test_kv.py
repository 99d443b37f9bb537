"""KV reuse: the cache always holds exactly the prompt, and only what changed is computed."""

from __future__ import annotations

from fakes import FakeBackend
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.kv import StreamKV, common_prefix

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(TOKENS, TOKENS)
def test_common_prefix_is_the_longest(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n in (len(a), len(b)) or a[n] != b[n]


@given(st.lists(TOKENS, min_size=1, max_size=5), st.sampled_from([None, 1, 7]), st.sampled_from([None, 4]))
def test_any_sequence_of_prompts_leaves_the_cache_exact(prompts, chunk, window):
    backend = FakeBackend(window=window)
    kv = StreamKV(backend, 200)
    for prompt in prompts:
        before, held = list(kv.tokens), kv.cache.length
        backend.prefilled.clear()
        reused = kv.prepare(prompt, chunk)
        assert kv.cache.tokens == prompt[:-1]
        assert sum(backend.prefilled) == len(prompt) - 1 - reused
        assert all(n <= (chunk or 200) for n in backend.prefilled)
        most = min(common_prefix(before, prompt), held, len(prompt) - 1)
        assert reused == most if window is None else reused in (0, most)


def test_interrupted_prefill_leaves_a_usable_cache():
    class Interrupted(FakeBackend):
        broken = True

        def prefill(self, cache, tokens):
            if self.broken and cache.length >= 4:
                raise KeyboardInterrupt
            super().prefill(cache, tokens)

    backend = Interrupted()
    kv = StreamKV(backend, 100)
    try:
        kv.prepare(list(range(10)), 2)
    except KeyboardInterrupt:
        backend.broken = False
    assert kv.prepare([0, 1, 2, 9, 9], 2) == 3
    assert kv.cache.tokens == [0, 1, 2, 9]


def test_close_frees_the_cache_and_can_be_repeated():
    backend = FakeBackend()
    kv = StreamKV(backend, 100)
    kv.prepare([1, 2, 3])
    kv.close()
    kv.close()
    assert backend.caches[0].closed
    assert kv.prepare([1, 2, 3]) == 0
