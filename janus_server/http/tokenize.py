"""The routes that turn text into tokens and back, and say what the tokenizer is. Nothing is generated or counted here.

The encoding is the one that /v1/completions and /v1/chat/completions use, so a count here is the `prompt_tokens` of the
same prompt there. Long inputs and every chat template run on a thread of the service.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from janus_server.api import parse, tokenize
from janus_server.api.bodies import ChatBody
from janus_server.api.tokenize import DetokenizeBody, Detokenized, TokenizeBody, Tokenized, TokenizerInfo
from janus_server.errors import Refused
from janus_server.http.gate import may_see
from janus_server.http.service import Service

if TYPE_CHECKING:
    from janus_server.instance import ServedModel
    from janus_server.tokens.tokenizer import Tokenizer


class Tokenize:
    """The handlers of /tokenize, /detokenize and /tokenizer_info."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: web.Request) -> web.Response:
        raw = await self._service.read(request)
        body = tokenize.parse_tokenize(raw, self._service.limits)
        self._service.count_ignored(request, parse.ignored_fields(raw, TokenizeBody))
        model = await self._model(request, body.model)
        work = functools.partial(_tokenize, model.tokenizer, body, model.card.context_tokens)
        # A template is a program that came with the checkpoint: it never runs on the loop.
        short = body.prompt is not None and len(body.prompt) <= self._service.limits.inline_chars
        return _json(work() if short else await self._service.on_thread(work))

    async def detokenize(self, request: web.Request) -> web.Response:
        raw = await self._service.read(request)
        body = tokenize.parse_detokenize(raw)
        self._service.count_ignored(request, parse.ignored_fields(raw, DetokenizeBody))
        model = await self._model(request, body.model)
        # A tokenizer may know ids that the model has no row for, and the other way round: both are answered.
        tokenize.check_ids(body.tokens, max(model.target.vocab, model.tokenizer.vocab_size))
        work = functools.partial(_detokenize, model.tokenizer, body.tokens)
        short = len(body.tokens) <= self._service.limits.inline_chars
        return _json(work() if short else await self._service.on_thread(work))

    async def info(self, request: web.Request) -> web.Response:
        model = await self._model(request, request.query.get("model"))
        texts = model.tokenizer.token_texts
        about = TokenizerInfo(
            tokenizer_class=model.tokenizer.kind,
            vocab_size=model.tokenizer.vocab_size,
            max_model_len=model.card.context_tokens,
            model=model.card.id,
            bos_token=texts.get("bos_token"),
            eos_token=texts.get("eos_token"),
            pad_token=texts.get("pad_token"),
            unk_token=texts.get("unk_token"),
            add_bos_token=model.tokenizer.add_bos,
            chat_template=model.tokenizer.chat_template,
        )
        return _json(msgspec.json.encode(about))

    async def _model(self, request: web.Request, name: str | None) -> ServedModel:
        """The named model, or the only one that the request's key may know of."""
        if name is not None:
            return await self._service.serving(name if may_see(request, name) else "")
        names = [key for key in self._service.node.cards if may_see(request, key)]
        if len(names) > 1:
            raise Refused("model is required: several models are served here", param="model", code="missing_field")
        return await self._service.serving(names[0] if names else "")


def _tokenize(tokenizer: Tokenizer, body: TokenizeBody, context_tokens: int) -> bytes:
    if body.prompt is not None:
        add_special = body.add_special_tokens is not False
        # As in completions: a raw prompt is the client's own template, so what it spells as special is special.
        ids = tokenizer.encode(body.prompt, add_special=add_special, parse_special=True)
    else:
        ids = tokenizer.encode_chat(
            parse.messages_of(ChatBody(model="", messages=body.messages or [])),
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            kwargs=body.chat_template_kwargs,
        )
    entries = {token: tokenizer.entry(token) for token in set(ids)} if body.return_token_strs else {}
    strs = [entries[token] for token in ids] if body.return_token_strs else None
    return msgspec.json.encode(Tokenized(count=len(ids), max_model_len=context_tokens, tokens=ids, token_strs=strs))


def _detokenize(tokenizer: Tokenizer, tokens: list[int]) -> bytes:
    return msgspec.json.encode(Detokenized(prompt=tokenizer.decode(tokens, skip_special=False)))


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
