"""The page at `/`: one HTML file without dependencies."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

router = APIRouter(include_in_schema=False)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@cache
def page() -> str:
    return files("slipstream.serve").joinpath("studio.html").read_text(encoding="utf-8")


@router.get("/")
async def studio() -> Response:
    return HTMLResponse(page(), headers={"Content-Security-Policy": POLICY, "X-Frame-Options": "DENY"})


@router.get("/favicon.ico")
async def icon() -> Response:
    return Response(status_code=204)
