"""Streams on a backend whose rounds run ahead take turns, and none changes."""

import numpy as np
import pytest
from fakes import FakeBackend, fake_llm

from slipstream import SamplingParams
from slipstream.backends.base import Round
from slipstream.engine.sampling import sample


class AheadBackend(FakeBackend):
    """Rounds on the "device", each computed before it is read; one loop may run at a time."""

    running = 0
    begun = 0

    def rounds(self, cache, tokens, *, temperature, top_k, top_p, min_p, seed, drafts, limit, stop_token_ids, drafter):
        assert self.running == 0, "two loops share the device"
        assert len(tokens) == cache.length + 1
        self.running, self.begun = 1, self.begun + 1
        text, kept = tokens.tolist(), cache.length
        try:
            for _ in range(limit):
                row = self.verify(cache, np.array(text[-1:], np.int32))[0]
                text.append(sample(row, temperature, top_k, top_p, min_p, seed, len(text)))
                self.verify(cache, np.array(text[-1:], np.int32))  # a round ahead, in vain if this one is the last
                cache.rewind(len(text) - 1)
                kept = len(text) - 1
                yield Round(text[-1:], 0, 0)
                if text[-1] in stop_token_ids:
                    return
        finally:
            cache.rewind(kept)
            self.running = 0


@pytest.mark.parametrize("turn", [1, 3])
def test_streams_that_take_turns_say_what_each_says_alone(turn):
    def params(seed):
        return SamplingParams(max_tokens=24, temperature=0.9, seed=seed, ignore_eos=True)

    prompts = ["first prompt", "the second", "and a third one"]
    alone = [fake_llm(FakeBackend()).generate(prompt, params(i)).token_ids for i, prompt in enumerate(prompts)]
    backend = AheadBackend()
    llm = fake_llm(backend)
    sessions = [llm.session() for _ in prompts]
    left = {i: sessions[i].stream(prompt, params(i)) for i, prompt in enumerate(prompts)}
    found = {i: [] for i in left}
    while left:
        for i in list(left):
            for _ in range(turn):
                chunk = next(left[i], None)
                if chunk is None:
                    del left[i]
                    break
                found[i] += chunk.token_ids
    assert list(found.values()) == alone
    assert backend.begun > len(prompts)
    assert backend.running == 0


def test_a_stream_that_has_the_device_to_itself_starts_one_loop():
    backend = AheadBackend()
    fake_llm(backend).generate("alone", SamplingParams(max_tokens=24, ignore_eos=True))
    assert backend.begun == 1


def test_a_closed_stream_leaves_the_device_to_others():
    backend = AheadBackend()
    llm = fake_llm(backend)
    stream = llm.session().stream("one", SamplingParams(max_tokens=24, ignore_eos=True))
    next(stream)
    stream.close()
    assert backend.running == 0
    assert llm.generate("two", SamplingParams(max_tokens=4, ignore_eos=True)).completion_tokens == 4
