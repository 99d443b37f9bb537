"""Several processes that train one drafter, one a GPU, as `torchrun` starts them; alone where it did not.

Each takes its share of the answers and, at every step, a batch of its own; gradients are averaged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1
    local: int = 0

    @staticmethod
    def join(device: str) -> Ranks:
        """By the environment that `torchrun` sets: NCCL between GPUs, Gloo between CPUs."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return ALONE
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
        return Ranks(dist.get_rank(), world, int(os.environ.get("LOCAL_RANK", "0")))

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Gradients become their mean over all ranks."""
        if self.world == 1:
            return
        learning = [p for p in parameters if p.grad is not None]
        flat = torch.cat([_gradient(p).flatten() for p in learning])
        dist.all_reduce(flat)
        flat /= self.world
        for p, mean in zip(learning, torch.split(flat, [p.numel() for p in learning]), strict=True):
            _gradient(p).copy_(mean.view_as(p))


ALONE = Ranks()


def _gradient(p: torch.nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad
