"""Keys, values and the text of one stream on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from slipstream.kernels.launch import ROWS, STATE_SIZE
from slipstream.models.spec import ModelSpec

if TYPE_CHECKING:
    from slipstream.backends.cuda.drafter import DraftMemory

KEPT = 4
"""Closed caches kept for reuse."""


class CudaCache:
    """keys (layers, kv_heads, positions, d), values (layers, kv_heads, d, positions): tiles of both load in whole
    sectors. Sliding-window layers keep every position too, so any length can be rewound to.

    control: `state` and the rows' tokens, one upload; tokens: the text, read by the device's drafter.
    programs: captured graphs over these buffers, by kind and rows; workspace: what the pass keeps beside them.
    drafts: what a block drafter remembers of the text, where one is loaded.
    closed: where `close` leaves this cache for the backend to take up again, its programs still valid.
    """

    def __init__(self, spec: ModelSpec, capacity: int, device: torch.device, dtype: torch.dtype,
                 closed: list[CudaCache]) -> None:  # fmt: skip
        a = spec.layers[0].attention
        positions = self.positions = -(-capacity // 64) * 64
        layers = len(spec.layers)
        self.keys = torch.zeros(layers, a.kv_heads, positions, a.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(layers, a.kv_heads, a.head_dim, positions, dtype=dtype, device=device)
        self.tokens = torch.zeros(positions + 1 + ROWS, dtype=torch.int32, device=device)
        self.control = torch.zeros(STATE_SIZE + ROWS, dtype=torch.int32, device=device)
        self.state, self.row_tokens = self.control[:STATE_SIZE], self.control[STATE_SIZE:]
        self.programs: dict[tuple[str, int], Callable[[], None]] = {}
        self.workspace: Sequence[torch.Tensor] | None = None
        self.drafts: DraftMemory | None = None
        self._closed = closed
        self.reopen(capacity)

    def reopen(self, capacity: int) -> CudaCache:
        self.length, self.capacity, self.closed = 0, capacity, False
        if self.drafts is not None:
            self.drafts.follow(0, 0)
        return self

    def can_rewind(self, length: int) -> bool:
        return 0 <= length <= self.length

    def rewind(self, length: int) -> None:
        if not self.can_rewind(length):
            raise ValueError(f"cannot rewind a cache of {self.length} positions to {length}")
        self.length = length

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._closed.append(self)
            del self._closed[:-KEPT]
