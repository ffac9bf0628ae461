"""The OpenAPI 3.1 document, made from the table of verbs and the models of their bodies and answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from lockstep.service.http.answers import Error
from lockstep.service.http.calls import EVENTS
from lockstep.service.http.exchange import JSON
from lockstep.service.http.verbs import VERBS, Verb

PLACE = "#/components/schemas/{model}"
MEANING = {
    400: "The request is wrong: the message says what, `param` where.",
    401: "The token is missing or not known.",
    403: "This caller may not do this: another host's page, or a token for less.",
    404: "No such model.",
    408: "The body did not come in time.",
    409: "It does not fit what the server has: a version that is not staged, an idempotency key in use.",
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    429: "Too many calls at a time, or too many requests wait; see Retry-After.",
    500: "The server's fault.",
    503: "Not now: closing, no replica, a time limit passed, or the request was aborted; see Retry-After.",
}


def document(version: str, with_tokens: bool) -> dict[str, Any]:
    """with_tokens: the server asks for them."""
    models: list[tuple[type[BaseModel], Any]] = [(Error, "serialization")]
    for verb in VERBS:
        if verb.body is not None:
            models.append((verb.body, "validation"))
        if isinstance(verb.answer, type):
            models.append((verb.answer, "serialization"))
    _, schemas = models_json_schema(list(dict.fromkeys(models)), ref_template=PLACE)
    shapes: dict[str, Any] = dict(schemas["$defs"])
    paths: dict[str, Any] = {}
    for verb in VERBS:
        paths.setdefault(verb.path, {})[verb.method.lower()] = _operation(verb, shapes, with_tokens)
    components: dict[str, Any] = {"schemas": shapes}
    if with_tokens:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lockstep", "version": version, "summary": "Rollouts as a versioned service"},
        "jsonSchemaDialect": GenerateJsonSchema.schema_dialect,
        "paths": paths,
        "components": components,
    }


def _operation(verb: Verb, shapes: dict[str, Any], with_tokens: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": verb.handle.__name__,
        "summary": verb.summary,
        "responses": {"200": _success(verb, shapes)} | {str(s): _failure(s) for s in statuses(verb, with_tokens)},
    }
    if verb.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(verb.body)}}}
    parameters = []
    if "{id}" in verb.path:
        text = {"type": "string", "minLength": 1}
        parameters.append({"name": "id", "in": "path", "required": True, "schema": text})
    if verb.keyed:
        key = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"}
        parameters.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": key})
    if parameters:
        operation["parameters"] = parameters
    if with_tokens and verb.access != "open":
        operation["security"] = [{"token": []}]
        operation["description"] = f"Needs the {verb.access} token."
    return operation


def statuses(verb: Verb, with_tokens: bool) -> list[int]:
    """Every status besides 200 that a verb can answer."""
    found = {403, 500, *verb.errors}
    if with_tokens and verb.access != "open":
        found |= {401}
    if verb.body is not None:
        found |= {400, 408, 413, 415}
    if verb.works:
        found |= {429, 503}
    return sorted(found)


def _success(verb: Verb, shapes: dict[str, Any]) -> dict[str, Any]:
    if verb.answer is None:
        schema: dict[str, Any] = {"type": "string"}
    elif isinstance(verb.answer, type):
        schema = _ref(verb.answer)
    else:
        schema = verb.answer.json_schema(ref_template=PLACE, mode="serialization")
        shapes |= schema.pop("$defs", {})
    content = {verb.media: {"schema": schema}}
    if verb.streams:
        # OpenAPI 3.1 has no word for the items of a stream; its readers take the schema of events as that of each.
        event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
        content[verb.streams] = {"schema": event if verb.streams == EVENTS else {"type": "string"}}
    return {"description": "Done.", "content": content}


def _failure(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {"description": MEANING[status], "content": {JSON: {"schema": _ref(Error)}}}
    if status in (429, 503):
        found["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "string"}}}
    return found


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": PLACE.format(model=model.__name__)}
