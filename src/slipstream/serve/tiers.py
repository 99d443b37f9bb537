"""Speed tiers: which one a request gets, what it costs there, and how long it would wait."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.serve.auth import Client
from slipstream.serve.config import Config, Tier
from slipstream.serve.errors import ApiError, invalid

SYNONYMS = {"fast": "priority"}
TIER_NAMES = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")


@dataclass(frozen=True)
class Served:
    """The tier that serves a request, by its name in the API."""

    name: str
    tier: Tier


def choose_tier(config: Config, asked: str | None, client: Client, fallback: bool = False) -> Served:
    """The tier that `asked` means. Raises ApiError where it cannot be had and nobody opted into another.

    fallback: the client takes, and pays for, the `auto` tier instead.
    """
    name = SYNONYMS.get(asked or "auto", asked or "auto")
    if name != "auto" and (fallback or config.fallback) and not (name in config.tiers and _may(client, name)):
        name = "auto"
    if name == "auto":
        name = config.auto
    if name not in config.tiers:
        raise invalid(
            f"service tier {asked!r} is not offered here; there are auto, {', '.join(config.tiers)}; "
            "or set service_tier_fallback",
            "service_tier",
            "service_tier_unavailable",
        )
    if not _may(client, name):
        message = f"key {client.name!r} may not use service tier {name!r}"
        raise ApiError(403, message, code="service_tier_forbidden", param="service_tier")
    return Served(name, config.tiers[name])


def _may(client: Client, tier: str) -> bool:
    return client.tiers is None or tier in client.tiers


def cost_usd(config: Config, tier: Tier, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
    """US dollars, from whole token counts; rounded to a thousandth of a millionth of a dollar."""
    p = config.prices
    millionths = (
        (prompt_tokens - cached_tokens) * p.input * tier.input
        + cached_tokens * p.cached_input * tier.cached_input
        + completion_tokens * p.output * tier.output
    )
    return round(millionths / 1e6, 9)


@dataclass(frozen=True)
class Quote:
    """What a request would cost and wait in one tier."""

    tier: str
    rank: int
    cost_usd: float
    wait_s: float
    streams: int
    running: int
    waiting: int


def explain(
    config: Config,
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
    load: dict[str, tuple[int, int]] | None = None,
    stream_s: float = 0.0,
) -> list[Quote]:
    """A quote a tier, the fastest first.

    load: tier -> (running, waiting). stream_s: how long a stream lasts here on average; the wait is that of the streams
    ahead of one more, of this tier and of higher ones, divided among those that run at once.
    """
    load = load or {}
    quotes = []
    for name, tier in sorted(config.tiers.items(), key=lambda item: -item[1].rank):
        running, waiting = load.get(name, (0, 0))
        above = sum(sum(load.get(other, (0, 0))) for other, t in config.tiers.items() if t.rank > tier.rank)
        ahead = above + max(0, running + waiting - tier.streams + 1) / tier.streams
        cost = cost_usd(config, tier, prompt_tokens, cached_tokens, completion_tokens)
        quotes.append(Quote(name, tier.rank, cost, ahead * stream_s, tier.streams, running, waiting))
    return quotes
