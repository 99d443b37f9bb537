"""Who asks: API keys compared by hash in constant time, and what each key may spend a minute. No key is ever kept."""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from slipstream.serve.config import Key
from slipstream.serve.errors import ApiError

MINUTE_S = 60.0


def hash_key(secret: str) -> str:
    """How a key is written in a settings file. API keys are long and random, so that one SHA-256 is enough."""
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


class Window:
    """What was spent in the last minute against a limit."""

    def __init__(self, limit: int | None, clock: Callable[[], float]) -> None:
        self._limit, self._clock = limit, clock
        self._spent: deque[tuple[float, int]] = deque()
        self._sum = 0

    def wait_s(self) -> float:
        """Seconds until something may be spent again; 0 is now."""
        now = self._clock()
        while self._spent and self._spent[0][0] <= now - MINUTE_S:
            self._sum -= self._spent.popleft()[1]
        if self._limit is None or self._sum < self._limit:
            return 0.0
        return self._spent[0][0] + MINUTE_S - now

    def spend(self, amount: int) -> None:
        if self._limit is not None:
            self._spent.append((self._clock(), amount))
            self._sum += amount


class Client:
    """One key's rights and what it has spent. Without keys there is one client, who may do everything."""

    def __init__(self, key: Key | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = key.name if key else "anyone"
        self.tiers = key.tiers if key else None
        self._requests = Window(key.requests_per_minute if key else None, clock)
        self._tokens = Window(key.tokens_per_minute if key else None, clock)
        self._lock = threading.Lock()

    def admit(self) -> None:
        """Count one request. Raises ApiError 429 where the key has spent its minute."""
        with self._lock:
            wait = max(self._requests.wait_s(), self._tokens.wait_s())
            if wait > 0:
                raise ApiError(
                    429, f"the rate limit of key {self.name!r} is reached; try again in {wait:.0f} s",
                    code="rate_limit_exceeded", retry_s=wait,
                )  # fmt: skip
            self._requests.spend(1)

    def spend_tokens(self, count: int) -> None:
        with self._lock:
            self._tokens.spend(count)


class Doorkeeper:
    """Knows the keys' hashes."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._clients = [(key.hash.encode(), Client(key)) for key in keys]
        self._anyone = Client(None)

    def admit(self, authorization: str | None, x_api_key: str | None) -> Client:
        """The client of `Authorization: Bearer KEY` or `x-api-key: KEY`. Raises ApiError 401."""
        if not self._clients:
            return self._anyone
        secret = x_api_key or ""
        if authorization and authorization[:7].lower() == "bearer ":
            secret = authorization[7:].strip()
        given = hash_key(secret).encode()
        found = None
        for known, client in self._clients:  # every key is compared, so that time tells nothing about which
            if hmac.compare_digest(known, given):
                found = client
        if found is None:
            raise ApiError(
                401, "no valid API key; send `Authorization: Bearer KEY` or `x-api-key: KEY`", code="invalid_api_key"
            )
        return found
