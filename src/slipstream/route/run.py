"""Runs the router with uvicorn: signals, draining, reloading."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from slipstream.route import page
from slipstream.route.app import create_app
from slipstream.route.config import load_config
from slipstream.route.gateway import Gateway
from slipstream.route.reload import reload_now, watch
from slipstream.serve.run import set_up_logs


class Server(uvicorn.Server):
    """At the first signal what is new is refused, and what streams may finish."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._gateway.draining = True
        super().handle_exit(sig, frame)


def make_server(gateway: Gateway) -> tuple[Server, Starlette]:
    """A server that is not running yet."""
    app = create_app(gateway, page.ROUTES)
    settings = gateway.live.config.server
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, log_config=None, access_log=False, server_header=False,
        date_header=False, ws="none", timeout_keep_alive=75, timeout_graceful_shutdown=int(settings.drain_s) + 1,
    )  # fmt: skip
    return Server(config, gateway), app


def run_router(path: Path, host: str | None = None, port: int | None = None, log_level: str = "info") -> None:
    """Serve `path` until SIGINT or SIGTERM; SIGHUP, or a change of the file, reloads it. Raises SlipstreamError."""
    set_up_logs(log_level)
    for name in ("httpx", "httpcore"):  # they would log addresses, and headers at debug
        logging.getLogger(name).setLevel(logging.WARNING)
    config = load_config(path)
    changes = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    config = config.model_copy(update={"server": config.server.model_copy(update=changes)})

    async def serve() -> None:
        gateway = Gateway(config)
        server, _ = make_server(gateway)
        watcher = asyncio.create_task(watch(gateway, path))
        asked: set[asyncio.Task[bool]] = set()
        if hasattr(signal, "SIGHUP"):
            start = lambda: asked.add(asyncio.create_task(reload_now(gateway, path)))  # noqa: E731
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, start)
        try:
            await server.serve()
        finally:
            watcher.cancel()

    asyncio.run(serve())
