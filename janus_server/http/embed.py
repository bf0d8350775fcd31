"""/v1/embeddings: a body becomes a call like any other, with the same admission, the same metrics and the same end.

A client that leaves cancels what still waits or runs. Long inputs are encoded on a thread, and so are the answers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from janus_server.api import embeddings, parse, plan, reply
from janus_server.api.embeddings import EmbeddingBody, EmbeddingReply
from janus_server.http.generate import Generate, Style, label
from janus_server.http.service import Service

if TYPE_CHECKING:
    from janus_server.instance import ServedModel
    from janus_server.tokens.tokenizer import Tokenizer


class Embed:
    """The handler of embeddings; `generate` runs its calls."""

    def __init__(self, service: Service, generate: Generate) -> None:
        self._service = service
        self._generate = generate

    async def embed(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.monotonic()
        raw = await self._service.read(request)
        body = embeddings.parse_embedding(raw, self._service.limits)
        self._service.count_ignored(request, parse.ignored_fields(raw, EmbeddingBody))
        model = await self._service.serving(request, body.model)
        prompts = await self._encode(model, body)
        call = embeddings.plan_embeddings(body, prompts, model.target, self._service.limits, label("embd-"))
        style = Style(functools.partial(EmbeddingReply, embeddings.form_of(body)), reply.StreamReply)
        return await self._generate.answer(request, model, call, arrived_s, style)

    async def _encode(self, model: ServedModel, body: EmbeddingBody) -> list[list[int]]:
        inputs, limits = embeddings.inputs_of(body), self._service.limits
        longest = max(len(one) for one in inputs if isinstance(one, str)) if isinstance(inputs[0], str) else 0
        if longest > limits.hopeless_chars:
            plan.refuse_hopeless(longest, model.tokenizer.longest_token_chars, model.target, "input")
        work = functools.partial(_encode_all, model.tokenizer, inputs, body.add_special_tokens is not False)
        return await self._service.on_thread(work) if sum(map(len, inputs)) > limits.inline_chars else work()


def _encode_all(tokenizer: Tokenizer, inputs: Sequence[str | list[int]], add_special: bool) -> list[list[int]]:
    # A document is nobody's template: what it spells like a control token is text.
    return [
        tokenizer.encode(one, add_special=add_special, parse_special=False) if isinstance(one, str) else one
        for one in inputs
    ]
