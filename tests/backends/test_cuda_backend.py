"""The GPU backend on a tiny random model: in Triton's interpreter without a GPU, through captured graphs with one."""

import dataclasses

import numpy as np
import pytest
from interpreter import DEVICE, GPU, torch

from slipstream.backends.cuda.backend import CudaBackend
from slipstream.backends.cuda.prefill import prefill
from slipstream.backends.cuda.weights import load
from slipstream.engine import sampling
from slipstream.errors import BackendError
from slipstream.kernels import attention, gate_up, head, norm_qkv, projection
from slipstream.models.spec import Attention, FeedForward, Layer, ModelSpec, Rope

LIMIT = 60 if GPU else 8


def tiny(window=None, extras=False, layers=2, vocab=64):
    rope = Rope(tuple(1e4 ** (-i / 8) for i in range(16)))
    a = Attention(4, 2, 32, rope, 0.2, window, qkv_bias=extras, qk_norm=extras)
    return ModelSpec("llama", vocab, 32, (Layer(a, FeedForward(48)),) * layers, 1e-5, 512, True)


def small():
    """Few programs a pass: the interpreter takes a millisecond for each."""
    a = Attention(1, 1, 32, Rope(tuple(1e4 ** (-i / 8) for i in range(16))), 0.2)
    return ModelSpec("llama", 16, 16, (Layer(a, FeedForward(16)),), 1e-5, 512, True)


def backend(spec, **options):
    dtype = torch.float16 if GPU else torch.float32
    return CudaBackend(spec, weights=load(spec, None, torch.device(DEVICE), dtype), device=DEVICE, **options)


def reference_logits(b, tokens):
    """(n, vocab) float64: the kernels' references chained over the whole text."""
    spec, w = b.spec, b.weights
    h = w.embed.double()[torch.tensor(tokens, device=DEVICE)]
    for layer, lw in zip(spec.layers, w.layers, strict=True):
        a = layer.attention
        q, k, v = norm_qkv.reference(h, lw.attention_norm, lw.qkv, lw.qkv_bias, lw.head_norm, lw.cos_sin, 0, a.heads,
                                     a.kv_heads, spec.norm_eps)  # fmt: skip
        o = attention.reference(q, k.transpose(0, 1), v.permute(1, 2, 0), 0, a.softmax_scale, a.window)
        h = projection.reference(o.flatten(1), lw.o, h)
        inner = gate_up.reference(h, lw.ffn_norm, *lw.gate_up.chunk(2), spec.norm_eps)
        h = projection.reference(inner, lw.down, h)
    return head.reference(h, w.final_norm, w.head, spec.norm_eps).cpu().numpy()


def text(n, vocab=64, seed=0):
    return np.random.default_rng(seed).integers(vocab, size=n).astype(np.int32)


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"extras": True}], ids=str)
def test_logits_match_the_reference_in_float64(options):
    b, tokens = backend(tiny(**options)), text(40)
    cache = b.new_cache(64)
    b.prefill(cache, tokens[:30])
    ours = np.concatenate([b.verify(cache, tokens[30:37]).copy(), b.verify(cache, tokens[37:])])
    expected = reference_logits(b, tokens.tolist())[30:]
    assert np.linalg.norm(ours - expected) / np.linalg.norm(expected) < (1e-2 if GPU else 1e-5)


def test_a_row_has_the_same_bits_in_any_company():
    b, tokens = backend(tiny()), text(36)
    rows = []
    for chunks in ([20, 16], [7, 13, 1, 15], [20, *[1] * 16]):
        cache, at, got = b.new_cache(64), 0, []
        for n in chunks:
            if n > 16:
                b.prefill(cache, tokens[at : at + n])
            else:
                got.append(b.verify(cache, tokens[at : at + n]).copy())
            at += n
        rows.append(np.concatenate(got)[-15:])
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def decode(b, prompt, limit, drafts, stop=(), close_after=None, **knobs):
    knobs = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5} | knobs
    cache = b.new_cache(128)
    b.prefill(cache, prompt[:-1])
    out, rounds = [], b.rounds(cache, prompt, drafts=drafts, limit=limit, stop_token_ids=stop, **knobs)
    for i, done in enumerate(rounds):
        out += done.tokens
        if close_after == i + 1:
            rounds.close()
            break
    assert cache.length == len(prompt) - 1 + len(out)
    return out, cache


def by_hand(b, prompt, limit, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=5):
    """One row a pass, sampled by the engine's rule on the host."""
    cache, tokens = b.new_cache(128), prompt.tolist()
    b.prefill(cache, prompt[:-1])
    for _ in range(limit):
        logits = b.verify(cache, np.array(tokens[-1:], np.int32))[0]
        tokens.append(sampling.sample(logits, temperature, top_k, top_p, min_p, seed, len(tokens)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("knobs", [{}, {"temperature": 0.6}, {"temperature": 0.9, "top_k": 8, "top_p": 0.9}], ids=str)
def test_drafts_never_change_the_tokens_of_the_rule(knobs):
    b = backend(small())
    prompt = np.tile(text(5, 16), 2)
    expected = by_hand(b, prompt, LIMIT, **knobs)
    for drafts in (0, 3, 15) if GPU else (5,):
        assert decode(b, prompt, LIMIT, drafts, **knobs)[0] == expected


def test_rounds_end_at_stop_tokens_and_limits_and_go_on_from_there():
    b = backend(small())
    prompt = text(9, 16)
    expected = by_hand(b, prompt, 12)
    stop = expected[7]
    first = expected.index(stop)
    out, cache = decode(b, prompt, 12, 3, stop=(stop,))
    assert out == expected[: first + 1]
    rest = b.rounds(cache, np.concatenate([prompt, np.array(out, np.int32)]), temperature=0.0, top_k=0, top_p=1.0,
                    min_p=0.0, seed=5, drafts=3, limit=12 - len(out), stop_token_ids=())  # fmt: skip
    assert out + [t for r in rest for t in r.tokens] == expected


def test_closing_early_leaves_exactly_the_yielded_tokens():
    b = backend(small())
    prompt = text(9, 16)
    out, _ = decode(b, prompt, 16, 0, close_after=2)
    assert out == by_hand(b, prompt, 2)
    assert decode(b, prompt, 5, 0)[0] == by_hand(b, prompt, 5)


def test_logits_that_are_not_finite_end_the_answer_with_an_error_and_no_token():
    spec = dataclasses.replace(small(), tied_embeddings=False)
    b, prompt = backend(spec), np.tile(text(2, 16), 3)
    expected = by_hand(b, prompt, 8, temperature=2.0)
    fatal = next(t for t in expected if t not in prompt)
    b.weights.embed[fatal] = float("nan")  # no pass that reads this token has numbers
    cache, out = b.new_cache(128), []
    b.prefill(cache, prompt[:-1])
    rounds = b.rounds(cache, prompt, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, drafts=2, limit=12,
                      stop_token_ids=())  # fmt: skip
    with pytest.raises(BackendError, match="no finite logits"):
        out.extend(t for r in rounds for t in r.tokens)
    assert out == expected[: expected.index(fatal) + 1]


def test_what_cannot_run_is_refused_by_name():
    spec = tiny()
    part = Attention(4, 2, 32, Rope((1.0,)), 0.25)
    with pytest.raises(BackendError, match="rotary"):
        backend(ModelSpec("x", 64, 32, (Layer(part, FeedForward(48)),), 1e-5, 512, True))
    with pytest.raises(ValueError, match="do not fit"):
        backend(spec).prefill(backend(spec).new_cache(4), text(5))


def test_taps_hold_the_residual_stream_of_chosen_layers_in_passes_and_in_prefill():
    b, tokens = backend(tiny(), engine="chain"), text(7)
    w = b.weights
    h = [w.embed.double()[torch.from_numpy(tokens).long().to(DEVICE)]]
    for layer, lw in zip(b.spec.layers, w.layers, strict=True):
        a, x = layer.attention, h[-1]
        q, k, v = norm_qkv.reference(x, lw.attention_norm, lw.qkv, None, None, lw.cos_sin, 0, 4, 2, b.spec.norm_eps)
        o = attention.reference(q, k.transpose(0, 1), v.permute(1, 2, 0), 0, a.softmax_scale, None).flatten(1)
        x = projection.reference(o, lw.o, x)
        inner = gate_up.reference(x, lw.ffn_norm, *lw.gate_up.chunk(2), b.spec.norm_eps)
        h.append(projection.reference(inner, lw.down, x))
    expected = torch.stack([h[2], h[1]])
    taps = b.pass_.tap([1, 0])
    cache = b.new_cache(16)
    b.verify(cache, tokens)
    ahead = prefill(b.spec, w, b.new_cache(16), torch.from_numpy(tokens).to(DEVICE), [1, 0])
    for found in (taps[:, :7], ahead):
        assert (found - expected).norm() / expected.norm() < (1e-2 if GPU else 1e-5)
