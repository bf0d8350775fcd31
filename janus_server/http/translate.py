"""The routes of other APIs, each a translation onto chat: OpenAI's Responses and Anthropic's Messages.

A body becomes a chat body, the call is planned and run as chat's is, and the answer is written in the API's own style.
What chat refuses on the way is told with the client's own names. Nothing is kept between calls.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiohttp import web

from janus_server.api import messages, messages_reply, parse, responses, responses_reply
from janus_server.api.translation import Translated, renamed
from janus_server.errors import Refused
from janus_server.http.generate import Generate, Style
from janus_server.http.service import Service, json_response

if TYPE_CHECKING:
    from janus_server.instance import ServedModel

MESSAGES = Style(messages_reply.WholeMessage, messages_reply.StreamMessage)


class Translate:
    """The handlers of both APIs."""

    def __init__(self, service: Service, generate: Generate) -> None:
        self._service = service
        self._generate = generate

    async def respond(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.monotonic()
        body, translated, model = await self._read_responses(request)
        style = Style(
            functools.partial(responses_reply.WholeResponse, body),
            functools.partial(responses_reply.StreamResponse, body),
        )
        return await self._answer(request, model, translated, arrived_s, responses_reply.PREFIX, style)

    async def count_response(self, request: web.Request) -> web.StreamResponse:
        """How long the prompt of a response would be."""
        _, translated, model = await self._read_responses(request)
        tokens = await self._count(model, translated)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def stored_response(self, request: web.Request) -> web.StreamResponse:
        """What asks for an earlier response."""
        message = "this server keeps no responses: there is nothing to retrieve, to delete or to cancel"
        raise Refused(message, status=404, code="response_not_found")

    async def message(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.monotonic()
        raw = await self._service.read(request)
        body = messages.parse_messages(raw, self._service.limits)
        self._service.count_ignored(request, parse.ignored_fields(raw, messages.MessagesBody))
        translated = messages.chat_of_messages(body, self._service.limits)
        model = await self._service.serving(request, body.model)
        return await self._answer(request, model, translated, arrived_s, messages_reply.PREFIX, MESSAGES)

    async def count_message(self, request: web.Request) -> web.StreamResponse:
        """How long the prompt of a message would be."""
        raw = await self._service.read(request)
        body = messages.parse_count(raw, self._service.limits)
        self._service.count_ignored(request, parse.ignored_fields(raw, messages.MessagesBody))
        translated = messages.chat_of_messages(body, self._service.limits)
        model = await self._service.serving(request, body.model)
        return json_response({"input_tokens": await self._count(model, translated)})

    async def _read_responses(self, request: web.Request) -> tuple[responses.ResponsesBody, Translated, ServedModel]:
        raw = await self._service.read(request)
        body = responses.parse_responses(raw, self._service.limits)
        self._service.count_ignored(request, parse.ignored_fields(raw, responses.ResponsesBody))
        translated = responses.chat_of_responses(body, self._service.limits)
        return body, translated, await self._service.serving(request, body.model)

    async def _answer(
        self,
        request: web.Request,
        model: ServedModel,
        translated: Translated,
        arrived_s: float,
        id_prefix: str,
        style: Style,
    ) -> web.StreamResponse:
        with _clients_names(translated):
            call = await self._generate.plan_chat(model, translated.chat, id_prefix)
            return await self._generate.answer(request, model, call, arrived_s, style)

    async def _count(self, model: ServedModel, translated: Translated) -> int:
        with _clients_names(translated):
            return await self._generate.chat_tokens(model, translated.chat)


@contextlib.contextmanager
def _clients_names(translated: Translated) -> Iterator[None]:
    """A refusal that passes names the field of the client's body."""
    try:
        yield
    except Refused as refused:
        raise renamed(refused, translated.places) from None
