"""Settings of the server: one typed tree, read from a TOML file and the command line; `docs/server.md` lists them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slipstream.errors import SlipstreamError

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ConfigError(SlipstreamError):
    """Settings that cannot be read or contradict each other."""


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Prices(_Settings):
    """US dollars a million tokens, before a tier's multipliers. 0: the cost is reported as 0."""

    input: Share = 0.0
    cached_input: Share = 0.0
    output: Share = 0.0


class Tier(_Settings):
    """A speed that clients may ask for.

    rank: a stream of a higher rank gets every round; lower ones wait at a round boundary and lose nothing.
    input, cached_input, output: multiples of the prices. streams: how many share the machine at once.
    queue: how many more may wait. drafts: most tokens guessed a round; None leaves it to the engine.
    """

    rank: int
    input: Share = 1.0
    cached_input: Share = 1.0
    output: Share = 1.0
    streams: Positive = 4
    queue: Annotated[int, Field(ge=0)] = 64
    drafts: Annotated[int, Field(ge=0, le=15)] | None = None


def multiplied(rank: int, times: float, streams: int) -> Tier:
    return Tier(rank=rank, input=times, cached_input=times, output=times, streams=streams)


TIERS = {
    "flex": multiplied(0, 0.5, 4),
    "default": multiplied(1, 1.0, 4),
    "priority": multiplied(2, 2.0, 2),
    "ultrafast": multiplied(3, 6.0, 1),
}


class Key(_Settings):
    """Who may ask. hash: `sha256:` and the hex digest of the key. tiers: None is all. Limits: None is none."""

    name: str
    hash: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    tiers: tuple[str, ...] | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None


class Limits(_Settings):
    """What one request may ask for. request_s: from its arrival to its last token.

    requests: in progress at once, those included whose answers are read slowly. unread: rounds that a reader may lag
    behind its stream before that is ended.
    """

    body_bytes: Positive = 8 << 20
    messages: Positive = 4096
    choices: Positive = 8
    max_tokens: Positive | None = None
    tools: Positive = 128
    stops: Positive = 16
    schema_bytes: Positive = 1 << 16
    schema_depth: Positive = 32
    requests: Positive = 1024
    unread: Positive = 16384
    request_s: Annotated[float, Field(gt=0)] = 3600.0
    drain_s: Annotated[float, Field(gt=0)] = 30.0


class Sessions(_Settings):
    """Kept conversations. memory_mb: of all KV caches. spill_s: idle time before one is written to dir."""

    count: Positive = 64
    memory_mb: Positive = 4096
    dir: Path | None = None
    disk_mb: Positive = 16384
    spill_s: Share = 1.0


class Config(_Settings):
    """Everything. auto: the tier of `service_tier: auto`, fast: of Anthropic's `speed: fast`.

    fallback: where an asked tier cannot be had, serve and bill `auto` even if the client did not opt in.
    cors: origins that browsers may call from. prompts_in_logs: write prompts to the log.
    prefill_slice: prompt tokens between two chances to change streams. quantum: rounds between them.
    delivery_s: rounds that end sooner after the last delivery to their reader go with the next; 0 is each at once.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    model_name: str | None = None
    auto: str = "default"
    fast: str = "priority"
    fallback: bool = False
    cors: tuple[str, ...] = ()
    prompts_in_logs: bool = False
    prefill_slice: Positive = 512
    quantum: Positive = 1
    delivery_s: Share = 0.02
    temperature: Share = 1.0
    drafter: str = "auto"
    prices: Prices = Prices()
    tiers: dict[str, Tier] = TIERS
    keys: tuple[Key, ...] = ()
    limits: Limits = Limits()
    sessions: Sessions = Sessions()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.auto not in self.tiers:
            raise ValueError(f"auto names tier {self.auto!r}, but the tiers are {', '.join(self.tiers)}")
        for key in self.keys:
            for tier in key.tiers or ():
                if tier not in self.tiers:
                    raise ValueError(f"key {key.name!r} names tier {tier!r}, which is not defined")
        if len({key.name for key in self.keys}) < len(self.keys):
            raise ValueError("two keys have the same name")
        return self


def load_config(path: Path | None = None, **changes: object) -> Config:
    """The settings in `path`, then `changes` (None leaves a setting alone). Raises ConfigError in one line."""
    data: dict[str, object] = {}
    where = "settings"
    if path is not None:
        where = str(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
    sessions = {name.removeprefix("session_"): value for name, value in changes.items() if name.startswith("session_")}
    data |= {k: v for k, v in changes.items() if v is not None and not k.startswith("session_")}
    if given := {name: value for name, value in sessions.items() if value is not None}:
        stored = data.get("sessions")
        data["sessions"] = (stored if isinstance(stored, dict) else {}) | given
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}: {place + ': ' if place else ''}{first['msg']}") from error
