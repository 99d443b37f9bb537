"""Limits and budgets counted in Redis, for routers that each keep a ledger of their own.

    admit: count the last minute, add up what is spent and reserved, reserve -> bill: the reservation becomes its cost

Each is one script, so no two routers spend the same rest of a budget. Nothing is known here of what a request said.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from slipstream.route.databases import LedgerError

ANSWER_S = 1.0
PASSWORD = "REDISCLI_AUTH"
"""The variable with the password, as redis-cli has it."""
PREFIX = "{slipstream}:"
"""Of every key; in braces, so that a cluster keeps them together."""

COMMON = """
local at, id = KEYS[1], ARGV[1]
local function spend(other, usd)
  local open = redis.call('HMGET', at .. 'open:' .. other, 'day', 'key', 'route')
  if not open[1] then return 0 end
  redis.call('DEL', at .. 'open:' .. other)
  for _, scope in ipairs({'key:' .. open[2], 'route:' .. open[3]}) do
    redis.call('SREM', at .. 'running:' .. scope, other)
    local periods = {[open[1]] = 3 * 86400, [string.sub(open[1], 1, 7)] = 70 * 86400, total = 0}
    for period, kept in pairs(periods) do
      local sum = at .. 'spent:' .. scope .. ':' .. period
      redis.call('INCRBYFLOAT', sum, usd)
      if kept > 0 then redis.call('EXPIRE', sum, kept) end
    end
  end
  return 1
end
"""
ADMIT = (
    COMMON
    + """
local now, reserved, day, key, route = tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local requests, tokens, lost_s = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local calls, counts = at .. 'calls:' .. key, at .. 'counts:' .. key
if redis.call('EXISTS', at .. 'open:' .. id) == 1 then return {'', ''} end -- let in before, and written again
if requests > 0 or tokens > 0 then
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', calls, '-inf', now - 60)) do
    redis.call('ZREM', calls, old)
    redis.call('HDEL', counts, old)
  end
  local sum = 0
  for _, count in ipairs(redis.call('HVALS', counts)) do sum = sum + tonumber(count) end
  if (requests > 0 and redis.call('ZCARD', calls) >= requests) or (tokens > 0 and sum >= tokens) then
    return {'limit', redis.call('ZRANGE', calls, 0, 0, 'WITHSCORES')[2] or ARGV[2]}
  end
end
for i = 10, #ARGV, 3 do
  local scope, period, usd = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local held = 0
  for _, other in ipairs(redis.call('SMEMBERS', at .. 'running:' .. scope)) do
    local open = redis.call('HMGET', at .. 'open:' .. other, 'usd', 'started')
    if now - tonumber(open[2]) > lost_s then spend(other, open[1]) else held = held + tonumber(open[1]) end
  end
  local spent = tonumber(redis.call('GET', at .. 'spent:' .. scope .. ':' .. period) or '0')
  if spent + held + tonumber(reserved) > usd then return {'budget', tostring((i - 10) / 3)} end
end
if requests > 0 or tokens > 0 then
  redis.call('ZADD', calls, ARGV[2], id)
  redis.call('EXPIRE', calls, 120)
end
redis.call('HSET', at .. 'open:' .. id, 'usd', reserved, 'started', ARGV[2], 'day', day, 'key', key, 'route', route)
redis.call('SADD', at .. 'running:key:' .. key, id)
redis.call('SADD', at .. 'running:route:' .. route, id)
return {'', ''}
"""
)
BILL = (
    COMMON
    + """
local key = redis.call('HGET', at .. 'open:' .. id, 'key')
if spend(id, ARGV[2]) == 1 and redis.call('ZSCORE', at .. 'calls:' .. key, id) then
  redis.call('HSET', at .. 'counts:' .. key, id, ARGV[3])
  redis.call('EXPIRE', at .. 'counts:' .. key, 120)
end
return 1
"""
)


class RedisLimits:
    """What routers count together (the extra `[redis]`). Errors are of many classes; all mean that nothing counted."""

    def __init__(self, url: str, lost_s: float) -> None:
        """lost_s: a reservation this old belongs to a router that died, and is its bill. Raises LedgerError."""
        try:
            import redis
        except ImportError as error:
            raise LedgerError(f"limits in Redis need redis ({error}); pip install 'slipstream-llm[redis]'") from None
        self._lost_s = lost_s
        self._db: Any = redis.Redis.from_url(
            url, password=os.environ.get(PASSWORD), socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S
        )
        self._admit, self._bill = self._db.register_script(ADMIT), self._db.register_script(BILL)
        try:
            self._db.ping()
        except redis.RedisError as error:
            raise LedgerError(f"{url}: {str(error).strip()}; see [ledger] limits") from error

    def admit(
        self, id: str, started: float, day: str, key: str, route: str, reserved: float,
        per_minute: tuple[int, int], budgets: Sequence[tuple[str, str, float]],
    ) -> tuple[str, str]:  # fmt: skip
        """("", "") where the request is let in; ("limit", when its oldest began) or ("budget", which) where not.

        per_minute: requests and tokens, 0 is any. budgets: (scope, period of `started`, dollars).
        """
        flat = [part for scope, period, usd in budgets for part in (scope, period, repr(usd))]
        words: list[str | int | float] = [id, repr(started), repr(reserved), day, key, route]
        words += [*per_minute, self._lost_s, *flat]
        why, told = self._admit(keys=[PREFIX], args=words)
        return why.decode(), told.decode()

    def bill(self, id: str, usd: float, tokens: int) -> None:
        """The reservation becomes `usd`, once."""
        self._bill(keys=[PREFIX], args=[id, repr(usd), tokens])

    def close(self) -> None:
        self._db.close()
