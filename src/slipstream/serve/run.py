"""Runs the application with uvicorn: signals, draining, the address it may listen on."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from slipstream.engine.engine import LLM
from slipstream.serve.answers import Service
from slipstream.serve.app import create_app
from slipstream.serve.config import Config

SWITCH_S = 0.0001
"""How long a thread may keep Python from the device thread; the default of 5 ms would cost a round."""


class Server(uvicorn.Server):
    """Drains at the first signal: what streams may finish, what is new is refused, what is late is handed back."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._service.scheduler.draining:
            self.drain()
        super().handle_exit(sig, frame)

    def drain(self) -> None:
        scheduler = self._service.scheduler
        scheduler.draining = True
        late = threading.Timer(self._service.config.limits.drain_s, scheduler.hand_back)
        late.daemon = True
        late.start()


class JsonLines(logging.Formatter):
    """A log line as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        text = record.getMessage()
        try:
            fields = json.loads(text) if text.startswith("{") else None
        except ValueError:
            fields = None
        line |= fields if isinstance(fields, dict) else {"message": text}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logs(level: str) -> None:
    """JSON lines on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("slipstream", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())


def make_server(llm: LLM, config: Config) -> tuple[Server, FastAPI]:
    """A server that is not running yet; `run()` blocks until it is told to stop."""
    app = create_app(llm, config)
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(config.limits.drain_s) + 5,
    )
    return Server(settings, app.state.service), app


def run_server(llm: LLM, config: Config, log_level: str = "info") -> None:
    """Serve until SIGINT or SIGTERM."""
    set_up_logs(log_level)
    sys.setswitchinterval(SWITCH_S)
    server, _ = make_server(llm, config)
    server.run()
