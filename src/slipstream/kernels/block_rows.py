"""The rows of a block draft: the anchor's embedding, then masks; where they stand and what they see."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels import attention
from slipstream.kernels.attention import SEEN_FROM, SEEN_FROM_
from slipstream.kernels.launch import (
    ROWS,
    RUN_ROWS,
    RUN_ROWS_,
    START,
    START_,
    STATE_SIZE,
    Case,
    Cost,
    launch,
    nbytes,
    poisoned,
)


@triton.jit
def kernel(tokens, table, mask, first, state, out, block, span, hidden, window, drafts, BLOCK: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    start = tl.load(state + START_)
    token = tl.load(tokens + start).to(tl.int64)
    for i in range(0, hidden, BLOCK):
        at = i + tl.arange(0, BLOCK)
        if row == 0:
            x = tl.load(table + token * hidden + at, mask=at < hidden).to(tl.float32)
        else:
            x = tl.load(mask + at, mask=at < hidden)
        tl.store(out + row * hidden + at, x, mask=at < hidden)
    if row == 0:
        seen_from = tl.maximum(tl.load(first), start - window)
        tl.store(block + START_, start)
        tl.store(block + RUN_ROWS_, drafts)
        tl.store(block + SEEN_FROM_, seen_from)
        tl.store(span + START_, start - seen_from // attention.BLOCK_ * attention.BLOCK_)
        tl.store(span + RUN_ROWS_, drafts)


def block_rows(
    tokens: torch.Tensor, table: torch.Tensor, mask: torch.Tensor, first: torch.Tensor, state: torch.Tensor,
    out: torch.Tensor, block: torch.Tensor, span: torch.Tensor, window: int | None, drafts: int, pdl: bool = False,
) -> None:  # fmt: skip
    """tokens: the text, int32; table (vocab, hidden), mask (hidden,) float32, first () int32: the least position that
    may be seen -> out (ROWS, hidden) float32.

    Writes two states of the rows: `block` with START, RUN_ROWS and SEEN_FROM, and `span`, whose START counts from where
    attention's first part begins, so that the projection merges just the parts there are.
    """
    launch(kernel, (ROWS,), tokens, table, mask, first, state, out, block, span, table.shape[1], window or 1 << 30,
           drafts, pdl=pdl, BLOCK=1024)  # fmt: skip


def case(hidden: int, dtype: torch.dtype, device: torch.device, start: int, window: int | None, first: int) -> Case:
    tokens = torch.randint(50, (start + 1,), dtype=torch.int32, device=device)
    table, mask = torch.randn(50, hidden, dtype=dtype, device=device), torch.randn(hidden, device=device)
    state = torch.zeros(STATE_SIZE, dtype=torch.int32, device=device)
    state[START] = start
    out = poisoned(ROWS, hidden, dtype=torch.float32, device=device)
    block, span = (torch.full((3,), -1, dtype=torch.int32, device=device) for _ in range(2))

    def expected() -> dict[str, torch.Tensor]:
        seen_from = max(first, start - (window or start))
        before = start - seen_from // attention.BLOCK * attention.BLOCK
        says = torch.tensor([[start, 7, seen_from], [before, 7, -1]], dtype=torch.float64, device=device)
        rows = torch.cat([table[tokens[start].long()].double()[None], mask.double().expand(ROWS - 1, -1)])
        return {"out": rows, "block": says[0], "span": says[1]}

    assert (START, RUN_ROWS, SEEN_FROM) == (0, 1, 2)
    return Case(
        lambda: block_rows(tokens, table, mask, torch.tensor(first, dtype=torch.int32, device=device), state, out,
                           block, span, window, 7),
        {"out": out, "block": block, "span": span}, expected, Cost(nbytes(out, mask), 0),
    )  # fmt: skip
