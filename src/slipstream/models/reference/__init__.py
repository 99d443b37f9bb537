"""The whole forward pass in plain PyTorch: the oracle that every backend and kernel is checked against.

    tokens -> embed -> [ x + attend(norm(x)) -> x + feed_forward(norm(x)) ] * layers -> norm -> head -> logits

Naive on purpose, and more precise than what it judges: weights dequantised to float32 or float64, angles computed in
float64, every key kept. `attention.py` and `feed_forward.py` hold the two halves of a layer. It knows nothing about
text, sampling, files or families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.models.reference.attention import Memory, attend, rms_norm
from slipstream.models.reference.feed_forward import feed_forward
from slipstream.models.spec import ModelSpec, WeightTensor

__all__ = ["Memory", "Reference"]


class Reference:
    """A model in plain PyTorch, on the CPU.

    tensors: canonical names, as in `Checkpoint.tensors`; dtype: float32 or float64.
    """

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, WeightTensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self.spec, self.dtype = spec, dtype
        self.weights = {name: torch.from_numpy(tensors[name].float32()).to(dtype) for name in spec.tensor_shapes()}
        self.weights.setdefault("head", self.weights["embed"])  # tied
        self.layers: list[dict[str, Tensor]] = [{} for _ in spec.layers]
        for name, weight in self.weights.items():
            if name.startswith("layers."):
                _, i, short = name.split(".", 2)
                self.layers[int(i)][short] = weight

    def memory(self, capacity: int) -> Memory:
        """Room for `capacity` positions, empty."""
        return Memory(self.spec, capacity, self.dtype)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], memory: Memory | None = None) -> Tensor:
        """Next-token logits (n, vocab) after each of n tokens, which are appended to `memory`."""
        return self.hidden(tokens, memory or self.memory(len(tokens))) @ self.weights["head"].T

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int], memory: Memory) -> Tensor:
        """Final normalised hidden states (n, hidden) of n tokens, which are appended to `memory`."""
        start, end = memory.length, memory.length + len(tokens)
        positions = torch.arange(start, end)
        x = self.weights["embed"][torch.as_tensor(tokens)]  # (n, hidden)
        selected: Tensor | None = None  # the keys each row may see, for the next layer to share
        for i, (layer, w) in enumerate(zip(self.spec.layers, self.layers, strict=True)):
            normed = rms_norm(x, w["attention_norm"], self.spec.norm_eps)
            attended, selected = attend(layer.attention, w, normed, positions, memory, i, selected, self.spec.norm_eps)
            x = x + attended
            x = x + feed_forward(layer.feed_forward, w, rms_norm(x, w["ffn_norm"], self.spec.norm_eps))
        memory.length = end
        return rms_norm(x, self.weights["final_norm"], self.spec.norm_eps)
