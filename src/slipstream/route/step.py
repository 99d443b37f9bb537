"""One request on its way: decided, tried, streamed or answered whole, billed.

    Step.open -> policy decides -> attempts until a first token -> pieces pass through -> bill -> last bytes

The row of a request is on disk before its first byte goes to the client, its bill before the last.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from slipstream.route import trace
from slipstream.route.config import Key, Route, Tier
from slipstream.route.decision import Catalogue, Choice, Conversation, Decision, Reply, RouteError, SessionState
from slipstream.route.estimate import declined, estimate
from slipstream.route.gateway import Gateway, Live
from slipstream.route.upstream import Attempt, Fault, Piece
from slipstream.route.wire import WIRES, reply, write_request
from slipstream.route.wire.neutral import (
    BYTES_PER_TOKEN,
    Ask,
    CallDelta,
    End,
    Event,
    Json,
    NotCarried,
    Start,
    Text,
    TextDelta,
    ThoughtDelta,
    Turn,
    Usage,
    bytes_of,
)
from slipstream.serve.errors import ApiError, invalid
from slipstream.serve.wire import CLIENT_LEFT, dumps

log = logging.getLogger("slipstream.route")

PASSED = ("anthropic-version", "anthropic-beta", "openai-beta")
"""Headers of the client that go on to a target of its own wire."""
TIER_FIELDS = ("service_tier", "service_tier_fallback", "speed")
"""A route chooses the tier, so what a client says of it is taken out, and reported."""
LONGEST_WAIT_S = 5.0


def dollars(tier: Tier, usage: Usage) -> float:
    """The price of `usage` at `tier`."""
    cached = tier.input if tier.cached_input is None else tier.cached_input
    written = tier.input if tier.cache_write is None else tier.cache_write
    fresh = max(0, usage.input - usage.cached - usage.written)
    return (fresh * tier.input + usage.cached * cached + usage.written * written + usage.output * tier.output) / 1e6


def served_tier(tiers: Mapping[str, Tier], asked: str, told: str | None) -> str:
    """The tier that is billed: the one that the target says it served; `asked` where it says nothing we know."""

    def names(name: str) -> set[str]:
        values = {value for value in tiers[name].request.values() if isinstance(value, str)}
        return {name, *tiers[name].served_as, *values}

    if told is None or told in names(asked):
        return asked
    return next((name for name in tiers if told in names(name)), asked)


class Step:
    """One request of a client."""

    def __init__(self, gateway: Gateway, ask: Ask, key: Key | None, headers: Mapping[str, str]) -> None:
        """Raises ApiError where no route or target can take the request."""
        self.id = f"req_{secrets.token_hex(12)}"
        self._arrived, self._when = time.perf_counter(), time.time()
        self._gateway, self.live, self.ask, self._headers = gateway, gateway.live, ask, headers
        self._key = key
        self.route_name = self.live.route_of(ask.model, key)
        self.route: Route = self.live.config.routes[self.route_name]
        names = self.live.config.server.session_headers
        given = next((headers[name][:200] for name in names if headers.get(name)), ask.session)
        self.session, self.chain = gateway.sessions.find(self._key_name, ask, given, self.id)
        agent = headers.get("x-slipstream-agent", "")[:100] or "main"
        self.conversation: Conversation = ask.conversation(agent)
        self._bodies: dict[str, tuple[Json, list[str]]] = {}
        self.attempts: list[Json] = []
        self.choice = Choice("", "")
        self.decision: Decision | None = None
        self._usage = Usage()
        self._size = 0
        self._ttft: float | None = None
        self._billed = self._row_open = self._guessed = False
        self._model = ""

    @property
    def _key_name(self) -> str:
        return self._key.name if self._key else "anyone"

    # ---- deciding ----

    async def open(self) -> None:
        """Decide, and open the row. Raises ApiError."""
        catalogue = self._catalogue()
        ttl_s = {name: target.cache_ttl_s for name, target in self.live.config.targets.items()}
        state = self.session.state(self.chain, ttl_s, self._gateway.sessions.now())
        limit = self.route.session_budget_usd
        if limit is not None and state.spent >= limit:
            raise ApiError(402, f"this session has spent its ${limit:g}; begin another", code="budget_exceeded")
        policy = self.live.policies[self.route_name]
        asking = getattr(policy, "decide_asking", None)
        if asking is not None:  # asking costs, so the allowance comes first
            await self._admit(0.0)
        try:
            if asking is not None:
                decision: Decision = await asking(self.conversation, state, catalogue, self._asker)
            else:
                decision = policy.decide(self.conversation, state, catalogue)
        except RouteError as error:
            await self._refuse(ApiError(400, str(error), code="no_target"))
            raise ApiError(400, str(error), code="no_target") from None
        self.decision, self.choice = decision, decision.choice
        self.session.decided(policy.name, decision)
        predicted = estimate(self.choice, self.conversation, state, catalogue)
        if asking is None:
            await self._admit(predicted.cost)
        self._candidates = self._order(catalogue)
        self._row = {
            "policy": policy.name, "target": self.choice.target, "tier": self.choice.tier,
            "reasons": list(decision.reasons), "alternatives": [asdict(one) for one in decision.alternatives],
            "score": decision.score, "latch": decision.latch, "predicted_s": predicted.time_s,
            "predicted_cost": predicted.cost, "judge_cost": decision.judge_cost, "judge_time_s": decision.judge_time_s,
            "reserved": predicted.cost, "step": self.session.requests,
        }  # fmt: skip
        self._noted = asyncio.ensure_future(self._gateway.ledger.decided(self.id, self._row))

    def _catalogue(self) -> Catalogue:
        """The route's targets that are up and can be told the request. Raises ApiError where there is none."""
        whole = self.live.config.catalogue(self.route)
        left, lacking, down = {}, [], []
        for name, target in whole.targets.items():
            upstream = self.live.upstreams[name]
            if not upstream.breaker.ready:
                down.append(name)
                continue
            try:
                self._written(name)
            except NotCarried as error:
                lacking.append((upstream.target.wire, error.fields))
                continue
            left[name] = target
        if left:
            return Catalogue(left, whole.expected_output)
        if lacking and not down:
            wires = ", ".join(sorted({wire for wire, _ in lacking}))
            fields = sorted({field for _, fields in lacking for field in fields})
            shown = ", ".join(fields[:5])
            text = f"{shown} cannot be told to this route's targets, which speak {wires}; leave it out"
            raise invalid(text, fields[0].partition(" ")[0], "not_carried")
        raise ApiError(503, f"{', '.join(down)} failed lately and is left alone", code="targets_down", retry_s=5.0)

    def _written(self, name: str) -> tuple[Json, list[str]]:
        """The body for a target, without model and tier. Raises NotCarried."""
        target = self.live.config.targets[name]
        kind = f"{target.wire} {target.reasoning} {target.max_output}"
        if kind not in self._bodies:
            self._bodies[kind] = write_request(
                self.ask, target.wire, reasoning=target.reasoning, max_output=target.max_output
            )
        return self._bodies[kind]

    async def _admit(self, reserved: float) -> None:
        row = {
            "id": self.id, "started": self._when, "key": self._key_name, "route": self.route_name,
            "session": self.session.id, "wire": self.ask.wire, "stream": self.ask.stream, "status": "open",
            "agent": self.conversation.agent, "reserved": reserved,
        }  # fmt: skip
        await self._gateway.ledger.admit(row, self.live.allowance(self._key, self.route_name))
        self._row_open = True

    async def _refuse(self, error: ApiError) -> None:
        if self._row_open:
            self._billed = True
            await self._gateway.ledger.billed(self.id, {"status": "refused", "cost": 0.0, "error": str(error)})

    def _order(self, catalogue: Catalogue) -> list[Choice]:
        """The choice, then the route's fallbacks that can take the request."""
        order = [self.choice]
        for text in self.route.fallbacks:
            choice = self.live.config.choice(text)
            target = catalogue.targets.get(choice.target)
            if target and choice not in order and declined(target, self.conversation, catalogue) is None:
                order.append(choice)
        return order

    async def _asker(self, choice: Choice, prompt: str, *, max_tokens: int, timeout_s: float) -> Reply:
        """One question of a policy to a target of the settings."""
        target, upstream = self.live.config.targets.get(choice.target), self.live.upstreams.get(choice.target)
        if target is None or upstream is None or choice.tier not in target.tiers:
            raise RouteError(f"there is no {choice.target}/{choice.tier} to ask")
        question = Ask("", {}, "", [Turn("user", (Text(prompt),))], settings={"max_tokens": max_tokens})
        body, _ = write_request(question, target.wire, reasoning=False, max_output=max_tokens)
        body |= {"model": target.model} | target.tiers[choice.tier].request
        began = time.perf_counter()
        attempt = Attempt(upstream, body, upstream.headers({}), stream=False)
        fault = None
        try:
            async with asyncio.timeout(timeout_s):
                await attempt.start()
        except TimeoutError:
            raise RouteError(f"no answer within {timeout_s:g} s") from None
        except Fault as error:
            fault = error
            raise RouteError(str(error)) from None
        finally:
            await attempt.close(fault)
        usage = next((one for one in attempt.whole_events if isinstance(one, Usage)), Usage())
        text = "".join(one.text for one in attempt.whole_events if isinstance(one, TextDelta))
        spent = dollars(target.tiers[served_tier(target.tiers, choice.tier, usage.tier)], usage)
        return Reply(text, usage.input, usage.output, spent, time.perf_counter() - began)

    # ---- trying ----

    async def connect(self) -> Attempt:
        """The first attempt that answers. Raises ApiError where none does."""
        last: Fault | None = None
        for choice in self._candidates:
            target = self.live.config.targets[choice.target]
            for again in range(1 + target.retries):
                attempt = self._attempt(choice)
                began = time.perf_counter()
                fault: Fault | None = None
                ready = False
                try:
                    await attempt.start()
                    self.choice, ready = choice, True
                    return attempt
                except Fault as error:
                    last = fault = error
                    self._gateway.metrics.faults.labels(choice.target, str(error.status)).inc()
                    self._failed(choice, error.status, str(error), began, error.lost)
                except asyncio.CancelledError:
                    self._failed(choice, CLIENT_LEFT, "the client left", began, True)
                    raise
                finally:
                    if not ready:
                        await attempt.close(fault)
                wait = fault.retry_s if fault.retry_s is not None else 0.1 * 2**again
                if not fault.again or wait > LONGEST_WAIT_S or again == target.retries:
                    break
                await asyncio.sleep(wait * (0.75 + secrets.randbelow(500) / 1000))
            if last is not None and not last.elsewhere:
                break
        assert last is not None
        status = last.status if 400 <= last.status < 600 else 502
        raise ApiError(status, str(last), code=last.code or "upstream_failed", retry_s=last.retry_s)

    def _failed(self, choice: Choice, status: int, error: str, began: float, lost: bool) -> None:
        took = round(time.perf_counter() - began, 6)
        told: Json = {"target": choice.target, "tier": choice.tier, "status": status, "error": error, "time_s": took}
        self.attempts.append(told | ({"may_be_billed": True} if lost else {}))

    def _attempt(self, choice: Choice) -> Attempt:
        target, upstream = self.live.config.targets[choice.target], self.live.upstreams[choice.target]
        body = {name: value for name, value in self._written(choice.target)[0].items() if name not in TIER_FIELDS}
        body |= {"model": target.model} | target.tiers[choice.tier].request
        same = target.wire == self.ask.wire
        passed = {name: self._headers[name] for name in PASSED if same and name in self._headers}
        if parent := trace.outgoing(self._headers.get("traceparent")):
            passed["traceparent"] = parent
        passed["idempotency-key"] = f"{self.id}-{choice.target}"
        return Attempt(upstream, body, upstream.headers(passed), self.ask.stream)

    @property
    def dropped(self) -> list[str]:
        """What the target was not told."""
        left = [name for name in TIER_FIELDS if self.ask.body.get(name) not in (None, "auto", "default")]
        return sorted({*self._written(self.choice.target)[1], *left})

    def headers(self) -> dict[str, str]:
        """Who answered, and what it was not told."""
        headers = {
            "x-slipstream-request": self.id,
            "x-slipstream-target": self.choice.target,
            "x-slipstream-tier": self.choice.tier.encode("ascii", "replace").decode(),
            "request-id" if self.ask.wire == "anthropic" else "x-request-id": self.id,
        }
        if dropped := self.dropped:
            text = ", ".join("".join(c for c in one if c.isascii() and c.isprintable()) for one in dropped)
            headers["x-slipstream-dropped"] = text[:1000]
        return headers

    # ---- answering ----

    async def whole(self) -> bytes:
        """The whole answer as JSON. Raises ApiError."""
        attempt: Attempt | None = None
        status, error = "cancelled", None
        try:
            attempt = await self.connect()
            self._first()
            events = self._counted(attempt.whole_events)
            same = attempt.upstream.target.wire == self.ask.wire
            body = attempt.whole if same else dumps(reply.whole(self.ask.wire, events)).encode()
            status = "ok"
            await self._noted
            await self._bill(status)
            return body
        except ApiError as refused:
            status, error = "failed", refused
            raise
        finally:
            await asyncio.shield(self._finish(attempt, status, error))

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer's bytes; the first come with its first token. Raises ApiError before those alone."""
        attempt: Attempt | None = None
        status, error, begun, count = "cancelled", None, False, 0
        try:
            attempt = await self.connect()
            self._first()
            same = attempt.upstream.target.wire == self.ask.wire
            writer = None if same else WIRES[self.ask.wire].writer(self.ask)
            await self._noted
            held = b""
            for piece in attempt.prelude:
                held += self._bytes(piece, writer)
                count += 1
            if any(isinstance(one, End) for piece in attempt.prelude for one in piece.events):
                status = "ok"
                await self._bill(status)
            begun = True
            yield held
            async for pieces in attempt.rest():
                told = b""
                for piece in pieces:
                    told += self._bytes(piece, writer)
                    count += 1
                if any(isinstance(one, End) for one in pieces[-1].events):
                    status = "ok"
                    await self._bill(status)
                if told:
                    yield told
        except (ApiError, Fault) as fault:
            error = fault if isinstance(fault, ApiError) else ApiError(fault.status, str(fault), code=fault.code)
            status = "failed"
            if not begun:
                raise error from None
            await asyncio.shield(self._finish(attempt, status, error))
            number = writer.count if isinstance(writer, reply.ResponsesWriter) else count
            yield reply.error_bytes(self.ask.wire, error, number)
        finally:
            await asyncio.shield(self._finish(attempt, status, error))

    def _bytes(self, piece: Piece, writer: reply.Writer | None) -> bytes:
        events = self._counted(piece.events)
        if writer is not None:
            return b"".join(map(writer.feed, events))
        if not self.ask.wants_usage and piece.events and all(isinstance(one, Usage) for one in piece.events):
            return b""  # a chunk that only the router asked for
        return piece.raw

    def _first(self) -> None:
        self._ttft = time.perf_counter() - self._arrived

    def _counted(self, events: Sequence[Event]) -> list[Event]:
        """Counts them for the bill. Where a target ends without its usage, the client is told the same estimate."""
        told: list[Event] = []
        for one in events:
            if isinstance(one, Usage):
                self._usage = one
            elif isinstance(one, TextDelta | ThoughtDelta | CallDelta):
                self._size += bytes_of(one.text)
            elif isinstance(one, Start):
                self._model = one.model
            elif isinstance(one, End) and not (self._usage.input or self._usage.output):
                self._guessed, self._usage = True, self._estimate()
                told.append(self._usage)
            told.append(one)
        return told

    def _estimate(self) -> Usage:
        """Of what came, and of the prompt where nothing was said of it."""
        told = self._usage
        prompt, written = self.conversation.prompt_tokens, self._size // BYTES_PER_TOKEN
        return replace(told, input=told.input or prompt, output=max(told.output, written))

    # ---- billing ----

    async def abandon(self, status: str) -> None:
        """Close the row where nothing else did: the client left, or deciding failed."""
        if not self._row_open or self._billed:
            return
        if self.decision is None:
            self._billed = True
            await self._gateway.ledger.billed(self.id, {"status": status, "cost": 0.0})
        else:
            await self._finish(None, status, None)

    async def _finish(self, attempt: Attempt | None, status: str, error: ApiError | None) -> None:
        if attempt is not None:
            await attempt.close()
        with suppress(ApiError):  # told where it was awaited
            await self._noted
            await self._bill(status, error)

    async def _bill(self, status: str, error: ApiError | None = None) -> None:
        """Close the row, once. An answer that did not end is billed for what came of it."""
        if self._billed:
            return
        self._billed = True
        target = self.live.config.targets[self.choice.target]
        estimated = self._guessed or (self._ttft is not None and status != "ok")
        usage = self._estimate() if estimated else self._usage
        served = served_tier(target.tiers, self.choice.tier, usage.tier)
        cost = dollars(target.tiers[served], usage)
        took = time.perf_counter() - self._arrived
        assert self.decision is not None
        judged = self.decision.judge_cost
        arms = self._arms(usage) if self._ttft is not None else {}
        row: Json = {
            "status": status, "target": self.choice.target, "tier": self.choice.tier, "tier_served": served,
            "model": self._model, "attempts": self.attempts, "ttft_s": self._ttft, "time_s": took,
            "input": usage.input, "cached": usage.cached, "written": usage.written, "output": usage.output,
            "reasoning": usage.reasoning, "estimated": estimated, "cost": cost, "judge_cost": judged,
            "dropped": self.dropped, "arms": arms, "error": str(error) if error else None,
        }  # fmt: skip
        if self.live.config.ledger.texts:
            row["texts"] = asdict(self.conversation)
        if self._ttft is not None:
            now = self._gateway.sessions.now()
            self.session.answered(self.choice, self.chain, usage.input, cost + judged, now)
        self._measure(status, served, usage, cost + judged, took, arms)
        await self._gateway.ledger.billed(self.id, row)
        trace.record(self.id, self.route_name, row | self._row, self._headers.get("traceparent"), took)

    def _arms(self, usage: Usage) -> dict[str, dict[str, float]]:
        """What this step would have cost and taken had every step of the session gone to one target."""
        arms = {}
        held = min(self.session.prefix_tokens(self.chain), usage.input)
        for arm in ("strong", "fast"):
            if (text := getattr(self.route, arm)) is None:
                continue
            choice = self.live.config.choice(text)
            tier = self.live.config.targets[choice.target].tiers[choice.tier]
            time_s = tier.latency_s + (usage.input - held) / tier.prefill_speed + usage.output / tier.decode_speed
            arms[arm] = {"cost": dollars(tier, Usage(usage.input, held, output=usage.output)), "time_s": time_s}
        return arms

    def _measure(
        self, status: str, served: str, usage: Usage, cost: float, took: float, arms: Mapping[str, Mapping[str, float]]
    ) -> None:
        metrics, target = self._gateway.metrics, self.choice.target
        where = (self.route_name, target, served)
        metrics.requests.labels(*where, status).inc()
        metrics.cost_usd.labels(*where).inc(cost)
        metrics.time_s.labels(*where).observe(took)
        if self._ttft is not None:
            metrics.ttft_s.labels(*where).observe(self._ttft)
        for kind in ("input", "cached", "output"):
            metrics.tokens.labels(target, served, kind).inc(getattr(usage, kind))
        for arm, figures in arms.items():
            metrics.arm_cost_usd.labels(self.route_name, arm).inc(figures["cost"])
            metrics.arm_s.labels(self.route_name, arm).inc(figures["time_s"])


def dry_run(live: Live, ask: Ask, state: SessionState) -> dict[str, Any]:
    """What would become of `ask`, without asking anyone: the decision, its reasons, and what is left out.

    Raises ApiError or RouteError.
    """
    name = live.route_of(ask.model, None)
    route, conversation = live.config.routes[name], ask.conversation()
    left, lacking = {}, {}
    for target, seen in live.config.catalogue(route).targets.items():
        settings = live.config.targets[target]
        try:
            write_request(ask, settings.wire, reasoning=settings.reasoning, max_output=settings.max_output)
            left[target] = seen
        except NotCarried as error:
            lacking[target] = error.fields
    catalogue = Catalogue(left, route.expected_output)
    decision = live.policies[name].decide(conversation, state, catalogue)
    settings = live.config.targets[decision.choice.target]
    _, dropped = write_request(ask, settings.wire, reasoning=settings.reasoning, max_output=settings.max_output)
    return {
        "route": name,
        "policy": live.policies[name].name,
        "prompt_tokens": conversation.prompt_tokens,
        "choice": asdict(decision.choice),
        "reasons": list(decision.reasons),
        "predicted": asdict(estimate(decision.choice, conversation, state, catalogue)),
        "alternatives": [asdict(one) for one in decision.alternatives],
        "fallbacks": list(route.fallbacks),
        "dropped": dropped,
        "not_carried": lacking,
    }
