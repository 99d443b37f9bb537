"""Sessions and LLM: the same tokens by every way of asking; stops, limits and cancelling leave exact state behind."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import EOS, FakeBackend, fake_llm
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream
from slipstream import LLM, RequestError, SamplingParams
from slipstream.backends.base import Round
from slipstream.drafters.testing import ScriptedDrafter

PROMPT = "Once upon a time"


def plain(params, prompt=PROMPT, **backend):
    return fake_llm(FakeBackend(**backend), drafter="none").generate(prompt, params)


def assert_same(a, b):
    assert (a.text, a.token_ids, a.finish_reason, a.completion_tokens) == (
        b.text, b.token_ids, b.finish_reason, b.completion_tokens,
    )  # fmt: skip
    assert a.logprobs == b.logprobs


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([0.0, 1.0]), st.integers(1, 40), st.integers(0, 30), st.integers(1, 3), st.sampled_from([None, 2])
)
def test_stop_in_an_accepted_block_is_the_stop_of_a_plain_decode(temperature, max_tokens, at, length, logprobs):
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=3, logprobs=logprobs)
    whole = plain(params)
    stop = whole.text[at : at + length] or "never there"
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=3, stop=[stop], logprobs=logprobs)
    expected = plain(params)
    llm = fake_llm(drafter=ScriptedDrafter(len(PROMPT), whole.token_ids))
    with llm.session() as session:
        got = session.generate(PROMPT, params)
        assert_same(got, expected)
        assert stop not in got.text
        assert session.kv.tokens == list(PROMPT.encode()) + got.token_ids
        again = session.generate(PROMPT, params)
        assert_same(again, expected)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_reused_prefix_never_changes_tokens(data):
    window = data.draw(st.sampled_from([None, 8]))
    llm = fake_llm(FakeBackend(order=3, window=window))
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=1)
    text = PROMPT
    with llm.session() as session:
        for _ in range(4):
            keep = data.draw(st.integers(0, len(text)))
            text = text[:keep] + data.draw(st.text("ab", min_size=1, max_size=6))
            got = session.generate(text, params)
            assert_same(got, plain(params, text, order=3, window=window))
            text += got.text


def test_follow_up_turn_prefills_only_its_new_tokens():
    backend = FakeBackend()
    with fake_llm(backend).session() as session:
        first = session.chat("hello", SamplingParams(max_tokens=5, logit_bias={i: -1000 for i in range(128, 260)}))
        backend.prefilled.clear()
        second = session.chat("more", SamplingParams(max_tokens=5))
    kept = first.prompt_tokens + first.completion_tokens - 1
    assert second.cached_tokens == kept
    assert sum(backend.prefilled) == second.prompt_tokens - kept - 1
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2


def test_changed_earlier_message_invalidates_exactly_what_follows_it():
    with fake_llm().session() as session:
        session.chat([{"role": "user", "content": "abcdef"}], SamplingParams(max_tokens=4))
        changed = session.chat([{"role": "user", "content": "abcxyz"}], SamplingParams(max_tokens=4))
    assert changed.cached_tokens == len("<user\nabc")  # the start mark is one token


def test_stateless_calls_reuse_the_last_cache():
    llm = fake_llm()
    first = llm.generate(PROMPT, SamplingParams(max_tokens=4))
    again = llm.generate(PROMPT, SamplingParams(max_tokens=4))
    assert (first.cached_tokens, again.cached_tokens) == (0, len(PROMPT) - 1)
    assert again.token_ids == first.token_ids


def test_stream_adds_up_to_its_completion():
    params = SamplingParams(max_tokens=200, logprobs=1, stop=["never"], ignore_eos=True)
    chunks = list(fake_llm(FakeBackend(order=1)).stream(PROMPT, params))
    completion = chunks[-1].completion
    assert all(chunk.completion is None for chunk in chunks[:-1])
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert [t for chunk in chunks for t in chunk.token_ids] == completion.token_ids
    assert [p.logprob for chunk in chunks for p in chunk.pieces] == completion.logprobs
    assert sum(chunk.accepted for chunk in chunks) == completion.speculation.accepted > 0
    assert sum(p.drafted for chunk in chunks for p in chunk.pieces) == completion.speculation.accepted
    assert completion.speculation.rounds == len(chunks)


def test_cancelled_stream_leaves_the_session_exact():
    llm = fake_llm()
    with llm.session() as session:
        stream = session.stream_chat("hi", SamplingParams(max_tokens=50, ignore_eos=True))
        shown = "".join(next(stream).text for _ in range(3))
        stream.close()
        assert session.messages[-1] == {"role": "assistant", "content": shown}
        got = session.generate(PROMPT, SamplingParams(max_tokens=8))
    assert_same(got, plain(SamplingParams(max_tokens=8)))


def test_listener_may_leave_at_the_completion():
    llm = fake_llm()
    with llm.session() as session:
        for stream in (session.stream_chat("hi", SamplingParams(max_tokens=3)), llm.stream("hi")):
            completion = next(chunk.completion for chunk in stream if chunk.completion)
            assert completion.finish_reason in ("stop", "length")
        session.chat("more", SamplingParams(max_tokens=3))  # `stream` is still alive
        assert len(session.messages) == 4


def test_refused_turn_leaves_the_history_alone():
    with fake_llm().session() as session:
        running = session.stream_chat("one")
        next(running)
        before = list(session.messages)
        with pytest.raises(RequestError):
            session.chat("two")
        assert session.messages == before


def test_interrupt_in_a_round_leaves_the_session_exact():
    class Interrupted(FakeBackend):
        def verify(self, cache, tokens):
            logits = super().verify(cache, tokens)
            if len(self.row_counts) == 5:
                raise KeyboardInterrupt
            return logits

    with fake_llm(Interrupted()).session() as session:
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
        got = session.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    assert_same(got, plain(SamplingParams(max_tokens=20, ignore_eos=True)))


def test_closing_a_session_ends_its_stream_and_frees_the_cache():
    backend = FakeBackend()
    session = fake_llm(backend).session()
    stream = session.stream(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    next(stream)
    session.close()
    with pytest.raises(RequestError, match="closed while it streamed"):
        next(stream)
    assert all(cache.closed for cache in backend.caches)
    got = session.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))  # it can be asked again
    assert_same(got, plain(SamplingParams(max_tokens=8, ignore_eos=True)))


def test_two_streams_of_a_session_are_refused_and_of_an_llm_take_turns():
    llm = fake_llm()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with llm.session() as session:
        running = session.stream("a", params)
        next(running)
        with pytest.raises(RequestError, match="still streaming"):
            next(session.stream("b", params))
    both = [llm.stream(text, params) for text in ("one", "two")]
    ends = [chunk for pair in zip(*both, strict=True) for chunk in pair][-2:]
    for text, end in zip(("one", "two"), ends, strict=True):
        assert_same(end.completion, plain(params, text))


def test_end_of_text_ends_the_answer_and_is_counted():
    params = SamplingParams(logit_bias={EOS: 30.0}, max_tokens=9)
    done = fake_llm().generate(PROMPT, params)
    assert (done.text, done.token_ids, done.finish_reason) == ("", [EOS], "stop")
    ignored = fake_llm().generate(PROMPT, SamplingParams(logit_bias={EOS: 30.0}, max_tokens=9, ignore_eos=True))
    assert (ignored.completion_tokens, ignored.finish_reason) == (9, "length")


def test_stop_token_ends_the_answer():
    whole = plain(SamplingParams(max_tokens=20))
    stop = whole.token_ids[7]
    done = plain(SamplingParams(max_tokens=20, stop_token_ids=[stop]))
    assert done.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert done.finish_reason == "stop"


def test_context_end_is_a_length_end():
    done = fake_llm(context=24).generate(PROMPT, SamplingParams(ignore_eos=True))
    assert (done.prompt_tokens + done.completion_tokens, done.finish_reason) == (24, "length")


def test_same_seed_same_tokens_and_the_seed_is_named():
    llm = fake_llm()
    first = llm.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True))
    again = llm.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=first.seed))
    other = llm.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True))
    assert first.token_ids == again.token_ids != other.token_ids


def test_timing_adds_up():
    timing = fake_llm().generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True)).timing
    assert 0 < timing.prefill_s <= timing.ttft_s
    assert timing.decode_s > 0
    assert timing.tokens_per_s * timing.decode_s <= 19.001


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda llm: llm.stream(""), "empty"),
        (lambda llm: llm.stream([]), "empty"),
        (lambda llm: llm.stream([1, 999]), "999.*0 to 259"),
        (lambda llm: llm.stream([-1]), "-1"),
        (lambda llm: llm.stream("x" * 5000), "5000.*4096"),
        (lambda llm: llm.stream_chat([]), "no messages"),
        (lambda llm: llm.stream_chat(""), "empty"),
        (lambda llm: llm.session().stream_chat(""), "empty"),
        (lambda llm: llm.session(drafter="oracle"), "none, suffix"),
        (lambda llm: llm.session(drafts=16), "15"),
        (lambda llm: llm.session(prefill_chunk=0), "at least 1"),
        (lambda llm: fake_llm(drafter="oracle"), "none, suffix"),
        (lambda llm: fake_llm(drafts=-1), "drafts"),
        (lambda llm: fake_llm(context=5000), "4096"),
        (lambda llm: fake_llm(context=1), "context"),
    ],
)
def test_bad_requests_are_refused_before_any_work(ask, says):
    backend = FakeBackend()
    with pytest.raises(RequestError, match=says) as error:
        ask(fake_llm(backend))
    assert "\n" not in str(error.value)
    assert not backend.row_counts


def test_mask_sees_accepted_tokens_and_shapes_the_answer():
    def only_digits_rising(output, logits):
        logits[[i for i in range(len(logits)) if i != ord("0") + len(output) % 10]] = float("-inf")

    done = fake_llm().generate(PROMPT, SamplingParams(max_tokens=12), mask=only_digits_rising)
    assert done.text == "012345678901"


class Device(FakeBackend):
    """Decodes without the host, one drafted token a round, from its own greedy rule."""

    def __init__(self):
        super().__init__()
        self.closed = 0

    def rounds(self, cache, tokens, *, drafts, limit, stop_token_ids, **sampling):
        try:
            text = tokens.tolist()
            while limit > 0:
                round = []
                for _ in range(min(1 + (drafts > 0), limit)):
                    text.append(int(self.verify(cache, np.array(text[-1:], np.int32))[0].argmax()))
                    round.append(text[-1])
                    if text[-1] in stop_token_ids:
                        break
                limit -= len(round)
                yield Round(round, drafts and 1, len(round) - 1)
                if round[-1] in stop_token_ids:
                    return
        finally:
            self.closed += 1


def test_device_rounds_give_the_same_text_stops_and_state():
    whole = plain(SamplingParams(max_tokens=30))
    for stop in ([], [whole.text[5:7]], [whole.text[8:10]]):
        params = SamplingParams(max_tokens=30, stop=stop)
        backend = Device()
        with fake_llm(backend).session() as session:
            got = session.generate(PROMPT, params)
            assert_same(got, plain(params))
            follow_up = session.generate(PROMPT + "x", params)
            assert_same(follow_up, plain(params, PROMPT + "x"))
            assert follow_up.cached_tokens == len(PROMPT)
        assert backend.closed == 2


def test_device_steps_aside_where_the_host_must_see_a_row():
    backend = Device()
    fake_llm(backend).generate(PROMPT, SamplingParams(max_tokens=5, logprobs=1))
    assert backend.closed == 0


def test_public_names_load_on_first_use():
    assert slipstream.LLM is LLM
    assert set(slipstream.__all__) <= set(dir(slipstream))
    for name in slipstream.__all__:
        assert getattr(slipstream, name).__name__ == name
    with pytest.raises(AttributeError):
        slipstream.Nothing  # noqa: B018
