"""The router's live page at `/`, and the figures behind it at `/v1/slipstream/route?minutes=60`.

The page is one file without scripts from elsewhere; it holds no figures and needs no key, the figures do.
"""

from __future__ import annotations

import asyncio
import math
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from slipstream.route.app import admitted
from slipstream.route.summary import summary
from slipstream.serve.errors import ApiError, invalid

MOST_MINUTES = 24 * 60.0
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


async def _page(request: Request) -> Response:
    text = (files("slipstream.route") / "page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"content-security-policy": _POLICY, "x-frame-options": "DENY"})


async def _figures(request: Request) -> Response:
    _, key = admitted(request)
    if key is not None and key.routes is not None:
        raise ApiError(403, "this key sees some routes alone, and the page shows all", code="permission_denied")
    try:
        minutes = float(request.query_params.get("minutes", 60))
    except ValueError:
        raise invalid("minutes must be a number", "minutes", "invalid_value") from None
    if not (math.isfinite(minutes) and 0 < minutes <= MOST_MINUTES):
        raise invalid(f"minutes must be above 0, and at most {MOST_MINUTES:g}", "minutes", "invalid_value")
    return JSONResponse(await asyncio.to_thread(summary, request.app.state.gateway.ledger.source, minutes))


ROUTES = (Route("/", _page), Route("/v1/slipstream/route", _figures))
