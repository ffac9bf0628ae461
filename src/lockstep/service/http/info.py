"""The verbs that tell what the server is and how it does."""

from __future__ import annotations

from typing import Any

from lockstep.service.controls import Stored
from lockstep.service.http.errors import HttpError
from lockstep.service.http.exchange import Exchange
from lockstep.service.http.metrics import MEDIA
from lockstep.service.http.surface import Surface
from lockstep.service.latest import lost_words
from lockstep.service.requests import ServiceStatus


def _model(surface: Surface, status: ServiceStatus) -> dict[str, Any]:
    served, published = surface.served, status.published
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "lockstep",
        "lockstep": {
            "version": None if published is None else published.number,
            "digest": None if published is None else published.digest,
            "max_positions": served.max_positions,
            "vocab_size": served.vocab_size,
            "tokenizer": served.tokenizer.fingerprint,
            "template": served.tokenizer.template_fingerprint,
        },
    }


async def models(surface: Surface, body: None, exchange: Exchange) -> None:
    status = await surface.workers.start(surface.service.status)
    await exchange.json({"object": "list", "data": [_model(surface, status)]})


async def model(surface: Surface, body: None, exchange: Exchange) -> None:
    surface.check_model(exchange.path_params["id"])
    await exchange.json(_model(surface, await surface.workers.start(surface.service.status)))


async def health(surface: Surface, body: None, exchange: Exchange) -> None:
    await exchange.json({"status": "ok"})


async def ready(surface: Surface, body: None, exchange: Exchange) -> None:
    status = await surface.workers.start(surface.service.status)
    why = ""
    if surface.closing or status.closing:
        why = "the server is closing"
    elif status.paused:
        why = "the service is paused"
    elif status.lost is not None:
        why = lost_words(status.lost)
    elif not any(r.alive and r.accepting and r.active is not None for r in status.replicas):
        why = "no replica serves"
    if why:
        raise HttpError(503, "not_ready", why)
    await exchange.json({"status": "ready"})


async def metrics(surface: Surface, body: None, exchange: Exchange) -> None:
    status = await surface.workers.start(surface.service.status)
    await exchange.reply(Stored(200, MEDIA, (), surface.metrics.text(status)))
