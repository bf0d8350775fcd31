"""The OpenAPI 3.1 document of the routes that an application has, made of the records that validate its requests.

Pure. `http/routes` collects an `About` beside each registration and `http/docs` serves what `document` returns. Ranges,
types and required fields come from the records' own annotations, never from a second list; words for fields live in
`describe`. A field that is only declared to be refused is left out. The same routes give the same bytes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from janus_server.api import answers
from janus_server.api.bodies import Limits, NotYet
from janus_server.api.describe import PATH_WORDS, STATUSES, TAGS, TITLE, bounds, words_for

_REF = "#/components/schemas/"
_JSON = "application/json"
_EVENTS = "text/event-stream"

# What may go wrong on a route, beside what its `About` adds.
_ALWAYS = (400, 401, 403, 404, 429, 500, 503)
_WITH_BODY = (408, 413, 415)


class Access(enum.Enum):
    """Who may call a route where keys are configured."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a route is for and which records it reads and writes.

    tag groups routes. example is a body to begin with; one_of names fields of which exactly one is given. answer is the
    record of a success (None: `kind` says what else it is, such as a page), event that of one server-sent event where a
    body with stream true is answered with a stream, error that of a failure. query holds the names of query parameters
    with words for each. also are statuses of success beside `status`, with the same answer; statuses are failures
    beside those that every route may answer with.
    """

    tag: str
    summary: str
    details: str = ""
    body: type[msgspec.Struct] | None = None
    example: Mapping[str, Any] = MappingProxyType({})
    one_of: tuple[str, ...] = ()
    answer: type[msgspec.Struct] | None = None
    kind: str = _JSON
    status: int = 200
    also: tuple[int, ...] = ()
    event: type[msgspec.Struct] | None = None
    query: tuple[tuple[str, str], ...] = ()
    error: type[msgspec.Struct] = answers.Error
    statuses: tuple[int, ...] = ()
    access: Access = Access.KEY


class Operation(msgspec.Struct, frozen=True):
    """A registered route. `path` has its parameters in braces, as OpenAPI writes them."""

    method: str
    path: str
    about: About | None


def document(operations: Sequence[Operation], version: str, limits: Limits) -> dict[str, Any]:
    """The whole document, in a fixed order; routes without an `About` are listed by their path alone."""
    ordered = sorted(operations, key=lambda one: (one.path, one.method))
    abouts = [one.about for one in ordered if one.about is not None]
    paths: dict[str, Any] = {}
    for one in ordered:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in sorted({about.tag for about in abouts}, key=_tag_order)],
        "paths": paths,
        "components": {
            "schemas": _schemas(abouts, limits),
            "responses": _failures(abouts),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "A key of this server, where it has any"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "admin": {"type": "http", "scheme": "bearer", "description": "The admin key"},
            },
        },
    }


def _tag_order(tag: str) -> tuple[int, str]:
    """What most come for stands first; tags that nobody ranked follow by name."""
    return (TAGS.index(tag) if tag in TAGS else len(TAGS), tag)


def encode(tree: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(tree), indent=1)


# One route


def _operation(one: Operation) -> dict[str, Any]:
    about = one.about or About(tag="other", summary=one.path)
    found: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"[A-Za-z0-9]+", f"{one.method.lower()} {one.path}")),
        "tags": [about.tag],
        "summary": about.summary,
    }
    if about.details:
        found["description"] = about.details
    parameters = [_parameter(name, "path", PATH_WORDS.get(name, name)) for name in re.findall(r"\{(\w+)\}", one.path)]
    parameters += [_parameter(name, "query", words) for name, words in about.query]
    if parameters:
        found["parameters"] = parameters
    if about.body is not None:
        media = {"schema": _ref(about.body), **({"example": dict(about.example)} if about.example else {})}
        found["requestBody"] = {"required": True, "content": {_JSON: media}}
    found["responses"] = _responses(about)
    found["security"] = _security(about.access)
    return found


def _parameter(name: str, place: str, words: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 1} if place == "path" else {"type": "string"}
    return {"name": name, "in": place, "required": place == "path", "description": words, "schema": schema}


def _responses(about: About) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if about.answer is not None:
        content[about.kind] = {"schema": _ref(about.answer)}
    else:
        content[about.kind] = {"schema": {"type": "object"} if about.kind == _JSON else {"type": "string"}}
    if about.event is not None:
        # 3.1 has no word for the items of a stream: readers differ on what its schema is of, so it says nothing.
        words = STATUSES["stream" if about.body is not None else "events"]
        events = {"schema": {"description": words}, "x-itemSchema": _ref(about.event)}
        content[_EVENTS] = events
    success = {"description": "Success", "headers": _headers("X-Request-Id"), "content": content}
    found: dict[str, Any] = {str(status): success for status in (about.status, *about.also)}
    found |= {str(code): {"$ref": f"#/components/responses/{_failure_name(about, code)}"} for code in _codes(about)}
    return found


def _codes(about: About) -> list[int]:
    """The statuses of everything but success."""
    return sorted({*_ALWAYS, *about.statuses, *(_WITH_BODY if about.body is not None else ())})


def _failure_name(about: About, code: int) -> str:
    return f"{about.error.__name__}-{code}"


def _failures(abouts: Iterable[About]) -> dict[str, Any]:
    """The failures of all routes, each once."""
    found = {}
    for about in abouts:
        for code in _codes(about):
            names = ("X-Request-Id", "Retry-After") if code in (429, 503) else ("X-Request-Id",)
            found[_failure_name(about, code)] = {
                "description": STATUSES[str(code)],
                "headers": _headers(*names),
                "content": {_JSON: {"schema": _ref(about.error)}},
            }
    return dict(sorted(found.items()))


def _headers(*names: str) -> dict[str, Any]:
    words = {"X-Request-Id": "The client's own id, or one made here", "Retry-After": "Seconds to wait before a retry"}
    kinds = {"X-Request-Id": "string", "Retry-After": "integer"}
    return {name: {"description": words[name], "schema": {"type": kinds[name]}} for name in names}


def _security(access: Access) -> list[dict[str, Any]]:
    """Each entry is a way in. Without configured keys none is asked for, hence the empty one; admin routes are off."""
    match access:
        case Access.OPEN:
            return []
        case Access.KEY:
            return [{}, {"bearer": []}, {"x-api-key": []}]
        case Access.ADMIN:
            return [{"admin": []}]


def _ref(shape: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF + shape.__name__}


# Records


def _schemas(abouts: Iterable[About], limits: Limits) -> dict[str, Any]:
    abouts = list(abouts)
    shapes: dict[str, type[msgspec.Struct]] = {}
    for about in abouts:
        for shape in (about.body, about.answer, about.event, about.error):
            if shape is not None:
                shapes[shape.__name__] = shape
    _, schemas = msgspec.json.schema_components([shapes[name] for name in sorted(shapes)], ref_template=_REF + "{name}")
    for about in abouts:
        if about.body is not None:
            _leave_out(schemas[about.body.__name__], about.body)
        if about.body is not None and about.one_of:
            schemas[about.body.__name__]["oneOf"] = [_given(name, about.one_of) for name in about.one_of]
    return {name: _readable(name, schemas[name], limits) for name in sorted(schemas)}


def _leave_out(schema: dict[str, Any], shape: type[msgspec.Struct]) -> None:
    """Fields that are read only to be refused are not offered; their names are kept for those who wonder."""
    refused = sorted(field.encode_name for field in msgspec.structs.fields(shape) if field.type is NotYet)
    for name in refused:
        schema["properties"].pop(name, None)
    if refused:
        schema["x-refused"] = refused


def _given(name: str, names: Sequence[str]) -> dict[str, Any]:
    """That field, and none of the others."""
    others = {other: {"type": "null"} for other in names if other != name}
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}, **others}}


def _readable(name: str, schema: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The schema as people read it: nullable types in one word, ranges of this server, and a sentence a field."""
    for field, found in schema.get("properties", {}).items():
        plain = _plain(found)
        plain.update(bounds(name, field, limits))
        words = words_for(name, field)
        if words is not None and "$ref" not in plain:
            plain["description"] = words
        schema["properties"][field] = plain
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    return schema


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """`anyOf` of a plain type and null as one schema; a default of null says nothing and goes."""
    found = {key: value for key, value in schema.items() if key != "default" or value is not None}
    kinds = found.get("anyOf", ())
    if len(kinds) == 2 and kinds[1] == {"type": "null"} and isinstance(kinds[0].get("type"), str):
        rest = {key: value for key, value in found.items() if key != "anyOf"}
        enumerated = {"enum": [*kinds[0]["enum"], None]} if "enum" in kinds[0] else {}
        return {**kinds[0], **enumerated, **rest, "type": [kinds[0]["type"], "null"]}
    return found
