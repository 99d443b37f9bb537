"""Settings of the router: one typed tree, read from a TOML file; docs/route.md lists them.

Every problem of a file is reported with its line, so that `slipstream route check` reads like a compiler.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from slipstream.errors import SlipstreamError
from slipstream.route import decision

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Wire = Literal["openai-chat", "openai-responses", "anthropic"]
Loc = tuple[str | int, ...]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_RESERVED_HEADERS = ("authorization", "x-api-key", "host", "content-length", "transfer-encoding", "connection")


class RouteConfigError(SlipstreamError):
    """Settings of the router that cannot be read or contradict each other; `problems` has them all."""

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


@dataclass(frozen=True)
class Problem:
    """One mistake in a file. line: from 1. place: the setting's dotted name."""

    line: int
    place: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.place + ': ' if self.place else ''}{self.message}"


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tier(_Settings):
    """A speed tier of a target. Prices in US dollars a million tokens, speeds in tokens a second as measured.

    cached_input, cache_write: None is the price of input. latency_s: before the first token, prefill not counted.
    request: fields that ask the target for this tier, such as {service_tier = "priority"}.
    served_as: what the target calls this tier in its answers; its name and the value of `request` always count.
    """

    input: Share = 0.0
    cached_input: Share | None = None
    cache_write: Share | None = None
    output: Share = 0.0
    decode_speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 50.0
    prefill_speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2000.0
    latency_s: Share = 0.0
    request: dict[str, Any] = {}
    served_as: tuple[str, ...] = ()


class Timeouts(_Settings):
    """Seconds. first_token: of a stream, hidden reasoning included; between_tokens: then; total: of everything."""

    connect: Seconds = 5.0
    first_token: Seconds = 120.0
    between_tokens: Seconds = 60.0
    total: Seconds = 600.0


class Breaker(_Settings):
    """After `failures` in a row a target is left alone for `open_s`, then one request at a time tries it again."""

    failures: Positive = 5
    open_s: Seconds = 20.0


class HealthCheck(_Settings):
    """GET `path` of the target's host every `every_s`; two failures in a row open the breaker."""

    path: Annotated[str, Field(pattern=r"^/[^\s\\]*$")] = "/health"
    every_s: Seconds = 10.0
    timeout_s: Seconds = 2.0


class Target(_Settings):
    """A model behind a URL, or our own engine in this process.

    url: where the API's paths begin, such as https://api.openai.com/v1 or https://api.anthropic.com.
    engine: a model that this process loads instead. key_env: the environment variable with the target's key.
    reasoning: an OpenAI Chat target takes `reasoning_content` of earlier turns. quality: share of hard steps solved.
    retries: further tries at this target after a failure that cannot have been billed. queue_s: how long a request
    waits for one of `concurrency` places. max_output: asked for where the wire needs a limit and the client named none.
    cache_ttl_s: how long the target is believed to keep a prompt in its cache.
    """

    url: str | None = None
    engine: str | None = None
    engine_options: dict[str, Any] = {}
    wire: Wire = "openai-chat"
    model: str = "default"
    key_env: str | None = None
    headers: dict[str, str] = {}
    context: Positive = 128_000
    tools: bool = True
    images: bool = False
    reasoning: bool = False
    quality: Annotated[float, Field(ge=0, le=1)] | None = None
    tiers: Annotated[dict[str, Tier], Field(min_length=1)] = {"default": Tier()}
    timeouts: Timeouts = Timeouts()
    breaker: Breaker = Breaker()
    health: HealthCheck | None = None
    retries: Annotated[int, Field(ge=0, le=10)] = 1
    concurrency: Positive = 256
    queue_s: Share = 10.0
    max_output: Positive = 8192
    cache_ttl_s: Share = 300.0

    @field_validator("url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http:// or https:// address")
        if parts.username or parts.password:
            raise ValueError("must not hold a password; name the key's variable in key_env")
        if parts.query or parts.fragment:
            raise ValueError("must end with its path")
        return url.rstrip("/")

    @field_validator("headers")
    @classmethod
    def _harmless(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or not re.fullmatch(r"[\t -~]*", value):
                raise ValueError(f"{name!r} is no header that can be sent")
            if name.lower() in _RESERVED_HEADERS:
                raise ValueError(f"{name} is set by the router; a key goes into the variable that key_env names")
        return headers

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.url is None) == (self.engine is None):
            raise ValueError("give either url or engine")
        return self

    def for_policies(self, name: str) -> decision.Target:
        """As policies see it."""
        tiers = {
            key: decision.Tier(
                name=key,
                input_price=tier.input,
                cached_price=tier.input if tier.cached_input is None else tier.cached_input,
                output_price=tier.output,
                decode_speed=tier.decode_speed,
                prefill_speed=tier.prefill_speed,
                latency_s=tier.latency_s,
            )
            for key, tier in self.tiers.items()
        }
        return decision.Target(name, tiers, self.context, self.tools, self.images, self.quality)


class Budget(_Settings):
    """US dollars a period, which begins at midnight UTC (and the first of the month), or of all time."""

    usd: Share
    period: Literal["day", "month", "total"] = "day"


class Route(_Settings):
    """A public model name and what chooses behind it.

    model: what clients ask for; default the route's own name. targets: which may be chosen; none is all.
    fallbacks: `target` or `target/tier`, tried in this order where the choice fails before its first token.
    budget: of all keys together. session_budget_usd: what one session may cost. expected_output: tokens an answer.
    strong, fast: `target/tier` of the all-strong and all-fast arms that savings are counted against.
    """

    model: str | None = None
    policy: str = "fixed"
    options: dict[str, Any] = {}
    targets: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    budget: Budget | None = None
    session_budget_usd: Share | None = None
    expected_output: Positive = 300
    strong: str | None = None
    fast: str | None = None


class Key(_Settings):
    """Who may ask. hash: `sha256:` and the hex digest of the key. routes: None is all. Limits: None is none."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    hash: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    routes: tuple[str, ...] | None = None
    budget: Budget | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None


class Server(_Settings):
    """Where the router listens and what it takes. session_headers: the first that a request has names its session."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8100
    cors: tuple[str, ...] = ()
    body_bytes: Positive = 32 << 20
    drain_s: Seconds = 30.0
    session_headers: tuple[str, ...] = ("x-session-id", "x-slipstream-session", "session_id")
    sessions: Positive = 10_000
    session_ttl_s: Seconds = 6 * 3600.0
    reload_s: Share = 1.0


class Ledger(_Settings):
    """Where decisions and bills are kept. path: an SQLite file. url: a PostgreSQL database instead, for routers on
    several machines; its password comes from libpq's PGPASSWORD or ~/.pgpass. limits: a Redis where limits and budgets
    are counted, for routers that each keep their own ledger; its password comes from REDISCLI_AUTH.

    fsync: survive the loss of power too, and not only of the process. texts: also keep the conversations, which
    `route train` and `route eval` need. keep_days: None is for ever.
    """

    path: Path = Path("route.db")
    url: str | None = None
    limits: str | None = None
    fsync: bool = True
    texts: bool = False
    keep_days: Positive | None = None

    @field_validator("url")
    @classmethod
    def _database(cls, url: str | None) -> str | None:
        if url is not None:
            parts = urlsplit(url)
            if parts.scheme not in ("postgresql", "postgres"):
                raise ValueError("must be a postgresql:// address")
            if parts.password or "password" in parts.query:
                raise ValueError("must not hold a password; set PGPASSWORD, or write ~/.pgpass")
        return url

    @field_validator("limits")
    @classmethod
    def _counter(cls, limits: str | None) -> str | None:
        if limits is not None:
            parts = urlsplit(limits)
            if parts.scheme not in ("redis", "rediss", "unix"):
                raise ValueError("must be a redis:// address")
            if parts.password or "password" in parts.query:
                raise ValueError("must not hold a password; set REDISCLI_AUTH")
        return limits


class Config(_Settings):
    """Everything."""

    server: Server = Server()
    ledger: Ledger = Ledger()
    targets: Annotated[dict[str, Target], Field(min_length=1)]
    routes: Annotated[dict[str, Route], Field(min_length=1)]
    keys: tuple[Key, ...] = ()
    _lines: Mapping[Loc, int] = PrivateAttr(default_factory=dict)

    def catalogue(self, route: Route) -> decision.Catalogue:
        """All targets of `route`, whether or not they can be asked now."""
        names = route.targets or tuple(self.targets)
        targets = {name: self.targets[name].for_policies(name) for name in names}
        return decision.Catalogue(targets, route.expected_output)

    def choice(self, text: str) -> decision.Choice:
        """`target` (its first tier) or `target/tier`. Raises RouteError."""
        name, _, tier = text.partition("/")
        if name not in self.targets:
            raise decision.RouteError(f"there is no target {name!r}; there are {', '.join(self.targets)}")
        tiers = self.targets[name].tiers
        if tier and tier not in tiers:
            raise decision.RouteError(f"target {name!r} has no tier {tier!r}; it has {', '.join(tiers)}")
        return decision.Choice(name, tier or next(iter(tiers)))

    def problem(self, loc: Loc, message: str) -> Problem:
        """`message` with the line of the setting `loc`, or of the innermost table around it."""
        line = next((self._lines[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in self._lines), 1)
        return Problem(line, _dotted(loc), message)


def read_config(text: str, where: str = "settings") -> Config:
    """Settings from TOML. Raises RouteConfigError whose `problems` lists every mistake, in the order of the file."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        raise _refused(where, [Problem(line, "", str(error).partition(" (at ")[0])]) from None
    lines = toml_lines(text)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        blank = Config.model_construct()
        blank._lines = lines
        raise _refused(where, [blank.problem(e["loc"], _said(e["msg"])) for e in error.errors()]) from None
    config._lines = lines
    problems = [config.problem(loc, message) for loc, message in _contradictions(config)]
    if problems:
        raise _refused(where, problems)
    return config


def load_config(path: Path) -> Config:
    """Settings in `path`. Raises RouteConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RouteConfigError(f"{path}: {error}") from error
    return read_config(text, str(path))


def _refused(where: str, problems: list[Problem]) -> RouteConfigError:
    ordered = tuple(sorted(problems, key=lambda problem: problem.line))
    more = f" (and {len(ordered) - 1} more; see `slipstream route check`)" if len(ordered) > 1 else ""
    return RouteConfigError(f"{where}: {ordered[0]}{more}", ordered)


def _said(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return "there is no such setting" if message == "Extra inputs are not permitted" else message


def _dotted(loc: Loc) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _contradictions(config: Config) -> list[tuple[Loc, str]]:
    found: list[tuple[Loc, str]] = []
    for name, tgt in config.targets.items():
        if not re.fullmatch(r"[\w.-]+", name):
            found.append((("targets", name), "a target's name is made of letters, digits, `.`, `_` and `-`"))
        for tier, settings in tgt.tiers.items():
            if taken := {"model", "messages", "input", "stream"} & set(settings.request):
                found.append((("targets", name, "tiers", tier, "request"), f"must not set {', '.join(sorted(taken))}"))
    public: dict[str, str] = {}
    for name, route in config.routes.items():
        asked = route.model or name
        if asked in public:
            found.append((("routes", name), f"clients ask for {asked!r}, and so they do for route {public[asked]!r}"))
        public[asked] = name
        for i, one in enumerate(route.targets):
            if one not in config.targets:
                found.append((("routes", name, "targets", i), f"there is no target {one!r}"))
        arms = [(("routes", name, field), getattr(route, field)) for field in ("strong", "fast")]
        arms += [(("routes", name, "fallbacks", i), text) for i, text in enumerate(route.fallbacks)]  # type: ignore[misc]
        for loc, text in arms:
            try:
                if text is not None:
                    config.choice(text)
            except decision.RouteError as error:
                found.append((loc, str(error)))
    names: set[str] = set()
    for i, key in enumerate(config.keys):
        if key.name in names:
            found.append((("keys", i, "name"), f"two keys are named {key.name!r}"))
        names.add(key.name)
        found += [
            (("keys", i, "routes"), f"there is no route {one!r}")
            for one in key.routes or ()
            if one not in config.routes
        ]
    if config.server.host not in LOOPBACK and not config.keys:
        found.append((("server", "host"), "others can reach this address; add [[keys]], or leave host out"))
    return found


_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_HEADER = re.compile(r"\s*(\[\[?)(.*?)\]\]?\s*(?:#.*)?$")


def toml_lines(text: str) -> dict[Loc, int]:
    """Where each table and key of a valid TOML document stands, from line 1."""
    lines = text.split("\n")
    found: dict[Loc, int] = {}
    counts: dict[Loc, int] = {}
    table: Loc = ()
    i = 0
    while i < len(lines):
        start = i
        i += 1
        if key := _KEY.match(lines[start]):
            chunk = lines[start]
            while not _parses(chunk) and i < len(lines):  # a value that goes on over several lines
                chunk += "\n" + lines[i]
                i += 1
            _note(found, table + _path(key[1]), start + 1)
        elif header := _HEADER.match(lines[start]):
            table = ()
            *outer, last = _path(header[2])
            for part in outer:  # within an array of tables, a header speaks of its latest
                table = (*table, part)
                table = (*table, counts[table] - 1) if table in counts else table
            table = (*table, last)
            if header[1] == "[[":
                counts[table] = counts.get(table, 0) + 1
                table = (*table, counts[table] - 1)
            _note(found, table, start + 1)
    return found


def _note(found: dict[Loc, int], loc: Loc, line: int) -> None:
    for n in range(1, len(loc) + 1):
        found.setdefault(loc[:n], line)


def _parses(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _path(key: str) -> tuple[str, ...]:
    """The parts of a dotted key, unquoted."""
    node: Any = tomllib.loads(f"{key} = 0")
    parts = []
    while isinstance(node, dict):
        ((part, node),) = node.items()
        parts.append(part)
    return tuple(parts)
