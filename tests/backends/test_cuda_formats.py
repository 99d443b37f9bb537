"""Quantised weights on the GPU backend: their values, what is taken from files as it is, and exactness with each.

In Triton's interpreter without a GPU.
"""

import numpy as np
import pytest
from interpreter import DEVICE, GPU, torch
from tiny import write_tiny_checkpoint, write_tiny_gguf

from slipstream.backends import open_backend
from slipstream.backends.cuda.backend import CudaBackend
from slipstream.backends.cuda.chain import Chain
from slipstream.backends.cuda.prefill import prefill
from slipstream.backends.cuda.weights import WEIGHTS, load
from slipstream.cli.options import weights_option
from slipstream.engine import sampling
from slipstream.errors import BackendError
from slipstream.kernels import attention, gate_up, head, norm_qkv, projection
from slipstream.kernels.formats import FORMATS, FP8, quantise
from slipstream.kernels.matrix import dense
from slipstream.models.checkpoint import load_checkpoint
from slipstream.models.spec import Attention, FeedForward, Layer, ModelSpec, Rope, WeightTensor
from slipstream.models.tensors import BlockScaled, dequantise, e4m3_values

formats = pytest.mark.parametrize("format", FORMATS)
ERRORS = {"fp8": 0.035, "int4": 0.09, "int4-128": 0.11, "mxfp4": 0.13}
"""Of normal values; a coder that rounds wrongly or wastes codes exceeds them."""


@pytest.fixture(autouse=True)
def short_graphs(monkeypatch):
    """The interpreter takes its time even for rounds after the last."""
    if not GPU:
        monkeypatch.setattr("slipstream.backends.cuda.rounds.UNROLLED", 1)
        monkeypatch.setattr("slipstream.backends.cuda.rounds.AHEAD", 1)


def small(hidden=32, layers=2):
    a = Attention(1, 1, 32, Rope(tuple(1e4 ** (-i / 8) for i in range(16))), 0.2)
    return ModelSpec("llama", 40, hidden, (Layer(a, FeedForward(64)),) * layers, 1e-5, 512, True)


def backend(format, spec=None, **options):
    weights = load(spec or small(), None, torch.device(DEVICE), format=format)
    return CudaBackend(spec or small(), weights=weights, device=DEVICE, **options)


@formats
def test_codes_are_near_the_values_and_unpack_to_what_they_stand_for(format):
    x = torch.randn(64, 352, device=DEVICE) * torch.rand(64, 1, device=DEVICE)
    q = quantise(x, format)
    assert q.shape == (64, 352)
    assert (q.double() - x).norm() / x.norm() < ERRORS[format]
    assert torch.equal(dense(q), q.double().half())
    assert torch.equal(torch.cat([m.double() for m in q.chunk(2)]), q.double())
    assert torch.equal(q[16:].double(), q.double()[16:])


@formats
def test_values_that_a_format_has_are_kept(format):
    """Zeros, one value alone, and a group's own codes."""
    x = torch.zeros(3, 64)
    x[1] = 1.5
    torch.testing.assert_close(quantise(x, format).double(), x.double(), rtol=1e-6, atol=0)
    again = quantise(torch.randn(8, 64), format).double()
    assert (quantise(again.float(), format).double() - again).norm() / again.norm() < 1e-3


class Stored(WeightTensor):
    """A tensor of a file."""

    def __init__(self, format, raw, shape):
        self.format, self.stored, self.shape = format, raw, shape

    def raw(self):
        return self.stored

    def float32(self):
        if self.format == "F8_E4M3":
            return e4m3_values()[self.stored]
        return dequantise(self.stored, self.format).reshape(self.shape)


def filled(spec, tensor_of):
    norm = {n: Stored("F32", np.ones((1, s[0]), np.float32).view(np.uint8), s)
            for n, s in spec.tensor_shapes().items() if len(s) == 1}  # fmt: skip
    return {n: tensor_of(s) for n, s in spec.tensor_shapes().items() if len(s) == 2} | norm


@pytest.mark.parametrize(("stored", "format"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("MXFP4", "mxfp4")])
def test_blocks_of_a_gguf_are_taken_as_they_are(stored, format):
    """The device's values are the file's, not codes of codes."""
    from gguf import GGMLQuantizationType, quants

    rng = np.random.default_rng()

    def tensor(shape):
        x = rng.standard_normal(shape).astype(np.float32)
        return Stored(stored, quants.quantize(x, GGMLQuantizationType[stored]), shape)

    spec = small()
    tensors = filled(spec, tensor)
    w = load(spec, tensors, torch.device(DEVICE), format=format)
    gate, down = tensors["layers.1.gate"].float32(), tensors["layers.1.down"].float32()
    assert np.array_equal(w.layers[1].gate_up[:64].double().cpu().numpy().astype(np.float32), gate)
    assert np.array_equal(w.layers[1].down.double().cpu().numpy().astype(np.float32), down)


def test_fp8_of_a_checkpoint_is_taken_with_its_scales():
    rng = np.random.default_rng()

    def tensor(shape):
        codes = rng.integers(0, 0x70, shape).astype(np.uint8)
        scales = rng.random((-(-shape[0] // 128), -(-shape[1] // 128)), np.float32)
        one = Stored("F32", scales.view(np.uint8), scales.shape)
        return BlockScaled(Stored("F8_E4M3", codes, shape), one)

    a = Attention(2, 1, 64, Rope(tuple(1e4 ** (-i / 8) for i in range(32))), 0.2)
    spec = ModelSpec("llama", 40, 160, (Layer(a, FeedForward(144)),), 1e-5, 512, True)
    tensors = filled(spec, tensor)
    w = load(spec, tensors, torch.device(DEVICE), format="fp8")
    down = tensors["layers.0.down"].float32()
    assert np.array_equal(w.layers[0].down.double().cpu().numpy().astype(np.float32), down)
    assert np.array_equal(w.head.double().cpu().numpy().astype(np.float32), tensors["embed"].float32())


@formats
def test_logits_are_those_of_the_values_that_the_codes_stand_for(format):
    b, tokens = backend(format), np.random.default_rng().integers(40, size=12).astype(np.int32)
    spec, w = b.spec, b.weights
    assert isinstance(b.pass_, Chain)
    assert w.quantised
    assert w.head.format == FP8
    h = w.embed.double()[torch.from_numpy(tokens).long().to(DEVICE)]
    for layer, lw in zip(spec.layers, w.layers, strict=True):
        a = layer.attention
        q, k, v = norm_qkv.reference(h, lw.attention_norm, lw.qkv, None, None, lw.cos_sin, 0, 1, 1, spec.norm_eps)
        o = attention.reference(q, k.transpose(0, 1), v.permute(1, 2, 0), 0, a.softmax_scale, None)
        h = projection.reference(o.flatten(1), lw.o, h)
        h = projection.reference(gate_up.reference(h, lw.ffn_norm, *lw.gate_up.chunk(2), spec.norm_eps), lw.down, h)
    expected = head.reference(h, w.final_norm, w.head, spec.norm_eps).cpu().numpy()
    ours = b.verify(b.new_cache(64), tokens)
    assert np.linalg.norm(ours - expected) / np.linalg.norm(expected) < 1e-2
    fast, exact = b.new_cache(64), b.new_cache(64)
    prefill(spec, w, fast, torch.from_numpy(tokens).to(DEVICE))
    b.prefill(exact, tokens)
    assert (fast.keys - exact.keys).norm() / exact.keys.norm() < 1e-2


@formats
def test_no_draft_and_no_company_changes_a_token_or_a_bit(format):
    b = backend(format, small(layers=1))
    prompt = np.tile(np.random.default_rng(1).integers(40, size=3), 2).astype(np.int32)
    limit = 40 if GPU else 3
    cache, tokens, alone = b.new_cache(64), prompt.tolist(), []
    b.prefill(cache, prompt[:-1])
    for _ in range(limit):
        alone.append(b.verify(cache, np.array(tokens[-1:], np.int32))[0].copy())
        tokens.append(sampling.sample(alone[-1], 0.7, 0, 1.0, 0.0, 5, len(tokens)))
    together = b.new_cache(64)
    b.prefill(together, prompt[:-1])
    rows = np.array(tokens[len(prompt) - 1 : -1][:16], np.int32)
    assert np.array_equal(b.verify(together, rows), np.stack(alone[: len(rows)]))
    for drafts in (0, 5) if GPU else (5,):
        cache = b.new_cache(64)
        b.prefill(cache, prompt[:-1])
        rounds = b.rounds(cache, prompt, temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, seed=5, drafts=drafts,
                          limit=limit, stop_token_ids=())  # fmt: skip
        assert [t for r in rounds for t in r.tokens] == tokens[len(prompt) :]


@pytest.mark.parametrize("write", [write_tiny_checkpoint, write_tiny_gguf], ids=["safetensors", "gguf"])
@formats
def test_files_in_other_formats_are_quantised_at_load(tmp_path, write, format):
    path = write(tmp_path if write is write_tiny_checkpoint else tmp_path / "m.gguf", head_dim=32)
    checkpoint = load_checkpoint(path)
    b = CudaBackend(checkpoint.spec, checkpoint.tensors, device=DEVICE, format=format)
    plain = CudaBackend(checkpoint.spec, checkpoint.tensors, device=DEVICE)
    assert b.memory_bytes() < 0.7 * plain.memory_bytes()
    ours, theirs = b.weights.layers[0].down.double(), plain.weights.layers[0].down.double()
    assert (ours - theirs).norm() / theirs.norm() < ERRORS[format]


def test_what_cannot_be_is_refused_in_words(tmp_path):
    with pytest.raises(BackendError, match="multiples of 32"):
        backend("int4", small(hidden=48))
    with pytest.raises(BackendError, match="use one of auto, bf16, fp8"):
        CudaBackend(small(), device=DEVICE, format="int3")
    with pytest.raises(BackendError, match="for the cuda backend"):
        open_backend(load_checkpoint(write_tiny_checkpoint(tmp_path)), "cpu", weights="fp8")


def test_the_command_line_names_the_formats_there_are():
    @weights_option
    def command(weights):
        pass

    assert tuple(command.__click_params__[0].type.names) == WEIGHTS
