"""Keys, values and the text of one stream on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.kernels.launch import ROWS, STATE_SIZE
from slipstream.models.spec import ModelSpec


class CudaCache:
    """keys (layers, kv_heads, positions, d), values (layers, kv_heads, d, positions): tiles of both load in whole
    sectors. Sliding-window layers keep every position too, so any length can be rewound to.

    control: `state` and the rows' tokens, one upload; tokens: the text, read by the device's drafter.
    programs: captured graphs over these buffers, by name.
    """

    def __init__(self, spec: ModelSpec, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        a = spec.layers[0].attention
        positions = -(-capacity // 64) * 64
        layers = len(spec.layers)
        self.keys = torch.zeros(layers, a.kv_heads, positions, a.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(layers, a.kv_heads, a.head_dim, positions, dtype=dtype, device=device)
        self.tokens = torch.zeros(capacity + 1 + ROWS, dtype=torch.int32, device=device)
        self.control = torch.zeros(STATE_SIZE + ROWS, dtype=torch.int32, device=device)
        self.state, self.row_tokens = self.control[:STATE_SIZE], self.control[STATE_SIZE:]
        self.programs: dict[str, Callable[[], None]] = {}
        self.length = 0
        self.capacity = capacity
        self.closed = False

    def can_rewind(self, length: int) -> bool:
        return 0 <= length <= self.length

    def rewind(self, length: int) -> None:
        if not self.can_rewind(length):
            raise ValueError(f"cannot rewind a cache of {self.length} positions to {length}")
        self.length = length

    def close(self) -> None:
        self.programs.clear()
        if not self.closed:
            del self.keys, self.values
        self.closed = True
