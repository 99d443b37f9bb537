"""What operators and tools ask: health, metrics, models, tokens, tiers, and what runs right now.

Endpoints that work on whole texts are plain functions, which run in a thread: streams go on meanwhile.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from slipstream.errors import RequestError
from slipstream.serve.answers import Service
from slipstream.serve.depends import AskingClient, Served, check_model
from slipstream.serve.errors import ApiError, invalid
from slipstream.serve.openai_chat import FunctionTool, Message
from slipstream.serve.openai_fields import Fields, Text
from slipstream.serve.prompts import chat_prompt
from slipstream.serve.tiers import explain

router = APIRouter(tags=["Operation"])


class Tokenize(Fields):
    """prompt, or messages with tools as they would be rendered."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[Message] | None = None
    tools: list[FunctionTool] | None = None
    add_special_tokens: bool = True


class Detokenize(Fields):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1_000_000)]


class Explain(Fields):
    prompt_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 1000
    cached_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 500


@router.get("/health")
async def health() -> dict[str, str]:
    """The process is alive."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(service: Served) -> Response:
    """Whether new requests are taken: 503 while shutting down."""
    draining = service.scheduler.draining
    return JSONResponse({"status": "draining" if draining else "ready"}, 503 if draining else 200)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Served) -> Response:
    """Counters in Prometheus' text format."""
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/v1/models")
async def models(service: Served) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model(service)]}


@router.get("/v1/models/{model:path}")
async def model(model: str, service: Served) -> dict[str, Any]:
    """The model, if it is the one that is served."""
    check_model(service, model)
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.started,
        "owned_by": "slipstream",
        "context_length": service.llm.context,
        "max_model_len": service.llm.context,
        "service_tiers": list(service.config.tiers),
    }


@router.post("/tokenize")
def tokenize(body: Tokenize, service: Served) -> dict[str, Any]:
    """Text, or a conversation through the chat template, as token ids."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    try:
        if body.prompt is not None:
            tokens = service.llm.tokenizer.encode(body.prompt, bos=body.add_special_tokens) if body.prompt else []
        else:
            turns = [m.as_template(f"messages[{i}]") for i, m in enumerate(body.messages or ())]
            tools = [tool.function.tool() for tool in body.tools or ()]
            tokens, _ = chat_prompt(service.llm, turns, tools, {})
    except RequestError as error:
        raise invalid(str(error), "prompt") from error
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.llm.context}


@router.post("/detokenize")
def detokenize(body: Detokenize, service: Served) -> dict[str, str]:
    """Token ids as text."""
    return {"prompt": service.llm.tokenizer.decode(body.tokens)}


@router.post("/v1/embeddings")
async def embeddings() -> Response:
    """Not here: this server generates text."""
    raise ApiError(404, "embeddings are not served here; ask an embedding model", code="not_supported")


@router.post("/v1/slipstream/tiers")
async def tiers(body: Explain, service: Served, client: AskingClient) -> dict[str, Any]:
    """What a request would cost and wait in each tier, as things stand."""
    if body.cached_tokens > body.prompt_tokens:
        raise invalid("cached_tokens exceed prompt_tokens", "cached_tokens")
    counts = (body.prompt_tokens, body.cached_tokens, body.completion_tokens)
    quotes = explain(service.config, *counts, service.scheduler.load(), service.scheduler.stream_s)
    allowed = [asdict(quote) for quote in quotes if client.tiers is None or quote.tier in client.tiers]
    return {"auto": service.config.auto, "tiers": allowed}


@router.get("/v1/slipstream/streams")
async def streams(service: Served, client: AskingClient) -> dict[str, Any]:
    """What runs and waits now; of other keys' streams no more than that they are there."""
    jobs = service.scheduler.streams()
    return {
        "model": service.model,
        "backend": service.llm.backend.name,
        "sessions": {"busy": service.pool.busy, "idle": service.pool.idle, "kv_bytes": service.pool.held_bytes},
        "tiers": {name: {"running": r, "waiting": w} for name, (r, w) in service.scheduler.load().items()},
        "streams": [
            {
                "id": job.number,
                "tier": job.served.name,
                "mine": job.client == client.name,
                "state": "running" if job.stream else "prefill" if job.started else "waiting",
                "prompt_tokens": len(job.request.tokens),
                "cached_tokens": job.cached_tokens,
                "tokens": job.tokens,
                "rounds": job.rounds,
                "drafted": job.drafted,
                "accepted": job.accepted,
                "tokens_per_s": round(job.tokens_per_s, 1),
                "queue_s": round(job.queue_s, 3),
            }
            for job in jobs
        ],
    }
