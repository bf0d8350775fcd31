"""What handlers share: the node's models, bounded reading of bodies, and threads for what may not run on the loop.

One `Service` a web application. `generate` and the other handler groups hold it; it knows nothing of any API's shapes.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from janus_server.api.bodies import Limits
from janus_server.applications import Application, Applications
from janus_server.errors import Refused
from janus_server.grammar.compile import Grammars
from janus_server.http.admit import Door
from janus_server.http.gate import is_admin, key_name, may_see
from janus_server.metrics import Metrics
from janus_server.types import ModelCard

if TYPE_CHECKING:
    from janus_server.instance import ServedModel
    from janus_server.node import Node

T = TypeVar("T")

log = logging.getLogger(__name__)

# Names of unknown fields that are logged: plain ones, and no more than this many.
FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
LOGGED_NAMES = 64


class Service:
    """The node behind one web application, and the ways that every handler uses it."""

    def __init__(self, node: Node, metrics: Metrics, limits: Limits, door: Door, applications: Applications) -> None:
        self.node = node
        self.applications = applications
        self.metrics = metrics
        self.limits = limits
        self.door = door
        self.grammars = Grammars()
        self._reading_bytes = 0
        self._pool: ThreadPoolExecutor | None = None
        self._grammar_pool: ThreadPoolExecutor | None = None
        self._ignored: set[str] = set()

    async def threads(self, app: web.Application) -> AsyncIterator[None]:
        """The encoding threads live as long as the web application does."""
        self._pool = ThreadPoolExecutor(self.limits.encode_threads, "encode")
        self._grammar_pool = ThreadPoolExecutor(1, "grammar")
        yield
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.grammars.close)

    async def serving(self, request: web.BaseRequest, name: str) -> ServedModel:
        """The model behind a served name, to send requests to: they wait where it is not on the device.

        Refused while the server starts or drains (503, where no other node of a cluster serves in its stead), and where
        nothing of that name is served (404).
        """
        reason = await self.node.turning_away()
        if reason is not None:
            raise not_ready(reason)
        model = await self.node.model(self.application(request, name).model)
        if model is None:
            raise no_such_model()
        return model

    def application(self, request: web.BaseRequest, name: str) -> Application:
        """What a request for a served name counts for: the one place where names are resolved.

        404 where the request's key may not use the name, as if it did not exist: a key does not learn what others are
        served. Whether a name that is not listed is a model's is not known here.
        """
        found = self.applications.resolve(name, key_name(request), is_admin(request))
        if found is None or not may_see(request, name):
            raise no_such_model()
        return found

    def names(self, request: web.BaseRequest) -> list[str]:
        """The served names that the request's key may use, the models' first."""
        key, admin = key_name(request), is_admin(request)
        served = self.applications.names(self.node.cards)
        return [one for one in served if may_see(request, one) and self.applications.resolve(one, key, admin)]

    def card(self, request: web.BaseRequest, name: str) -> ModelCard:
        """What is known of the model behind a served name, or 404, as for `serving`."""
        card = self.node.cards.get(self.application(request, name).model)
        if card is None:
            raise no_such_model()
        return card

    def count_ignored(self, request: web.Request, names: Sequence[str]) -> None:
        """Count fields that are ignored, and log each name once; a client may invent names without end."""
        if not names:
            return
        self.metrics.ignored.labels(request.path).inc(len(names))
        for name in names:
            if len(self._ignored) < LOGGED_NAMES and name not in self._ignored and FIELD_NAME.fullmatch(name):
                self._ignored.add(name)
                log.debug("the field %s is not known here and was ignored", name)

    async def read(self, request: web.Request) -> bytes:
        """The body, refused as soon as it is known to be too large: memory never holds more than the limit."""
        limit = self.limits.body_bytes
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refused(
                "a compressed body is not accepted; send it as it is", status=415, code="unsupported_encoding"
            )
        if request.content_length is not None and request.content_length > limit:
            raise _too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_s):
                async for chunk in request.content.iter_any():
                    body += chunk
                    self._reading_bytes += len(chunk)
                    if len(body) > limit:
                        raise _too_large(limit)
                    if self._reading_bytes > self.limits.bodies_bytes:
                        raise _too_many_bodies()
        except TimeoutError:
            raise Refused("the body took too long to arrive", status=408, code="request_timeout") from None
        except web.RequestPayloadError:
            raise Refused("the body cannot be read", code="invalid_body") from None
        finally:
            self._reading_bytes -= len(body)
        return bytes(body)

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Run what could hold up the loop on an encoding thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def on_grammar_thread(self, work: Callable[[], T]) -> T:
        """Compile a grammar on a thread of its own: costly ones queue behind each other and nobody else."""
        return await asyncio.get_running_loop().run_in_executor(self._grammar_pool, work)


def no_such_model() -> Refused:
    message = "no model of that name is served here; GET /v1/models lists those that are"
    return Refused(message, status=404, param="model", code="model_not_found")


def not_ready(reason: str) -> Refused:
    return Refused(f"not ready: {reason}", status=503, kind="server_error", code="not_ready", retry_after_s=1.0)


def json_response(value: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _too_many_bodies() -> Refused:
    return Refused(
        "too many large bodies are arriving; come again later", status=429, kind="server_error",
        code="server_overloaded", retry_after_s=1.0,
    )  # fmt: skip


def _too_large(limit: int) -> Refused:
    return Refused(f"the body must be at most {limit} bytes", status=413, code="body_too_large")
