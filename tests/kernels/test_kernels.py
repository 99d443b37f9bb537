"""Every kernel against its reference in float64, on fresh random inputs, its outputs poisoned with NaN before.

Of quantised weights the reference takes the values that the codes stand for, so its error is the activations' alone.
"""

import pytest
import torch

from slipstream.kernels import attention, embed, gate_up, head, norm_qkv, projection
from slipstream.kernels.formats import FORMATS
from slipstream.kernels.launch import ROWS

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 1e-5, F16: 1e-3, BF16: 1e-2}


def check(case, dtype):
    case.run()
    for name, expected in case.expected().items():
        error = (case.outputs[name].double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"  # NaN fails too


dtypes = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])


@dtypes
def test_embed_copies_the_tokens_rows(dtype, device):
    check(embed.case(hidden=96, vocab=50, dtype=dtype, device=device), dtype)


@dtypes
@pytest.mark.parametrize("options", [{}, {"rows": 3}, {"bias": True, "head_norm": True}], ids=str)
def test_norm_qkv_matches_its_reference(dtype, device, options):
    check(norm_qkv.case(96, heads=3, kv_heads=1, d=32, dtype=dtype, device=device, **options), dtype)


formats = pytest.mark.parametrize("format", FORMATS)


@formats
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
def test_gate_up_takes_quantised_weights(format, dtype, device):
    check(gate_up.case(96, inner=32, dtype=dtype, device=device, format=format), dtype)


@formats
def test_projections_take_quantised_weights_over_several_tiles_and_groups_that_are_not_full(format, device):
    check(projection.case(16, k=1312, dtype=F16, device=device, format=format), F16)
    check(projection.case(16, k=96, dtype=F16, device=device, splits=2, d=32, format=format), F16)


@formats
def test_norm_qkv_and_head_take_quantised_weights(format, device):
    check(norm_qkv.case(160, heads=1, kv_heads=1, d=32, dtype=F16, device=device, format=format), F16)
    check(head.case(160, vocab=45, dtype=F16, device=device, format=format), F16)


def test_norm_qkv_sums_over_several_tiles(device):
    check(norm_qkv.case(1088, heads=1, kv_heads=1, d=32, dtype=F32, device=device), F32)


@dtypes
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_attention_matches_softmax_over_what_each_row_sees(dtype, device, window, rows):
    check(attention.case(6, kv_heads=2, d=16, dtype=dtype, device=device, rows=rows, window=window), dtype)


@dtypes
@pytest.mark.parametrize(("splits", "rows"), [(0, ROWS), (0, 2), (1, ROWS), (3, 5)])
def test_projection_adds_to_the_residual_stream(dtype, device, splits, rows):
    check(projection.case(48, k=96, dtype=dtype, device=device, rows=rows, splits=splits), dtype)


@dtypes
def test_gate_up_matches_its_reference(dtype, device):
    check(gate_up.case(96, inner=64, dtype=dtype, device=device), dtype)


@dtypes
def test_head_matches_its_reference_where_the_vocabulary_is_no_multiple_of_the_tile(dtype, device):
    check(head.case(96, vocab=75, dtype=dtype, device=device), dtype)
