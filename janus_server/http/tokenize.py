"""The routes that turn text into tokens and back, and say what the tokenizer is. Nothing is generated or counted here.

A conversation goes the way that chat's does, a text is encoded as /v1/completions does it: a count here is the
`prompt_tokens` of the same prompt there. Long inputs and every chat template run on a thread of the service.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from janus_server.api import parse, plan, tokenize
from janus_server.api.tokenize import DetokenizeBody, Detokenized, TokenizeBody, Tokenized, TokenizerInfo
from janus_server.errors import Refused
from janus_server.http.generate import Generate
from janus_server.http.service import Service

if TYPE_CHECKING:
    from janus_server.instance import ServedModel
    from janus_server.tokens.tokenizer import Tokenizer


class Tokenize:
    """The handlers of /tokenize, /detokenize and /tokenizer_info."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._generate = Generate(service)

    async def tokenize(self, request: web.Request) -> web.Response:
        raw = await self._service.read(request)
        body = tokenize.parse_tokenize(raw, self._service.limits)
        self._service.count_ignored(request, parse.ignored_fields(raw, TokenizeBody))
        model = await self._service.serving(request, self._name(request, body.model))
        ids = await self._ids(model, body)
        names = body.return_token_strs is True
        work = functools.partial(_tokenized, model.tokenizer, ids, names, model.card.context_tokens)
        short = len(ids) <= self._service.limits.inline_chars
        return _json(work() if short else await self._service.on_thread(work))

    async def _ids(self, model: ServedModel, body: TokenizeBody) -> list[int]:
        """What the prompt becomes."""
        text, limits = body.prompt, self._service.limits
        if text is None:
            return await self._generate.chat_ids(model, tokenize.chat_of(body))
        if len(text) > limits.hopeless_chars:
            plan.refuse_hopeless(len(text), model.tokenizer.longest_token_chars, model.target, "prompt")
        add_special = body.add_special_tokens is not False
        # As in completions: a raw prompt is the client's own template, so what it spells as special is special.
        work = functools.partial(model.tokenizer.encode, text, add_special=add_special, parse_special=True)
        return work() if len(text) <= limits.inline_chars else await self._service.on_thread(work)

    async def detokenize(self, request: web.Request) -> web.Response:
        raw = await self._service.read(request)
        body = tokenize.parse_detokenize(raw)
        self._service.count_ignored(request, parse.ignored_fields(raw, DetokenizeBody))
        model = await self._service.serving(request, self._name(request, body.model))
        # A tokenizer may know ids that the model has no row for, and the other way round: both are answered.
        plan.check_ids(body.tokens, max(model.target.vocab, model.tokenizer.vocab_size), "tokens", "tokens")
        work = functools.partial(_detokenize, model.tokenizer, body.tokens)
        short = len(body.tokens) <= self._service.limits.inline_chars
        return _json(work() if short else await self._service.on_thread(work))

    async def info(self, request: web.Request) -> web.Response:
        name = self._name(request, request.query.get("model"))
        model = await self._service.serving(request, name)
        texts = model.tokenizer.token_texts
        about = TokenizerInfo(
            tokenizer_class=model.tokenizer.kind,
            vocab_size=model.tokenizer.vocab_size,
            max_model_len=model.card.context_tokens,
            model=name,
            bos_token=texts.get("bos_token"),
            eos_token=texts.get("eos_token"),
            pad_token=texts.get("pad_token"),
            unk_token=texts.get("unk_token"),
            add_bos_token=model.tokenizer.add_bos,
            chat_template=model.tokenizer.chat_template,
        )
        return _json(msgspec.json.encode(about))

    def _name(self, request: web.Request, name: str | None) -> str:
        """The given name, or one of the only model that the request's key may know of."""
        if name is not None:
            return name
        names = self._service.names(request)
        if len({self._service.application(request, one).model for one in names}) > 1:
            raise Refused("model is required: several models are served here", param="model", code="missing_field")
        return names[0] if names else ""


def _tokenized(tokenizer: Tokenizer, ids: list[int], names: bool, context_tokens: int) -> bytes:
    entries = {token: tokenizer.entry(token) for token in set(ids)} if names else {}
    strs = [entries[token] for token in ids] if names else None
    return msgspec.json.encode(Tokenized(count=len(ids), max_model_len=context_tokens, tokens=ids, token_strs=strs))


def _detokenize(tokenizer: Tokenizer, tokens: list[int]) -> bytes:
    return msgspec.json.encode(Detokenized(prompt=tokenizer.decode(tokens, skip_special=False)))


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
