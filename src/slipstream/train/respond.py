"""Many texts at once by the target: every step adds a token to each of them; a text that ends makes room for the next.

Prompts are read a token a step like answers, so one captured step is all there is. Throughput, not latency: texts are
as the model's distribution has them, but not those of the engine bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from slipstream.backends.cuda.weights import Weights
from slipstream.models.spec import ModelSpec


@dataclass(frozen=True)
class Wish:
    """index: the caller's number. tokens: the prompt. most: length at which the text is cut, prompt included."""

    index: int
    tokens: list[int]
    most: int
    temperature: float


class Texts:
    """`slots` texts of at most `capacity` tokens that grow together; every `looks` steps those that ended are taken
    out. A model of full attention."""

    def __init__(self, spec: ModelSpec, weights: Weights, slots: int, capacity: int, eos: Iterable[int],
                 looks: int = 32) -> None:  # fmt: skip
        device, dtype = weights.embed.device, weights.embed.dtype
        a = spec.layers[0].attention
        self.spec, self.weights, self.capacity, self.looks = spec, weights, capacity, looks
        shape = (len(spec.layers), slots, a.kv_heads, capacity, a.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.tokens = torch.zeros(slots, capacity, dtype=torch.int64, device=device)
        self.at = torch.zeros(slots, dtype=torch.int32, device=device)  # of the token that is read next
        self.prompt, self.most = torch.ones_like(self.at), torch.ones_like(self.at)
        self.temperature = torch.zeros(slots, device=device)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        self.eos = torch.tensor(sorted(eos), device=device)
        self._slot = torch.arange(slots, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def write(self, wishes: Iterator[Wish]) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
        """(index, the whole text) of every wish, in the order in which they end."""
        slots = len(self._slot)
        owner: list[int | None] = [None] * slots
        free, more = list(range(slots)), True
        while True:
            while more and free:
                batch = [wish for _, wish in zip(free, wishes, strict=False)]
                more = len(batch) == len(free)
                self._begin(free[: len(batch)], batch)
                for slot, wish in zip(free, batch, strict=False):
                    owner[slot] = wish.index
                free = free[len(batch) :]
            if all(index is None for index in owner):
                return
            self.steps(self.looks)
            ended = [slot for slot in self.done.nonzero()[:, 0].tolist() if owner[slot] is not None]
            rows, lengths = self.tokens[ended].int().cpu().numpy(), (self.at[ended] + 1).tolist()
            for slot, row, length in zip(ended, rows, lengths, strict=True):
                index, owner[slot] = owner[slot], None
                assert index is not None
                yield index, row[:length].copy()
            free += ended

    def _begin(self, slots: list[int], wishes: list[Wish]) -> None:
        if not wishes:
            return
        rows = np.zeros((len(wishes), self.capacity), np.int64)
        for row, wish in zip(rows, wishes, strict=True):
            fitting = wish.tokens[: self.capacity - 1]  # a prompt that does not fit brings no answer
            row[: len(fitting)] = fitting
        device = self.tokens.device
        where = torch.tensor(slots, device=device)
        self.tokens[where] = torch.from_numpy(rows).to(device)
        self.at[where], self.done[where] = 0, False
        self.prompt[where] = torch.tensor([len(w.tokens) for w in wishes], dtype=torch.int32, device=device)
        most = [min(w.most, self.capacity) for w in wishes]
        self.most[where] = torch.tensor(most, dtype=torch.int32, device=device)
        self.temperature[where] = torch.tensor([w.temperature for w in wishes], device=device)

    @torch.no_grad()
    def steps(self, count: int) -> None:
        if self.tokens.device.type == "cpu":
            for _ in range(count):
                self.step()
            return
        if self._graph is None:
            kept = [t.clone() for t in (self.tokens, self.at, self.done)]
            self.step()  # compiles what a capture could not
            for t, old in zip((self.tokens, self.at, self.done), kept, strict=True):
                t.copy_(old)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.step()
        for _ in range(count):
            self._graph.replay()

    def step(self) -> None:
        """Read the token at `at` of every text; where the prompt ends with it, draw the next."""
        from slipstream.kernels.text_attention import text_attention

        spec, w, dtype = self.spec, self.weights, self.weights.embed.dtype
        h = w.embed[self.tokens.gather(1, self.at[:, None].long())[:, 0]].float()
        for i, (layer, lw) in enumerate(zip(spec.layers, w.layers, strict=True)):
            a = layer.attention
            x = F.rms_norm(h, h.shape[1:], lw.attention_norm, spec.norm_eps).to(dtype)
            qkv = F.linear(x, lw.qkv, lw.qkv_bias)
            h += F.linear(text_attention(qkv, lw.cos_sin, self.at, self.keys[i], self.values[i], a.softmax_scale), lw.o)
            x = F.rms_norm(h, h.shape[1:], lw.ffn_norm, spec.norm_eps).to(dtype)
            gate, up = F.linear(x, lw.gate_up).chunk(2, -1)
            h += F.linear(F.silu(gate) * up, lw.down)
        logits = F.linear(F.rms_norm(h, h.shape[1:], w.final_norm, spec.norm_eps).to(dtype), w.head).float()
        noise = torch.empty_like(logits).exponential_().clamp_min_(1e-20).log_()  # minus Gumbel noise
        following = self.at + 1
        drawn = (logits - noise * self.temperature[:, None]).argmax(-1)
        place = following.clamp_max(self.capacity - 1)[:, None].long()
        given = self.tokens.gather(1, place)[:, 0]
        answering = following >= self.prompt
        token = torch.where(self.done | ~answering, given, drawn)
        self.tokens.scatter_(1, place, token[:, None])
        self.at += (~self.done).int()
        self.done |= (answering & torch.isin(token, self.eos)) | (following + 1 >= self.most)
