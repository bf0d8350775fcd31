"""One line a request, and its spans where tracing is on, once it is over: what it was, what it cost, why it ended.

`listen` puts it around the gate, so that what the gate refuses has its line too. The line has the route's pattern and
the served model's name, never a path, a query or a text of the client's; the key is there by its name alone. Prompts
are logged only where `--log-prompts` says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from janus_server.http.edge import CLIENT_LEFT, CODE, ID, KEY, ROUTE, Before, Handler
from janus_server.metrics import CallWatch
from janus_server.observe.log import Fact, facts
from janus_server.observe.trace import Finished, Ran, Tracer

if TYPE_CHECKING:
    from janus_server.node import Node

CALL: web.RequestKey[CallWatch] = web.RequestKey("call", CallWatch)

# Asked every few seconds by whoever watches the server: lines of theirs would bury all others.
PROBES = frozenset({"/health", "/ready", "/metrics"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
PROMPT_TOKENS = 4096
_NAME_MOST = 64

log = logging.getLogger("janus.access")


class Access:
    """Stands before the gate and looks at what comes back. `node` gives the tokenizers where prompts are logged."""

    def __init__(self, inner: Before, node: Node, *, lines: bool, prompts: bool, tracer: Tracer | None) -> None:
        self._inner = inner
        self._node = node
        self._lines = lines
        self._prompts = prompts
        self._tracer = tracer

    def before(self, handler: Handler) -> Handler:
        """`handler` behind the gate, with its line at the end."""
        handler = self._inner.before(handler)
        if not (self._lines or self._prompts or self._tracer is not None):
            return handler

        async def enter(request: web.Request) -> web.StreamResponse:
            start_ns, start_s, status = time.time_ns(), time.monotonic(), 500
            try:
                response = await handler(request)
                status = response.status
                return response
            except (asyncio.CancelledError, ConnectionError):
                status = CLIENT_LEFT
                raise
            finally:
                self._over(request, status, start_ns, start_s)

        return enter

    def _over(self, request: web.Request, status: int, start_ns: int, start_s: float) -> None:
        now = time.monotonic()
        finished = _finished(request, status, start_ns, start_s, now)
        if self._tracer is not None:
            self._tracer.record(finished)
        level = logging.DEBUG if finished.route in PROBES and status < 400 else logging.INFO
        if self._lines and log.isEnabledFor(level):
            key = request[KEY].name if KEY in request else None
            node = _node(request, finished)
            about = f", node {node!r}" if node is not None else ""
            log.log(level, "%s%s", _sentence(finished, key), about, extra=facts(**_fields(finished, key), node=node))
        if self._prompts and CALL in request:
            self._log_prompts(finished.id, request[CALL])

    def _log_prompts(self, request_id: str, watch: CallWatch) -> None:
        requests = watch.call.requests
        served = self._node.prepared.get(requests[0].model)
        if served is None:  # it was refused, and its tokenizer dropped since
            return
        texts = [served.tokenizer.decode(one.prompt[:PROMPT_TOKENS], skip_special=False) for one in requests]
        log.info("prompts of %s: %r", request_id, texts, extra=facts(request=request_id, prompts=texts))


def _finished(request: web.Request, status: int, start_ns: int, start_s: float, now: float) -> Finished:
    watch = request.get(CALL)
    ran = None
    if watch is not None:
        call = watch.call
        ran = Ran(
            kind=call.kind.value,
            response_id=call.label.id,
            request=call.requests[0],
            choices=call.n * len(call.requests),
            arrived_s=watch.arrived_s - start_s,
            facts=watch.facts(now),
        )
    return Finished(
        id=request.get(ID, ""),
        method=request.method if request.method in METHODS else "OTHER",
        route=request.get(ROUTE, "none"),
        status=status,
        start_ns=start_ns,
        total_s=now - start_s,
        end=_end(request, status, ran),
        # A stream that could not go on has the status that it began with, and the code of what stopped it.
        failed=status >= 500 or (status < 400 and request.get(CODE, "client_left") != "client_left"),
        carrier=_carrier(request),
        ran=ran,
    )


def _end(request: web.Request, status: int, ran: Ran | None) -> str | None:
    """Why it ended: what stopped it, else how its choices ended."""
    if CODE in request:
        return request[CODE]
    if status == CLIENT_LEFT:
        return "client_left"
    return "+".join(ran.facts.ends) or None if ran is not None else None


def _carrier(request: web.Request) -> Mapping[str, str]:
    names = ("traceparent", "tracestate")
    return {name: request.headers[name] for name in names if name in request.headers}


def _node(request: web.Request, one: Finished) -> str | None:
    """Of whom who runs the nodes asks something; what strangers write is not told."""
    named = request.match_info.get("node") if one.route != "none" else None
    return None if named is None else named[:_NAME_MOST]


def _fields(one: Finished, key: str | None) -> dict[str, Fact]:
    """The same fields on every line; null where there is nothing to say."""
    ran = one.ran.facts if one.ran is not None else None
    return {
        "request": one.id,
        "method": one.method,
        "route": one.route,
        "status": one.status,
        "model": ran.model if ran is not None else None,
        "application": ran.application if ran is not None else None,
        "prompt_tokens": ran.prompt_tokens if ran is not None else None,
        "completion_tokens": ran.completion_tokens if ran is not None else None,
        "cached_tokens": ran.cached_tokens if ran is not None else None,
        "queue_s": _rounded(ran.queue_s) if ran is not None else None,
        "ttft_s": _rounded(ran.ttft_s) if ran is not None else None,
        "total_s": _rounded(one.total_s),
        "end": one.end,
        "key": key,
    }


def _sentence(one: Finished, key: str | None) -> str:
    """The same for people; what there is nothing to say of is left out."""
    words: list[str] = [f"{one.status} {one.method} {one.route} {one.id}"]
    if one.ran is not None:
        ran = one.ran.facts
        name = ran.model if ran.application in ("", ran.model) else f"{ran.application} ({ran.model})"
        words.append(f"{name}: {ran.prompt_tokens} ({ran.cached_tokens} cached) + {ran.completion_tokens} tokens")
        named = (("queue", ran.queue_s), ("first token", ran.ttft_s))
        words += [f"{name} {seconds:.3f} s" for name, seconds in named if seconds is not None]
    words.append(f"total {one.total_s:.3f} s")
    words += _present(one.end, f"key {key}" if key is not None else None)
    return ", ".join(words)


def _present(*words: str | None) -> Sequence[str]:
    return [word for word in words if word is not None]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
