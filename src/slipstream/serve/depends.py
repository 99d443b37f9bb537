"""What every endpoint needs: the service, and the client who asks; coroutines, as FastAPI runs functions in threads."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from slipstream.serve.answers import Service
from slipstream.serve.auth import Client
from slipstream.serve.errors import ApiError


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _client(request: Request) -> Client:
    client: Client = request.state.client  # set where the key was checked, before the body was read
    return client


Served = Annotated[Service, Depends(_service)]
AskingClient = Annotated[Client, Depends(_client)]


def check_model(service: Service, asked: str) -> None:
    """Any alias of the one model that is served. Raises ApiError 404 that names it."""
    if asked not in (service.model, "default", "slipstream"):
        raise ApiError(
            404, f"the model {asked!r} is not served here; {service.model!r} is", code="model_not_found", param="model"
        )
