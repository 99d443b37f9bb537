"""Watches the settings file and takes what changed, without ending a stream; a file with mistakes changes nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.route.config import load_config
from slipstream.route.gateway import Gateway

log = logging.getLogger("slipstream.route")


async def watch(gateway: Gateway, path: Path) -> None:
    """Every `server.reload_s`; 0 reads the file once only."""
    seen = _stamp(path)
    while every_s := gateway.live.config.server.reload_s:
        await asyncio.sleep(every_s)
        now = _stamp(path)
        if now != seen:
            seen = now
            await reload_now(gateway, path)


async def reload_now(gateway: Gateway, path: Path) -> bool:
    """Whether the settings in `path` are in use now; the log says why not."""
    try:
        await gateway.reload(load_config(path))
    except SlipstreamError as error:
        log.error("%s", json.dumps({"event": "reload refused", "error": str(error)}))
        return False
    return True


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
