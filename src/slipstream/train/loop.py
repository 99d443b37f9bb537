"""The training run: texts, then steps over random anchors of them, then a folder that `load_block_drafter` accepts.

Everything lies in the output folder: `responses.jsonl`, the state of training, and in the end the drafter. Called again
after it was cut off, the run goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.backends.cuda.weights import Weights, check, load
from slipstream.errors import BackendError, RequestError
from slipstream.models.block_drafter import BlockDrafterConfig, fingerprint
from slipstream.models.checkpoint import Checkpoint, load_checkpoint
from slipstream.train import target
from slipstream.train.data import (
    Progress,
    Text,
    Writer,
    answer,
    draft_vocabulary,
    engine_writer,
    own_prompts,
    read_prompts,
)
from slipstream.train.drafter import Drafter
from slipstream.train.export import write_card, write_config, write_weights
from slipstream.train.judge import by_place, right
from slipstream.train.loss import calibration, mean_distillation, places
from slipstream.train.ranks import ALONE, Ranks
from slipstream.train.respond import Texts

HELD_OUT = 64
"""One prompt in so many is not learnt from; its answer is greedy, as that of all even prompts."""
MOST_TEXTS, SHOWN = 2048, 25


@dataclass(frozen=True)
class Recipe:
    """Sizes of the drafter and of its training.

    taps: layers of the target it reads; None spreads five. draft_vocab, markov_rank, candidates, block, window, layers:
    as in `BlockDrafterConfig`. batch: anchors a step, those of whole answers. length: tokens of a text at most.
    calibrated: rows a step that the confidence head learns from. unbent: share of anchors that learn without the Markov
    head, so that candidates, which are chosen before it, stay good. save_every: steps between two states on disk.
    """

    steps: int = 4000
    batch: int = 4096
    length: int = 1024
    lr: float = 2e-3
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


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody sees."""


def train_drafter(model: str, data: Path | None, out: Path, recipe: Recipe = Recipe(), *, own: int = 0,
                  max_tokens: int = 512, device: str | None = None, backend: str = "auto",
                  progress: Progress = silent) -> Trained:  # fmt: skip
    """Train a drafter for the dense model `model` on its answers to the prompts of `data`; write it to `out`.

    own: users' turns that the target makes up itself, as prompts beside those of `data`.
    Raises RequestError for prompts that cannot be read, BackendError for a model that is not dense or a GPU that is not
    there, CheckpointError for one that cannot be loaded.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendError("no GPU that PyTorch could use is here; use --device cpu")
    if data is None and own < 1:
        raise RequestError("no prompts; give --data, or --own-prompts for some that the model makes up")
    prompts = read_prompts(data) if data else []
    checkpoint = load_checkpoint(model)
    check(checkpoint.spec)
    out.mkdir(parents=True, exist_ok=True)
    ranks = Ranks.join(device)
    where = torch.device(device, ranks.local) if device == "cuda" else torch.device(device)
    if ranks.rank:
        progress = silent
    config = plan_config(checkpoint, recipe)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    weights = load(checkpoint.spec, checkpoint.tensors, where, dtype)
    learnt, judged = gather(checkpoint, weights, prompts, out, recipe, own, max_tokens, backend, ranks, progress)
    tokens = draft_vocabulary(learnt, config.draft_vocab, config.vocab)
    drafter = Drafter(config, torch.Generator().manual_seed(recipe.seed)).to(where)
    run = Run(checkpoint, weights, drafter, learnt, tokens, recipe, out / "training.pt", ranks)
    losses = run.steps(progress)
    if ranks.rank:
        return Trained(losses, ())
    held = tuple(run.held(judged)) if judged else ()
    write_weights(out, drafter, tokens)
    write_config(out, config, {"held out": 1 + sum(held)} if held else {})
    answered = sum(len(t.tokens) - t.prompt for t in learnt)
    write_card(out, config, {
        "texts": f"{len(learnt)} answers, {answered} tokens", "prompts": f"{len(prompts)} given, {own} of its own",
        "steps": f"{recipe.steps} of {recipe.batch} anchors",
        "guesses held, by place": ", ".join(f"{share:.0%}" for share in held) or "not judged",
    })  # fmt: skip
    return Trained(losses, held)


@dataclass(frozen=True)
class Trained:
    """losses: of the steps that ran. held: by place, the share of blocks of held-out greedy texts whose guesses up to
    there all hold; empty where there are too few texts to hold any out."""

    losses: list[float]
    held: tuple[float, ...]


def gather(checkpoint: Checkpoint, weights: Weights, prompts: list[list[dict[str, Any]]], out: Path, recipe: Recipe,
           own: int, max_tokens: int, backend: str, ranks: Ranks,
           progress: Progress) -> tuple[list[Text], list[Text]]:  # fmt: skip
    """Texts to learn from and texts to judge by."""
    writer = writer_of(checkpoint, weights, recipe.length, backend)
    if own:
        file = out / "own_prompts.jsonl"
        if not (file.is_file() or ranks.rank):
            made = own_prompts(checkpoint, writer, own, recipe.seed, progress)
            file.write_text("".join(json.dumps({"messages": m}) + "\n" for m in made), encoding="utf-8")
        ranks.wait()
        prompts = prompts + (read_prompts(file) if file.stat().st_size else [])
    texts = answer(checkpoint, writer, prompts, out, max_tokens, ranks, progress)
    texts = [Text(t.tokens[: recipe.length], t.prompt) for t in texts]
    whole = [len(t.tokens) > t.prompt + 1 for t in texts]
    judged = [i for i in range(0, len(texts), HELD_OUT) if whole[i]] if len(texts) >= HELD_OUT else []
    learnt = sorted({i for i, ok in enumerate(whole) if ok}.difference(judged))
    if not learnt:
        raise RequestError("no answer is two tokens long; give other prompts, or a larger --max-tokens")
    return [texts[i] for i in learnt], [texts[i] for i in judged]


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
                 tokens: np.ndarray, recipe: Recipe, file: Path, ranks: Ranks = ALONE) -> None:  # fmt: skip
        self.ranks = ranks
        self.spec, self.weights, self.drafter, self.recipe, self.file = checkpoint.spec, weights, drafter, recipe, file
        self.texts, self.device = list(texts), weights.embed.device
        self.vocab = torch.from_numpy(tokens).long().to(self.device)
        self.head = weights.head[self.vocab]
        named = dict(drafter.named_parameters())
        turned = [p for n, p in named.items() if p.ndim == 2 and n.startswith(("layers", "fuse")) and "norm" not in n]
        others = [p for p in named.values() if not any(p is t for t in turned)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(turned, recipe.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, recipe.lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def steps(self, progress: Progress) -> list[float]:
        """All steps that are left; a step's texts and draws depend on the seed and its number alone."""
        first, total, losses = self._resume(), self.recipe.steps, list[Tensor]()
        rank, world = self.ranks.rank, self.ranks.world
        mine = islice(self.batches(), first * world + rank, total * world, world)
        for step, texts in enumerate(mine, first):
            share = min(1.0, (step + 1) / max(1, self.recipe.warmup)) * (1 - step / total)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.recipe.lr * share
                optimizer.zero_grad(set_to_none=True)
            loss = self.loss(texts, step * world + rank)
            loss.backward()  # type: ignore[no-untyped-call]
            self.ranks.average(self.drafter.parameters())
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
            losses.append(loss.detach())
            if not rank and ((step + 1) % self.recipe.save_every == 0 or step + 1 == total):
                self._save(step + 1)
            if (step + 1) % SHOWN == 0 or step + 1 == total:  # asks the device, which would else work ahead
                progress(f"steps, loss {float(torch.stack(losses[-SHOWN:]).mean()):.3f}", step + 1, total)
        return [float(loss) for loss in losses]

    def _save(self, step: int) -> None:
        half = self.file.with_suffix(".part")
        state = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save({"step": step, "drafter": self.drafter.state_dict(), "optimizers": state}, half)
        half.replace(self.file)

    def _resume(self) -> int:
        if not self.file.is_file():
            return 0
        state = torch.load(self.file, map_location=self.device, weights_only=True)
        try:
            self.drafter.load_state_dict(state["drafter"])
        except RuntimeError as error:
            raise RequestError(f"{self.file} is of a drafter of another shape; choose another --out") from error
        for optimizer, one in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(one)
        return int(state["step"])

    def batches(self) -> Iterator[list[Text]]:
        """Endless: answers of about one length together, as many as hold `batch` anchors; every epoch all of them."""
        counts = np.array([len(t.tokens) - t.prompt for t in self.texts])
        for epoch in count():
            rng = np.random.default_rng((self.recipe.seed, epoch))
            order = np.argsort(counts * rng.uniform(0.9, 1.1, len(counts)))
            batches: list[list[int]] = [[]]
            for i in order.tolist():
                if batches[-1] and (len(batches[-1]) + 1) * max(counts[[*batches[-1], i]]) > self.recipe.batch:
                    batches.append([])
                batches[-1].append(i)
            rng.shuffle(batches)
            for batch in batches:
                yield [self.texts[i] for i in batch]

    def batch(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """tokens (b, n) padded; at (b, anchors): all positions from the prompt's last on whose next token is there;
        whole (b, anchors, rows): rows whose guess has an answer in the text."""
        rows = self.drafter.config.drafts
        length, prompt = (torch.tensor([x(t) for t in texts]) for x in (lambda t: len(t.tokens), lambda t: t.prompt))
        tokens = torch.zeros(len(texts), int(length.max()), dtype=torch.int64)
        for row, t in zip(tokens, texts, strict=True):
            row[: len(t.tokens)] = torch.from_numpy(t.tokens)
        at = prompt[:, None] - 1 + torch.arange(int((length - prompt).max()))
        whole = at[:, :, None] + torch.arange(rows) + 1 < length[:, None, None]
        return tuple(self._there(x) for x in (tokens, at.clamp_max(tokens.shape[1] - 1), whole))  # type: ignore[return-value]

    def _there(self, x: Tensor) -> Tensor:
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x

    def blocks(self, tokens: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of a batch (b, anchors, rows, ...): the drafter's rows, the tokens before them embedded, and what the target
        has there. Rows beyond a text stand on its last token."""
        c = self.drafter.config
        taps, final = target.run(self.spec, self.weights, tokens, c.taps)
        place = (at[:, :, None] + torch.arange(c.drafts, device=self.device)).clamp_max(tokens.shape[1] - 1)
        batch = torch.arange(len(tokens), device=self.device)[:, None, None]
        before = self.weights.embed[tokens[batch, place]].float()
        y = self.drafter.blocks(self.drafter.context(taps), at, before[:, :, 0])
        return y, before, final[batch, place]

    def loss(self, texts: Sequence[Text], number: int) -> Tensor:
        """Of the run's batch of this number."""
        c, r = self.drafter.config, self.recipe
        tokens, at, whole = self.batch(texts)
        generator = torch.Generator(self.device).manual_seed(r.seed << 32 | number)
        with self._mixed():
            y, before, wanted = self.blocks(tokens, at)
            bent, _ = self.drafter.markov(y, before)
            unbent = torch.rand(at.shape, generator=generator, device=self.device) < r.unbent
            guessed = torch.where(unbent[:, :, None, None], y, bent)
            weight = (places(c.drafts, self.device) * whole).flatten()
            loss = mean_distillation(guessed.flatten(0, 2), wanted.flatten(0, 2), self.head, weight)
            some = torch.randint(weight.numel(), (r.calibrated,), generator=generator, device=self.device)
            hot = torch.rand(len(some), generator=generator, device=self.device) < 0.5
            a, b, t = (x.flatten(0, 2)[some] for x in (y, before, wanted))
            judged, _ = calibration(self.drafter, a, b, t, self.vocab, self.weights.head, hot,
                                    whole.flatten()[some].float(), generator)  # fmt: skip
        return loss + judged

    @torch.no_grad()
    def held(self, texts: Sequence[Text]) -> list[float]:
        """For greedy `texts`, the share of blocks whose guesses up to each place all hold."""

        def found() -> Iterator[tuple[Tensor, Tensor]]:
            for i in range(0, len(texts), 8):
                tokens, at, whole = self.batch(texts[i : i + 8])
                with self._mixed():
                    y, _, _ = self.blocks(tokens, at)
                    place = at[:, :, None] + torch.arange(1 + whole.shape[2], device=self.device)
                    said = tokens.gather(1, place.clamp_max(tokens.shape[1] - 1).flatten(1)).view(place.shape)
                    ok = right(self.drafter, y.flatten(0, 1), said[:, :, 0].flatten(), said[:, :, 1:].flatten(0, 1),
                               self.weights.embed, self.vocab, self.head)  # fmt: skip
                yield ok, whole.flatten(0, 1)

        return by_place(found())

    def _mixed(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


def writer_of(checkpoint: Checkpoint, weights: Weights, length: int, backend: str) -> Writer:
    """All texts at once where a GPU and the model allow it, else one after another through the engine."""
    spec = checkpoint.spec
    plain = all(not (layer.attention.window or layer.attention.qk_norm) for layer in spec.layers)
    if weights.embed.device.type != "cuda" or not plain:
        return engine_writer(checkpoint, backend)
    a = spec.layers[0].attention
    text = 2 * len(spec.layers) * a.kv_heads * length * a.head_dim * weights.embed.element_size()
    slots = int(min(MOST_TEXTS, torch.cuda.mem_get_info()[0] // 2 // text))
    texts = Texts(spec, weights, slots, length, checkpoint.tokenizer.eos_token_ids)
    return texts.write
