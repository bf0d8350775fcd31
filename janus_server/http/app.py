"""The HTTP surface: an aiohttp application whose handlers join `api`, tokenizer, node and answer. No policy.

`build_app` makes it. It must be served by `edge.build_runner`, whose cancellation on disconnect is what ends a
request when its client has left, in the queue, in prefill and in decode. A handler raises `Refused`; how that looks to
the client is `edge`'s business.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from janus_server.api import parse, plan, reply
from janus_server.api.bodies import ChatBody, CompletionBody, Limits
from janus_server.errors import Refused
from janus_server.http.edge import SSE, Guard, stamp
from janus_server.http.sse import SseWriter
from janus_server.metrics import CONTENT_TYPE, CallWatch, Metrics

if TYPE_CHECKING:
    from janus_server.instance import Call, ServedModel
    from janus_server.node import Node
    from janus_server.tokens.tokenizer import Tokenizer

T = TypeVar("T")

log = logging.getLogger(__name__)

# Names of unknown fields that are logged: plain ones, and no more than this many.
FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
LOGGED_NAMES = 64


def build_app(node: Node, *, metrics: Metrics, limits: Limits) -> web.Application:
    """The application with all its routes; serve it with `edge.build_runner`."""
    front = Front(node, metrics, limits)
    app = web.Application(middlewares=[Guard(metrics).guard], client_max_size=limits.body_bytes)
    app.router.add_get("/health", front.health)
    app.router.add_get("/ready", front.ready)
    app.router.add_get("/version", front.version)
    app.router.add_get("/metrics", front.metrics)
    app.router.add_get("/v1/models", front.list_models)
    app.router.add_get("/v1/models/{model:.+}", front.show_model)
    app.router.add_post("/v1/chat/completions", front.chat)
    app.router.add_post("/v1/completions", front.complete)
    app.on_response_prepare.append(stamp)
    app.cleanup_ctx.append(front.threads)
    return app


class Front:
    """The handlers, with what they share."""

    def __init__(self, node: Node, metrics: Metrics, limits: Limits) -> None:
        self._node = node
        self._metrics = metrics
        self._limits = limits
        self._pool: ThreadPoolExecutor | None = None
        self._ignored: set[str] = set()

    async def threads(self, app: web.Application) -> AsyncIterator[None]:
        """The encoding threads live as long as the application does."""
        self._pool = ThreadPoolExecutor(self._limits.encode_threads, "encode")
        yield
        self._pool.shutdown(wait=False, cancel_futures=True)

    # Small routes

    async def health(self, request: web.Request) -> web.Response:
        """Alive: the loop turns. Whether requests can be served is /ready."""
        return _json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        reason = self._node.ready()
        if reason is not None:
            raise _not_ready(reason)
        return _json_response({"status": "ready"})

    async def version(self, request: web.Request) -> web.Response:
        return _json_response({"version": _version()})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(self._node), headers={"Content-Type": CONTENT_TYPE})

    async def list_models(self, request: web.Request) -> web.Response:
        entries = [reply.model_entry(model.card) for model in self._node.models.values()]
        return _json_response({"object": "list", "data": entries})

    async def show_model(self, request: web.Request) -> web.Response:
        return _json_response(reply.model_entry(self._find(request.match_info["model"]).card))

    # Generation

    async def chat(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.monotonic()
        raw = await self._read(request)
        body = parse.parse_chat(raw, self._limits)
        self._count_ignored(request, parse.ignored_fields(raw, ChatBody))
        model = self._serving(body.model)
        prompt = await self._encode_chat(model, body)
        call = plan.plan_chat(body, prompt, model.target, self._limits, _label("chatcmpl-"))
        return await self._answer(request, model, call, arrived_s)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.monotonic()
        raw = await self._read(request)
        body = parse.parse_completion(raw, self._limits)
        self._count_ignored(request, parse.ignored_fields(raw, CompletionBody))
        model = self._serving(body.model)
        prompts = await self._encode_prompts(model, body)
        call = plan.plan_completion(body, prompts, model.target, self._limits, _label("cmpl-"))
        if body.echo:
            call = msgspec.structs.replace(call, echo=await self._echo(model, body, call))
        return await self._answer(request, model, call, arrived_s)

    async def _answer(
        self, request: web.Request, model: ServedModel, call: plan.Call, arrived_s: float
    ) -> web.StreamResponse:
        metrics = self._metrics.model(model.card.id)
        watch = CallWatch(metrics, call, arrived_s)
        answer = self._stream if call.stream else self._whole
        try:
            async with model.submit(call.requests) as running:
                return await answer(request, model, call, running, watch)
        except (asyncio.CancelledError, ConnectionError):
            metrics.disconnects.inc()
            raise
        finally:
            watch.end(time.monotonic())

    async def _whole(
        self, request: web.Request, model: ServedModel, call: plan.Call, running: Call, watch: CallWatch
    ) -> web.StreamResponse:
        whole = reply.WholeReply(call, model.tokenizer)
        while (news := await running.take(self._limits.keep_alive_s)) is not None:
            now = time.monotonic()
            for item in news:
                watch.delta(item.prompt, item.delta, now)
                if (refused := reply.failure(item.delta)) is not None:
                    raise refused
                whole.add(item.prompt, item.delta)
        # 128 choices with 20 log probabilities a token can take seconds to write: not on the loop.
        body = await self._on_thread(whole.body) if call.logprobs is not None else whole.body()
        return web.Response(body=body, content_type="application/json")

    async def _stream(
        self, request: web.Request, model: ServedModel, call: plan.Call, running: Call, watch: CallWatch
    ) -> web.StreamResponse:
        streamed = reply.StreamReply(call, model.tokenizer)
        sse = request[SSE] = SseWriter(request, self._limits.stall_s)
        while (news := await running.take(self._limits.keep_alive_s)) is not None:
            if not news:
                await sse.ping()
                continue
            now = time.monotonic()
            events: list[bytes] = []
            refused = None
            for item in news:
                watch.delta(item.prompt, item.delta, now)
                refused = reply.failure(item.delta)
                if refused is not None:
                    break
                events.append(streamed.events(item.prompt, item.delta))
            if events:
                await sse.send(b"".join(events))
            if refused is not None:
                raise refused
        await sse.done(streamed.usage_event() if call.include_usage else b"")
        return sse.response

    # What the handlers need

    def _serving(self, name: str) -> ServedModel:
        self._check_ready()
        return self._find(name)

    def _check_ready(self) -> None:
        """Refuse while requests are not taken: before the models are there, and while the server drains."""
        reason = self._node.refusing()
        if reason is not None:
            raise _not_ready(reason)

    def _find(self, name: str) -> ServedModel:
        model = self._node.models.get(name)
        if model is None:
            message = "no model of that name is served here; GET /v1/models lists those that are"
            raise Refused(message, status=404, param="model", code="model_not_found")
        return model

    def _count_ignored(self, request: web.Request, names: Sequence[str]) -> None:
        """Count fields that are ignored, and log each name once; a client may invent names without end."""
        if not names:
            return
        self._metrics.ignored.labels(request.path).inc(len(names))
        for name in names:
            if len(self._ignored) < LOGGED_NAMES and name not in self._ignored and FIELD_NAME.fullmatch(name):
                self._ignored.add(name)
                log.debug("the field %s is not known here and was ignored", name)

    async def _read(self, request: web.Request) -> bytes:
        """The body, refused as soon as it is known to be too large: memory never holds more than the limit."""
        limit = self._limits.body_bytes
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refused(
                "a compressed body is not accepted; send it as it is", status=415, code="unsupported_encoding"
            )
        if request.content_length is not None and request.content_length > limit:
            raise _too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise Refused("the body took too long to arrive", status=408, code="request_timeout") from None
        except web.RequestPayloadError:
            raise Refused("the body cannot be read", code="invalid_body") from None
        return bytes(body)

    async def _encode_chat(self, model: ServedModel, body: ChatBody) -> list[int]:
        messages = parse.messages_of(body)
        self._refuse_hopeless(model, sum(map(parse.content_chars, messages)), "messages")
        # A template is a program that came with the checkpoint: it never runs on the loop.
        return await self._on_thread(
            functools.partial(
                model.tokenizer.encode_chat,
                messages,
                tools=None,
                add_generation_prompt=body.add_generation_prompt is not False,
                kwargs=body.chat_template_kwargs,
            )
        )

    async def _encode_prompts(self, model: ServedModel, body: CompletionBody) -> list[list[int]]:
        given = parse.prompts_of(body)
        for text in given:
            if isinstance(text, str):
                self._refuse_hopeless(model, len(text), "prompt")
        work = functools.partial(_encode_all, model.tokenizer, given, body)
        long = sum(len(prompt) for prompt in given) > self._limits.inline_chars
        return await self._on_thread(work) if long else work()

    async def _echo(self, model: ServedModel, body: CompletionBody, call: plan.Call) -> tuple[str, ...]:
        """The text of each prompt, as it was given or of its ids."""
        work = functools.partial(_prompt_texts, model.tokenizer, parse.prompts_of(body), call)
        long = call.prompt_tokens > self._limits.inline_chars
        return await self._on_thread(work) if long else work()

    def _refuse_hopeless(self, model: ServedModel, chars: int, param: str) -> None:
        # Short texts need no look at the vocabulary, which takes 60 ms once.
        if chars > self._limits.hopeless_chars:
            plan.refuse_hopeless(chars, model.tokenizer.longest_token_chars, model.target, param)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _encode_all(tokenizer: Tokenizer, given: Sequence[str | list[int]], body: CompletionBody) -> list[list[int]]:
    add_special = body.add_special_tokens is not False
    # A raw prompt is the client's own template, so what it spells as special is special.
    return [
        tokenizer.encode(prompt, add_special=add_special, parse_special=True) if isinstance(prompt, str) else prompt
        for prompt in given
    ]


def _prompt_texts(tokenizer: Tokenizer, given: Sequence[str | list[int]], call: plan.Call) -> tuple[str, ...]:
    return tuple(
        prompt if isinstance(prompt, str) else tokenizer.decode(request.prompt, request.skip_special_tokens)
        for prompt, request in zip(given, call.requests, strict=True)
    )


def _label(prefix: str) -> plan.Label:
    seed = int.from_bytes(os.urandom(8)) >> 1
    return plan.Label(id=prefix + os.urandom(16).hex(), created_s=int(time.time()), seed=seed)


def _not_ready(reason: str) -> Refused:
    return Refused(f"not ready: {reason}", status=503, kind="server_error", code="not_ready", retry_after_s=1.0)


def _too_large(limit: int) -> Refused:
    return Refused(f"the body must be at most {limit} bytes", status=413, code="body_too_large")


def _json_response(value: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _version() -> str:
    # Imported here: it costs 20 ms, and few ask.
    from importlib import metadata

    try:
        return metadata.version("janus-server")
    except metadata.PackageNotFoundError:
        return "unknown"
