"""The training run: texts, then steps over random anchors of them, then a folder that `load_block_drafter` accepts.

Everything lies in the output folder: `responses.jsonl`, the state of training, and in the end the drafter. Called again
after it was cut off, the run goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor

from slipstream.backends.cuda.weights import Weights, check, load
from slipstream.errors import BackendError, RequestError
from slipstream.models.block_drafter import BlockDrafterConfig, fingerprint
from slipstream.models.checkpoint import Checkpoint, load_checkpoint
from slipstream.train import target
from slipstream.train.data import Text, answer, draft_vocabulary, read_prompts
from slipstream.train.drafter import Drafter
from slipstream.train.export import write_card, write_config, write_weights
from slipstream.train.loss import calibration, distillation, places

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Recipe:
    """Sizes of the drafter and of its training.

    taps: layers of the target it reads; None spreads five. draft_vocab, markov_rank, candidates, block, window, layers:
    as in `BlockDrafterConfig`. batch: texts a step; anchors: blocks drawn of each; calibrated: rows a step that the
    confidence head learns from. unbent: share of anchors that learn without the Markov head, so that candidates, which
    are chosen before it, stay good. save_every: steps between two states on disk.
    """

    steps: int = 4000
    batch: int = 16
    anchors: int = 96
    length: int = 1024
    lr: float = 1e-3
    warmup: int = 100
    calibrated: int = 512
    unbent: float = 0.25
    save_every: int = 500
    seed: int = 0
    layers: int = 3
    taps: tuple[int, ...] | None = None
    draft_vocab: int = 16384
    markov_rank: int = 64
    candidates: int = 16
    block: int = 8
    window: int | None = 512


def train_drafter(model: str, data: Path, out: Path, recipe: Recipe = Recipe(), *, max_tokens: int = 512,
                  device: str | None = None, backend: str = "auto",
                  progress: Progress = lambda stage, done, total: None) -> list[float]:  # fmt: skip
    """Train a drafter for the dense model `model` on its answers to the prompts of `data`; write it to `out`.

    Returns the losses of the steps that ran. Raises RequestError for prompts that cannot be read, BackendError for a
    model that is not dense or a GPU that is not there, CheckpointError for one that cannot be loaded.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise BackendError("no GPU that PyTorch could use is here; use --device cpu")
    prompts = read_prompts(data)
    checkpoint = load_checkpoint(model)
    check(checkpoint.spec)
    out.mkdir(parents=True, exist_ok=True)
    texts = answer(checkpoint, backend, prompts, out / "responses.jsonl", max_tokens, progress)
    texts = [
        Text(t.tokens[: recipe.length], t.prompt) for t in texts if min(len(t.tokens), recipe.length) > t.prompt + 1
    ]
    if not texts:
        raise RequestError("no answer is two tokens long; give other prompts, or a larger --max-tokens")
    config = plan_config(checkpoint, recipe)
    tokens = draft_vocabulary(texts, config.draft_vocab, config.vocab)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    weights = load(checkpoint.spec, checkpoint.tensors, where, dtype)
    drafter = Drafter(config, torch.Generator().manual_seed(recipe.seed)).to(where)
    losses = Run(checkpoint, weights, drafter, texts, tokens, recipe, out / "training.pt").steps(progress)
    write_weights(out, drafter, tokens)
    write_config(out, config, {})
    answered = sum(len(t.tokens) - t.prompt for t in texts)
    write_card(out, config, {"texts": f"{len(texts)} answers, {answered} tokens", "prompts": data.name,
                             "steps": f"{recipe.steps} of {recipe.batch} texts"})  # fmt: skip
    return losses


def plan_config(checkpoint: Checkpoint, recipe: Recipe) -> BlockDrafterConfig:
    """A drafter whose layers have the shape of the target's."""
    spec, layer = checkpoint.spec, checkpoint.spec.layers[0]
    last = len(spec.layers) - 1
    taps = recipe.taps or tuple(sorted({round(last * share) for share in (0.08, 0.32, 0.55, 0.8, 0.97)}))
    if not all(0 <= tap <= last for tap in taps):
        raise RequestError(f"taps {taps}: the model has layers 0 to {last}")
    return BlockDrafterConfig(
        target=Path(str(checkpoint.name)).name, fingerprint=fingerprint(checkpoint.tensors), vocab=spec.vocab,
        target_hidden=spec.hidden, target_layers=len(spec.layers), taps=taps, hidden=spec.hidden, layers=recipe.layers,
        heads=layer.attention.heads, kv_heads=layer.attention.kv_heads, head_dim=layer.attention.head_dim,
        inner=layer.feed_forward.inner, rope_theta=1e5, norm_eps=spec.norm_eps, block=recipe.block,
        window=recipe.window, draft_vocab=min(recipe.draft_vocab, spec.vocab), markov_rank=recipe.markov_rank,
        candidates=recipe.candidates,
    )  # fmt: skip


class Run:
    """Steps of training, with their state on disk at `file`."""

    def __init__(self, checkpoint: Checkpoint, weights: Weights, drafter: Drafter, texts: Sequence[Text],
                 tokens: np.ndarray, recipe: Recipe, file: Path) -> None:  # fmt: skip
        self.spec, self.weights, self.drafter, self.recipe, self.file = checkpoint.spec, weights, drafter, recipe, file
        self.texts = sorted(texts, key=lambda t: len(t.tokens))
        self.device = weights.embed.device
        self.vocab = torch.from_numpy(tokens).long().to(self.device)
        self.head = weights.head[self.vocab]
        matrices = [p for p in drafter.parameters() if p.ndim == 2]
        vectors = [p for p in drafter.parameters() if p.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], recipe.lr,
            betas=(0.9, 0.95),
        )  # fmt: skip

    def steps(self, progress: Progress) -> list[float]:
        """All steps that are left; a step's draws depend on the seed and its number alone."""
        first, losses = self._resume(), []
        for step in range(first, self.recipe.steps):
            share = min(1.0, (step + 1) / max(1, self.recipe.warmup)) * (1 - step / self.recipe.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = self.recipe.lr * share
            loss = self.loss(np.random.default_rng((self.recipe.seed, step)))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            self.optimizer.step()
            losses.append(float(loss.detach()))
            if (step + 1) % self.recipe.save_every == 0 or step + 1 == self.recipe.steps:
                self._save(step + 1)
            progress(f"steps, loss {losses[-1]:.3f}", step + 1, self.recipe.steps)
        return losses

    def _save(self, step: int) -> None:
        half = self.file.with_suffix(".part")
        torch.save({"step": step, "drafter": self.drafter.state_dict(), "optimizer": self.optimizer.state_dict()}, half)
        half.replace(self.file)

    def _resume(self) -> int:
        if not self.file.is_file():
            return 0
        state = torch.load(self.file, map_location=self.device, weights_only=True)
        try:
            self.drafter.load_state_dict(state["drafter"])
        except RuntimeError as error:
            raise RequestError(f"{self.file} is of a drafter of another shape; choose another --out") from error
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def batch(self, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """tokens (b, n) padded; at (b, anchors): positions from the prompt's last on; whole (b, anchors, rows): rows
        whose guess has an answer in the text. Texts of neighbouring lengths come together."""
        r, rows = self.recipe, self.drafter.config.drafts
        start = int(rng.integers(max(1, len(self.texts) - r.batch + 1)))
        texts = self.texts[start : start + r.batch]
        tokens = np.zeros((len(texts), max(len(t.tokens) for t in texts)), np.int64)
        at = np.zeros((len(texts), r.anchors), np.int64)
        for i, t in enumerate(texts):
            tokens[i, : len(t.tokens)] = t.tokens
            at[i] = rng.integers(t.prompt - 1, len(t.tokens) - 1, r.anchors)
        ends = np.array([len(t.tokens) for t in texts])[:, None, None]
        whole = at[:, :, None] + np.arange(rows) + 1 < ends
        return tuple(torch.from_numpy(x).to(self.device) for x in (tokens, at, whole))  # type: ignore[return-value]

    def loss(self, rng: np.random.Generator) -> Tensor:
        c, r = self.drafter.config, self.recipe
        tokens, at, whole = self.batch(rng)
        taps, final = target.run(self.spec, self.weights, tokens, c.taps)
        generator = torch.Generator(self.device).manual_seed(int(rng.integers(1 << 62)))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            # A block may reach beyond its text; such rows stand on its last token and weigh nothing.
            place = (at[:, :, None] + torch.arange(c.drafts, device=self.device)).clamp_max(tokens.shape[1] - 1)
            batch = torch.arange(len(tokens), device=self.device)[:, None, None]
            before = self.weights.embed[tokens[batch, place]].float()  # (b, anchors, rows, target hidden)
            y = self.drafter.blocks(self.drafter.context(taps), at, before[:, :, 0])
            bent, _ = self.drafter.markov(y, before)
            unbent = torch.rand(at.shape, generator=generator, device=self.device) < r.unbent
            guessed = torch.where(unbent[:, :, None, None], y, bent)
            weight = places(c.drafts, self.device) * whole
            chosen = whole.flatten().nonzero()[:, 0]
            y, before, wanted = (
                y.flatten(0, 2)[chosen],
                before.flatten(0, 2)[chosen],
                final[batch, place].flatten(0, 2)[chosen],
            )
            loss = mean_distillation(guessed.flatten(0, 2)[chosen], wanted, self.head, weight.flatten()[chosen])
            some = torch.randperm(len(chosen), generator=generator, device=self.device)[: r.calibrated]
            hot = torch.rand(len(some), generator=generator, device=self.device) < 0.5
            given = (y[some], before[some], wanted[some], self.vocab, self.weights.head)
            judged, _ = calibration(self.drafter, *given, hot, generator)
        return loss + judged


def mean_distillation(guessed: Tensor, wanted: Tensor, head: Tensor, weight: Tensor, rows: int = 8192) -> Tensor:
    """`distillation` for a weight of one, `rows` at a time, whose logits are made again backwards instead of kept."""
    pieces = zip(*(torch.split(t, rows) for t in (guessed, wanted, weight)), strict=True)
    sums = [torch.utils.checkpoint.checkpoint(distillation, g, t, head, w, use_reentrant=False) for g, t, w in pieces]
    return torch.stack(sums).sum() / weight.sum()
