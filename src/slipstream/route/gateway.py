"""The router's state, and what replaces it when its settings change.

`Live` is one reading of the settings with the targets opened and the policies made. A request keeps the one that it
began with; a reload puts another in its place, and what is the same target keeps its connections and its breaker.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.route.config import Config, Key, RouteConfigError
from slipstream.route.decision import Policy, RouteError
from slipstream.route.ledger import Allowance, Ledger
from slipstream.route.local import LocalEngine
from slipstream.route.metrics import Metrics
from slipstream.route.policies import make_policy
from slipstream.route.sessions import Sessions
from slipstream.route.upstream import Upstream
from slipstream.serve.auth import hash_key
from slipstream.serve.errors import ApiError

log = logging.getLogger("slipstream.route")


@dataclass
class Live:
    """Settings in use."""

    config: Config
    upstreams: dict[str, Upstream]
    policies: dict[str, Policy]
    by_model: dict[str, str]
    engines: dict[str, LocalEngine] = field(default_factory=dict)

    def client(self, authorization: str | None, x_api_key: str | None) -> Key | None:
        """Who asks; None where no keys are set. Raises ApiError 401."""
        keys = self.config.keys
        if not keys:
            return None
        secret = x_api_key or ""
        if authorization and authorization[:7].lower() == "bearer ":
            secret = authorization[7:].strip()
        given, found = hash_key(secret).encode(), None
        for key in keys:  # every one is compared, so that time tells nothing about which
            if hmac.compare_digest(key.hash.encode(), given):
                found = key
        if found is None:
            text = "no valid API key; send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise ApiError(401, text, code="invalid_api_key")
        return found

    def route_of(self, model: str, key: Key | None) -> str:
        """Raises ApiError 404 for a model that is not there, or not for this key."""
        name = self.by_model.get(model)
        if name is None or (key is not None and key.routes is not None and name not in key.routes):
            known, shown = ", ".join(model for model, _ in self.models(key)), model[:100]
            raise ApiError(404, f"no model {shown!r} here; there are {known}", code="model_not_found", param="model")
        return name

    def models(self, key: Key | None) -> list[tuple[str, str]]:
        """(public model, route) of all that `key` may ask."""
        allowed = key.routes if key and key.routes is not None else self.config.routes
        return [(model, route) for model, route in self.by_model.items() if route in allowed]

    def allowance(self, key: Key | None, route: str) -> Allowance:
        budgets = []
        if key is not None and key.budget is not None:
            budgets.append((f"key:{key.name}", key.budget))
        if (of_route := self.config.routes[route].budget) is not None:
            budgets.append((f"route:{route}", of_route))
        limits = (key.requests_per_minute, key.tokens_per_minute) if key else (None, None)
        return Allowance(*limits, budgets)


def make_policies(config: Config) -> dict[str, Policy]:
    """Raises RouteConfigError with the line of the options at fault."""
    policies, problems = {}, []
    for name, route in config.routes.items():
        try:
            policies[name] = make_policy(route.policy, route.options)
        except (RouteError, ValueError, TypeError) as error:
            problems.append(config.problem(("routes", name, "options" if route.options else "policy"), str(error)))
    if problems:
        raise RouteConfigError(f"settings: {problems[0]}", tuple(problems))
    return policies


class Gateway:
    """Everything that outlives a reload."""

    def __init__(self, config: Config) -> None:
        """Raises SlipstreamError where a policy, an engine or the ledger cannot be had."""
        policies = make_policies(config)
        self.ledger = Ledger(config.ledger)
        self.metrics = Metrics()
        self.sessions = Sessions(config.server.sessions, config.server.session_ttl_s)
        self.draining = False
        self._reloading = asyncio.Lock()
        self._retired: set[asyncio.Task[None]] = set()
        self.live = self._open(config, policies, None)

    def _open(self, config: Config, policies: Mapping[str, Policy], before: Live | None) -> Live:
        upstreams: dict[str, Upstream] = {}
        engines: dict[str, LocalEngine] = {}
        for name, target in config.targets.items():
            if before and before.config.targets.get(name) == target:
                upstreams[name] = before.upstreams[name]
                if name in before.engines:
                    engines[name] = before.engines[name]
            elif target.engine is not None:
                engines[name] = LocalEngine(target)
                upstreams[name] = Upstream(name, target, engines[name].transport())
            else:
                upstreams[name] = Upstream(name, target)
        by_model = {route.model or name: name for name, route in config.routes.items()}
        return Live(config, upstreams, dict(policies), by_model, engines)

    def start(self) -> None:
        """Begin health checks, in the running loop."""
        self.loop = asyncio.get_running_loop()
        for upstream in self.live.upstreams.values():
            upstream.start_checks()

    async def reload(self, config: Config) -> None:
        """Take other settings from now on; streams that run end with the old ones.

        Models and policies load in a thread, so that streams go on meanwhile. What needs a restart - address, ledger,
        sessions - stays. Raises SlipstreamError, and then nothing changes.
        """
        async with self._reloading:
            before = self.live
            after = await asyncio.to_thread(lambda: self._open(config, make_policies(config), before))
            self.live = after
        self.start()
        for name, upstream in before.upstreams.items():
            if after.upstreams.get(name) is not upstream:
                task = asyncio.create_task(self._retire(upstream, before.engines.get(name)))
                self._retired.add(task)
                task.add_done_callback(self._retired.discard)
        log.info("%s", json.dumps({"event": "reloaded", "targets": len(after.upstreams), "routes": len(config.routes)}))

    async def _retire(self, upstream: Upstream, engine: LocalEngine | None) -> None:
        await upstream.close()
        if engine is not None:
            await asyncio.to_thread(engine.close)

    async def close(self) -> None:
        for name, upstream in self.live.upstreams.items():
            await self._retire(upstream, self.live.engines.get(name))
        await asyncio.to_thread(self.ledger.close)

    def metrics_text(self) -> bytes:
        for name, upstream in self.live.upstreams.items():
            self.metrics.breaker.labels(name).set(upstream.breaker.state != "closed")
            self.metrics.running.labels(name).set(upstream.running)
        return self.metrics.text()
