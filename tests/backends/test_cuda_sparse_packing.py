"""Packed weights, taken apart as sparse.cu does it, are the weights."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from slipstream.backends.cuda import sparse_weights as packing  # noqa: E402
from slipstream.models.spec import WeightTensor  # noqa: E402
from slipstream.models.tensors import BlockScaled, e4m3_values  # noqa: E402

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Held(WeightTensor):
    def __init__(self, values, raw, format):
        self.values, self.bytes, self.format, self.shape = values, raw, format, values.shape

    def raw(self):
        return self.bytes

    def float32(self):
        return self.values


def bf16_values(words):
    """The two bf16 of each 32-bit word, (..., 2) float64."""
    halves = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint32)
    return (halves << 16).view(np.float32).astype(np.float64)


def matrix(operands, tiles, columns):
    """operands (tiles, k / 32, g, c, product, register, element), registers a0..a3 -> (tiles * 16, columns)."""
    x = operands.reshape(tiles, columns // 32, 8, 4, 2, 2, 2, 2)  # register = (half, upper)
    return x.transpose(0, 6, 2, 1, 3, 4, 5, 7).reshape(tiles * 16, columns)


def test_bf16_fragments_hold_the_matrix():
    x = torch.randn(32, 64).bfloat16()
    w = packing.pack_bf16(x, packing.natural(32)).numpy().view(np.uint32).reshape(2, 2, 2, 8, 4, 4)
    operands = bf16_values(w).transpose(0, 1, 3, 4, 2, 5, 6)
    assert (matrix(operands, 2, 64) == x.double().numpy()).all()


def test_fp8_words_unpack_to_values_times_a_power_of_two():
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 127, (256, 256)).astype(np.uint8) | (rng.integers(0, 2, (256, 256)) << 7).astype(np.uint8)
    raw[raw & 127 == 127] = 1
    scales = rng.uniform(0.5, 2, (2, 2)).astype(np.float32)
    tensor = BlockScaled(Held(e4m3_values()[raw], raw, "F8_E4M3"), Held(scales, scales, "F32"))
    assert packing.format_of(tensor) == packing.FP8
    w, s = packing.pack([tensor], packing.natural(256), torch.device("cpu"))
    w = w.numpy().view(np.uint32).reshape(16, 8, 8, 4, 2, 2)
    upper = w >> 4 & 0x07F007F0 | w & 0x80008000
    lower = w << 4 & 0x07F007F0 | w << 8 & 0x80008000
    operands = bf16_values(np.stack([upper, lower], -1)) * 2.0**120
    by_row = s.numpy().reshape(16, 2, 2).transpose(0, 2, 1).repeat(8, 1).reshape(256, 2).repeat(128, 1)
    np.testing.assert_allclose(matrix(operands, 16, 256) * by_row, tensor.float32(), rtol=1e-6)  # scaled in float32


def test_mxfp4_words_unpack_by_shifts_and_masks():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (32, 4, 32), np.uint8)
    exponents = rng.integers(110, 130, (32, 4, 1), np.uint8)
    raw = np.concatenate([exponents, codes[..., :16] | codes[..., 16:] << 4], -1).reshape(32, -1)
    values = (E2M1[codes] * np.exp2(exponents.astype(np.float64) - 127)).reshape(32, 128)
    w, s = packing.pack([Held(values, raw, "MXFP4")], packing.natural(32), torch.device("cpu"))
    w = w.numpy().view(np.uint32).reshape(2, 2, 8, 4, 2, 2)
    a = [w & 0x81C081C0, w << 3 & 0x81C081C0, w << 6 & 0x81C081C0]
    a.append(w << 1 & 0x80008000 | w >> 5 & 0x01000100 | w >> 4 & 0x00C000C0)
    operands = bf16_values(np.stack(a, -1)) * 2.0**126  # (tile, k / 64, g, c, k / 32, product, register, element)
    operands = operands.transpose(0, 1, 4, 2, 3, 5, 6, 7)
    groups = np.exp2(s.numpy().reshape(2, 2, 8, 2, 2).astype(np.float64) - 127 - 62)  # (tile, k / 64, g, upper, k / 32)
    by_row = groups.transpose(0, 3, 2, 1, 4).reshape(32, 4).repeat(32, 1)
    assert (matrix(operands, 2, 128) * by_row == values).all()


def test_gate_and_up_take_turns_of_eight_rows():
    rows = packing.gate_up(16)
    assert rows.tolist() == [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]
