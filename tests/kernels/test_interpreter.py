"""What the interpreter computes is what a GPU does, where tests depend on it."""

import torch
import triton
import triton.language as tl


@triton.jit
def narrow(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


def test_bfloat16_is_rounded_to_nearest_even(device):
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])
    x = torch.cat([torch.randn(1016), odd]).to(device)
    out = torch.full((1024,), 7.0, dtype=torch.bfloat16, device=device)
    narrow[(1,)](x, out, 1024)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
