"""The floor of a round and a prediction of it: count bytes, divide by the read rate, add what launching costs.

    bytes by part ─┬─ / read rate ─────────────> floor of a round, floor tok/s
                   └─ + kernels, communication ─> predicted round, tok/s, what limits it, what would move it

A round is one target pass over `1 + drafts` rows. All bytes and FLOPs are those of one rank, since ranks work at once.
It knows nothing about weights or engines: `model_costs` says what is read, `hardware` how fast, `launch.toml` at what
overhead, each with its source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from slipstream.bench.hardware import Hardware, Launch, kernel_counts, load_launch
from slipstream.bench.model_costs import AttentionCosts, FeedForwardCosts, ModelCosts, PlanError, dtype_bytes

MAX_ROWS = 64
ASSUMED_DRAFT_HIT = 0.8
"""Chance that a draft is right, given that those before it were, where no acceptance length is given."""
WORKSPACE_SHARE = 0.02
"""Memory kept back for the runtime's context, graphs and activations."""
INDEX_KEY_BYTES = 1 + 4 / 128
"""An indexer key element in FP8 with one fp32 scale per key of 128."""
_NARROWER = {"fp32": "bf16", "bf16": "fp8", "fp16": "fp8", "fp8": "mxfp4", "int8": "int4"}


@dataclass(frozen=True)
class Setup:
    """How the model runs: `tp` devices, `context` tokens of history, `drafts` verified a round.

    acceptance: tokens committed a round, the target's own included; None assumes ASSUMED_DRAFT_HIT.
    drafter_params: of a draft model that runs once a round, in bf16, split over the ranks.
    """

    tp: int = 1
    context: int = 2048
    drafts: int = 0
    acceptance: float | None = None
    kv_dtype: str = "bf16"
    drafter_params: int = 0

    def __post_init__(self) -> None:
        dtype_bytes(self.kv_dtype)
        if self.tp < 1:
            raise PlanError(f"tp must be at least 1, got {self.tp}")
        if self.context < 1:
            raise PlanError(f"context must be at least 1 token, got {self.context}")
        if not 0 <= self.drafts < MAX_ROWS:
            raise PlanError(f"drafts must be between 0 and {MAX_ROWS - 1}, got {self.drafts}")
        if self.acceptance is not None and not 1 <= self.acceptance <= self.rows:
            raise PlanError(
                f"a round with {self.drafts} drafts commits between 1 and {self.rows} tokens; "
                f"acceptance {self.acceptance:g} is outside"
            )

    @property
    def rows(self) -> int:
        return 1 + self.drafts

    @property
    def tokens_a_round(self) -> float:
        """Expected committed tokens: sum of p^i for i = 0..drafts where unknown (Leviathan et al. 2023, eq. 1)."""
        return self.acceptance or sum(ASSUMED_DRAFT_HIT**i for i in range(self.rows))


@dataclass(frozen=True)
class Prediction:
    """A predicted round in seconds, as the sum of its parts: max(read, compute) + launch + communication."""

    read_s: float
    compute_s: float
    launch_s: float
    communication_s: float

    @property
    def round_s(self) -> float:
        return max(self.read_s, self.compute_s) + self.launch_s + self.communication_s


@dataclass(frozen=True)
class Plan:
    """What a round costs on one rank, its floor, and what is predicted of it."""

    model: ModelCosts
    hardware: Hardware
    setup: Setup
    launch: Launch
    bytes: dict[str, float]
    flops: float
    kernels: int
    all_reduces: int
    prediction: Prediction
    memory: dict[str, float]

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes.values())

    @property
    def floor_s(self) -> float:
        """No round is faster: its bytes at the read rate, or its FLOPs at the peak. Launches and links are left out."""
        return max(self.total_bytes / self.hardware.read_bytes_per_s, self.flops / self.hardware.flops)

    @property
    def floor_tokens_per_s(self) -> float:
        return self.setup.tokens_a_round / self.floor_s

    @property
    def tokens_per_s(self) -> float:
        return self.setup.tokens_a_round / self.prediction.round_s

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= self.hardware.memory_bytes

    @property
    def limited_by(self) -> str:
        p = self.prediction
        largest = max(self.bytes, key=lambda part: self.bytes[part])
        reading = f"reading {largest.replace('_', ' ')} ({self.bytes[largest] / self.total_bytes:.0%} of the bytes)"
        causes = {reading: p.read_s, "kernel launches": p.launch_s, "communication": p.communication_s}
        if p.compute_s > p.read_s:
            causes = {"arithmetic": p.compute_s, "kernel launches": p.launch_s, "communication": p.communication_s}
        return max(causes, key=lambda cause: causes[cause])

    @property
    def kv_bytes_per_token(self) -> dict[str, float]:
        """Cache bytes that one more token adds, all ranks' layers once, by layer kind; `indexer` is its key cache."""
        rows: dict[str, float] = {}
        for layer in self.model.layers:
            a = layer.attention
            rows[a.kind] = rows.get(a.kind, 0) + a.kv_heads * a.kv_row * dtype_bytes(self.setup.kv_dtype)
            if a.indexer:
                rows["indexer"] = rows.get("indexer", 0) + a.indexer.dim * INDEX_KEY_BYTES
        return rows

    def sensitivities(self) -> list[tuple[str, float]]:
        """(change, gain in predicted tok/s as a share), the largest first."""
        gains = [(change, other.tokens_per_s / self.tokens_per_s - 1) for change, other in self._variants()]
        return sorted(gains, key=lambda gain: -gain[1])

    def _variants(self) -> Iterator[tuple[str, Plan]]:
        h, s = self.hardware, self.setup

        def variant(
            model: ModelCosts = self.model, hardware: Hardware = h, setup: Setup = s, launch: Launch = self.launch
        ) -> Plan:
            return plan(model, hardware, setup, launch)

        yield "10% more read rate", variant(hardware=replace(h, read_bytes_per_s=1.1 * h.read_bytes_per_s))
        yield (
            "a quarter less overhead a kernel",
            variant(
                launch=replace(
                    self.launch,
                    us_per_kernel=0.75 * self.launch.us_per_kernel,
                    us_per_row=0.75 * self.launch.us_per_row,
                )
            ),
        )
        bulk = self.model.dtypes.experts if self.model.is_moe else self.model.dtypes.dense_ffn
        if bulk in _NARROWER:
            narrow = _NARROWER[bulk]
            what = "experts" if self.model.is_moe else "weights"
            yield f"{narrow} {what} instead of {bulk}", variant(model=self.model.with_dtype(narrow))
        if self.model.dtypes.attention == "bf16" and self.model.is_moe:
            dtypes = replace(self.model.dtypes, attention="fp8")
            yield "fp8 attention weights instead of bf16", variant(model=replace(self.model, dtypes=dtypes))
        if s.drafts:
            longer = min(1.1 * s.tokens_a_round, s.rows)
            yield (
                f"acceptance length {longer:.1f} instead of {s.tokens_a_round:.1f}",
                variant(setup=replace(s, acceptance=longer)),
            )
        else:
            yield "7 drafts with 3 tokens a round", variant(setup=replace(s, drafts=7, acceptance=3))
        if s.tp > 1:
            yield "half the all-reduce latency", variant(hardware=replace(h, all_reduce_s=h.all_reduce_s / 2))
        if not h.pipeline:
            with suppress(PlanError):  # no such machine, or the heads or experts do not divide
                yield f"{2 * s.tp} devices instead of {s.tp}", variant(setup=replace(s, tp=2 * s.tp))

    def fitting_tp(self) -> int | None:
        """The fewest devices, a power of two, whose memory holds the model; None where no such number works."""
        for tp in (1, 2, 4, 8, 16, 32, 64):
            with suppress(PlanError):  # too many, or it does not divide
                if plan(self.model, self.hardware, replace(self.setup, tp=tp), self.launch).fits:
                    return tp
        return None

    def assumptions(self) -> list[str]:
        """Everything in the figures that nobody measured."""
        h, s, notes = self.hardware, self.setup, list(self.model.notes)
        if not h.read_measured:
            share = h.read_bytes_per_s / h.peak_bytes_per_s
            notes.append(f"read rate of {h.name} taken as {share:.0%} of its peak, as an H200 reaches")
        if h.status == "announced":
            notes.append(f"{h.name} is announced: its figures are the vendor's preliminary ones")
        if self.model.is_moe and s.rows > 1:
            notes.append("experts are hit as if routing were random and rows independent")
        if s.drafts and s.acceptance is None:
            notes.append(f"each draft is right with chance {ASSUMED_DRAFT_HIT}; --acceptance replaces this guess")
        if s.drafts and not s.drafter_params:
            notes.append("the drafter itself costs nothing")
        if any(x.attention.selected for x in self.model.layers):
            notes.append("every rank scores the whole history with the indexer; rows select independently")
        notes.append(f"launch structure {self.launch.id}: {self.launch.source}")
        return notes

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; times in ms, sizes in bytes, of one rank unless named total."""
        p, model = self.prediction, self.model
        return {
            "model": model.name,
            "gpu": self.hardware.id,
            "setup": asdict(self.setup) | {"rows": self.setup.rows, "acceptance": self.setup.tokens_a_round},
            "dtypes": asdict(model.dtypes) | {"kv": self.setup.kv_dtype},
            "parameters": {"total": model.total_params, "active": model.active_params},
            "bytes": {part: round(count) for part, count in self.bytes.items()},
            "total_bytes": round(self.total_bytes),
            "flops": round(self.flops),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "memory": {
                **{part: round(size) for part, size in self.memory.items()},
                "needed": round(sum(self.memory.values())),
                "capacity": round(self.hardware.memory_bytes),
                "fits": self.fits,
            },
            "communication": {"all_reduces": self.all_reduces, "ms": p.communication_s * 1e3},
            "round_floor_ms": self.floor_s * 1e3,
            "floor_tokens_per_s": self.floor_tokens_per_s,
            "prediction": {
                "round_ms": p.round_s * 1e3,
                "tokens_per_s": self.tokens_per_s,
                "efficiency": self.floor_s / p.round_s,
                "launch": self.launch.id,
                "kernels": self.kernels,
                "read_ms": p.read_s * 1e3,
                "compute_ms": p.compute_s * 1e3,
                "launch_ms": p.launch_s * 1e3,
            },
            "limited_by": self.limited_by,
            "sensitivity": [{"change": change, "gain": gain} for change, gain in self.sensitivities()],
            "assumptions": self.assumptions(),
            "sources": {"model": model.source, "gpu": self.hardware.source},
        }


def plan(model: ModelCosts, hardware: Hardware, setup: Setup | None = None, launch: Launch | None = None) -> Plan:
    """Plan one round of `model` on `setup.tp` devices of `hardware`.

    Raises PlanError where the model does not divide over the ranks or the context is longer than the model's.
    """
    setup = setup or Setup()
    launch = launch or load_launch(hardware.moe_launch if model.is_moe else hardware.launch)
    if setup.context > model.context:
        raise PlanError(f"context {setup.context:,} is longer than {model.name} was made for: {model.context:,} tokens")
    ranks = 1 if hardware.pipeline else setup.tp
    if setup.tp > hardware.domain:
        raise PlanError(f"{setup.tp} devices of {hardware.name} share no fast link; at most {hardware.domain} do")
    _check_divides(model, ranks)
    parts = pass_bytes(model, setup, ranks)
    flops = pass_flops(model, setup, ranks)
    kernels, all_reduces = _kernels(model), 0
    communication = 0.0
    if setup.tp > 1:
        row_bytes = setup.rows * model.hidden * 2
        all_reduces = 0 if hardware.pipeline else 2 * len(model.layers) + 1
        steps, sent = (all_reduces, (ranks - 1) * row_bytes) if all_reduces else (setup.tp - 1, row_bytes)
        communication = steps * (hardware.all_reduce_s + sent / hardware.link_bytes_per_s)
    return Plan(
        model=model,
        hardware=hardware,
        setup=setup,
        launch=launch,
        bytes=parts,
        flops=flops,
        kernels=kernels,
        all_reduces=all_reduces,
        prediction=Prediction(
            read_s=_streamed(parts, model, launch) / (hardware.read_bytes_per_s * launch.bandwidth_share),
            compute_s=flops / (hardware.flops * launch.flops_share),
            launch_s=kernels * (launch.us_per_kernel + setup.drafts * launch.us_per_row) * 1e-6,
            communication_s=communication,
        ),
        memory=memory_bytes(model, setup, hardware),
    )


def _streamed(parts: dict[str, float], model: ModelCosts, launch: Launch) -> float:
    """Bytes of a round, those that are slow to unpack counted for as much longer as they take."""
    dtypes = asdict(model.dtypes)
    return sum(size / launch.unpack_share.get(dtypes.get(part, ""), 1.0) for part, size in parts.items())


def expected_distinct(choices: int, drawn: int, rows: int) -> float:
    """Distinct items that `rows` independent draws of `drawn` out of `choices` hit, on average."""
    if drawn >= choices:
        return choices
    return choices * (1 - (1 - drawn / choices) ** rows)


def pass_bytes(model: ModelCosts, setup: Setup, ranks: int = 1) -> dict[str, float]:
    """Bytes one rank reads in a round, by part. Activations, cache writes and embedding rows are too few to count."""
    d, kv_size = model.dtypes, dtype_bytes(setup.kv_dtype)
    parts = dict.fromkeys(("attention", "experts", "dense_ffn", "router", "head", "kv", "indexer", "drafter"), 0.0)
    for layer in model.layers:
        a, f = layer.attention, layer.feed_forward
        parts["attention"] += _attention_params(a, ranks) * dtype_bytes(d.attention)
        parts["kv"] += _seen(a, setup) * math.ceil(a.kv_heads / ranks) * a.kv_row * kv_size
        if a.indexer:
            parts["indexer"] += a.indexer.params * dtype_bytes(d.attention)
            parts["indexer"] += setup.context * a.indexer.dim * INDEX_KEY_BYTES
        parts["dense_ffn"] += f.dense_params / ranks * dtype_bytes(d.dense_ffn)
        parts["router"] += f.router_params * dtype_bytes("bf16")
        if f.experts:
            distinct = expected_distinct(f.experts, f.top_k, setup.rows)
            parts["experts"] += distinct * f.expert_params / ranks * dtype_bytes(d.experts)
    parts["head"] = math.ceil(model.vocab / ranks) * model.hidden * dtype_bytes(d.head)
    parts["drafter"] = setup.drafter_params / ranks * dtype_bytes("bf16")
    return parts


def pass_flops(model: ModelCosts, setup: Setup, ranks: int = 1) -> float:
    """Multiplications and additions of one rank in a round; a weight of a row counts two."""
    flops = 2.0 * model.head_params / ranks
    for layer in model.layers:
        a, f = layer.attention, layer.feed_forward
        chosen = f.dense_params + f.top_k * f.expert_params
        flops += 2 * (_attention_params(a, ranks) + chosen / ranks + f.router_params)
        seen = min(setup.context, a.window or a.selected or setup.context)
        flops += seen * a.flops_per_key / ranks
        if a.indexer:
            flops += 2 * (a.indexer.params + setup.context * a.indexer.heads * a.indexer.dim)
    return flops * setup.rows


def memory_bytes(model: ModelCosts, setup: Setup, hardware: Hardware) -> dict[str, float]:
    """Bytes that must fit on one device: all weights, the caches at `context`, and a workspace."""
    d, ranks = model.dtypes, 1 if hardware.pipeline else setup.tp
    weights = caches = 0.0
    for layer in model.layers:
        a, f = layer.attention, layer.feed_forward
        weights += (_attention_params(a, ranks) + (a.indexer.params if a.indexer else 0)) * dtype_bytes(d.attention)
        weights += f.dense_params / ranks * dtype_bytes(d.dense_ffn) + f.router_params * dtype_bytes("bf16")
        weights += f.experts * f.expert_params / ranks * dtype_bytes(d.experts)
        kept = min(setup.context, a.window + setup.drafts if a.window else setup.context)
        caches += kept * math.ceil(a.kv_heads / ranks) * a.kv_row * dtype_bytes(setup.kv_dtype)
        caches += setup.context * a.indexer.dim * INDEX_KEY_BYTES if a.indexer else 0
    tables = 1 if model.tied_embeddings else 2
    weights += tables * model.head_params / ranks * dtype_bytes(d.head) + setup.drafter_params / ranks * 2
    stages = setup.tp if hardware.pipeline else 1
    return {
        "weights": weights / stages,
        "kv": caches / stages,
        "workspace": WORKSPACE_SHARE * hardware.memory_bytes,
    }


def _attention_params(a: AttentionCosts, ranks: int) -> float:
    """Of one rank: query heads are split; a KV head is on as many ranks as need it; the rest is everywhere."""
    kv_share = math.ceil(a.kv_heads / ranks) / a.kv_heads
    return a.query_params / ranks + a.kv_params * kv_share + a.shared_params


def _seen(a: AttentionCosts, setup: Setup) -> float:
    """Cache rows that a round reads: each once for all rows of the round."""
    if a.window:
        return min(setup.context, a.window + setup.drafts)
    if a.selected:
        return expected_distinct(setup.context, a.selected, setup.rows)
    return setup.context


def _kernels(model: ModelCosts) -> int:
    counts = kernel_counts()

    def half(a: AttentionCosts, f: FeedForwardCosts) -> int:
        extra = (counts["latent"] if "latent" in a.kind else 0) + (counts["indexer"] if a.indexer else 0)
        return counts["attention"] + extra + counts["moe" if f.experts else "dense"]

    return sum(half(layer.attention, layer.feed_forward) for layer in model.layers) + counts["head"]


def _check_divides(model: ModelCosts, ranks: int) -> None:
    for layer in model.layers:
        a, f = layer.attention, layer.feed_forward
        if a.heads % ranks:
            raise PlanError(f"{a.heads} query heads of {model.name} do not divide over {ranks} ranks")
        if a.kv_heads % ranks and ranks % a.kv_heads:
            raise PlanError(f"{a.kv_heads} KV heads of {model.name} do not divide over {ranks} ranks")
        if f.inner % ranks:
            what = "expert" if f.experts else "feed-forward"
            raise PlanError(f"the {what} inner size {f.inner} of {model.name} does not divide over {ranks} ranks")
