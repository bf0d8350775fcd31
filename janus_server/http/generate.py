"""The generating routes: a body becomes a call, the call's news become an answer, whole or streamed.

Every API that generates ends in `answer`: what differs is the `Style`, which says how the answer is written. A
handler raises `Refused`; a client that leaves cancels the handler, and leaving the call cancels its requests.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
from aiohttp import web

from janus_server import types
from janus_server.api import chat_reply, parse, plan, reply, tools
from janus_server.api.bodies import ChatBody, CompletionBody
from janus_server.applications import Application
from janus_server.attainment import Outcome, outcome_of
from janus_server.errors import Refused
from janus_server.http.access import CALL
from janus_server.http.admit import Admitted
from janus_server.http.edge import ENDING, SSE
from janus_server.http.gate import key_name
from janus_server.http.service import Service
from janus_server.http.sse import SseWriter, send_whole
from janus_server.metrics import CallWatch

if TYPE_CHECKING:
    from janus_server.grammar.matcher import Matcher
    from janus_server.instance import News, ServedModel
    from janus_server.tokens.tokenizer import Tokenizer


class Whole(Protocol):
    """Gathers the deltas of a call; `body` is the JSON answer once every choice has ended."""

    def add(self, prompt: int, delta: types.Delta) -> None: ...

    def body(self) -> bytes: ...


class Stream(Protocol):
    """Writes the deltas of a call as events: `end` closes a stream that went well, `error` one that did not."""

    def events(self, prompt: int, delta: types.Delta) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, refused: Refused) -> bytes: ...


class Style(msgspec.Struct, frozen=True):
    """How one API writes its answers."""

    whole: Callable[[plan.Call, Tokenizer], Whole]
    stream: Callable[[plan.Call, Tokenizer], Stream]


COMPLETION = Style(reply.WholeReply, reply.StreamReply)
CHAT = Style(chat_reply.WholeChat, chat_reply.StreamChat)

# Tokens at the end of a prompt that hold more than the text which is looked for there.
PROMPT_END_TOKENS = 16
_ABNORMAL = frozenset({types.FinishReason.ERROR, types.FinishReason.ABORT})


class Generate:
    """The handlers of chat and completions, and the one way that calls are answered."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.monotonic()
        raw = await self._service.read(request)
        body = parse.parse_chat(raw, self._service.limits)
        self._service.count_ignored(request, parse.ignored_fields(raw, ChatBody))
        model = await self._service.serving(request, body.model)
        call = await self.plan_chat(model, body, "chatcmpl-")
        return await self.answer(request, model, call, arrived_s, CHAT)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.monotonic()
        raw = await self._service.read(request)
        body = parse.parse_completion(raw, self._service.limits)
        self._service.count_ignored(request, parse.ignored_fields(raw, CompletionBody))
        model = await self._service.serving(request, body.model)
        prompts = await self._encode_prompts(model, body)
        call = plan.plan_completion(body, prompts, model.target, self._service.limits, label("cmpl-"))
        if body.echo:
            call = msgspec.structs.replace(call, echo=await self._echo(model, body, call))
        return await self.answer(request, model, call, arrived_s, COMPLETION)

    async def plan_chat(self, model: ServedModel, body: ChatBody, id_prefix: str) -> plan.Call:
        """The call that answers a chat body; every API that speaks in messages comes through here."""
        talk = tools.talk_of(body, model.target.dialect)
        prompt = await self._encode_chat(model, body, talk)
        call = plan.plan_chat(body, prompt, model.target, self._service.limits, label(id_prefix))
        end = model.tokenizer.decode(prompt[-PROMPT_END_TOKENS:], False) if model.target.dialect.reasoning else ""
        return tools.spoken_by(call, talk, end)

    async def chat_tokens(self, model: ServedModel, body: ChatBody) -> int:
        """How long the prompt of a chat body is; nothing is generated."""
        return len(await self.chat_ids(model, body))

    async def chat_ids(self, model: ServedModel, body: ChatBody) -> list[int]:
        """The prompt of a chat body, as its call would run it."""
        return await self._encode_chat(model, body, tools.talk_of(body, model.target.dialect))

    async def answer(
        self, request: web.Request, model: ServedModel, call: plan.Call, arrived_s: float, style: Style
    ) -> web.StreamResponse:
        """Run the call and write its answer."""
        application = self._service.application(request, call.model)
        call = self._for_application(request, call, application)
        with self._service.door.admit(request, call, application, arrived_s) as entry:
            metrics, counts = self._service.metrics.model(model.card.id), self._service.metrics.application(application)
            watch = request[CALL] = CallWatch(metrics, counts, call, arrived_s)
            try:
                matchers = await self._matchers(model, call)
                async with model.submit(call.requests, matchers, arrived_s) as running:
                    news = entry.over(running)
                    if call.stream:
                        return await self._stream(request, style.stream(call, model.tokenizer), news, watch)
                    return await self._whole(request, call, style.whole(call, model.tokenizer), news, watch)
            except Refused as refused:
                watch.unended = outcome_of(refused)
                raise
            except (asyncio.CancelledError, ConnectionError):
                metrics.disconnects.inc()
                if not request.get(ENDING, False):
                    watch.unended = Outcome.LEFT
                raise
            finally:
                watch.end(time.monotonic())

    def _for_application(self, request: web.Request, call: plan.Call, application: Application) -> plan.Call:
        """The call with what its requests were promised, under their key's name: keys do not share what they cached."""
        requests = tuple(
            msgspec.structs.replace(
                one,
                tenant="" if self._service.limits.share_prefixes else key_name(request),
                application=application.name,
                promise=application.promise,
                priority=application.priority,
            )
            for one in call.requests
        )
        return msgspec.structs.replace(call, requests=requests)

    async def _matchers(self, model: ServedModel, call: plan.Call) -> list[Matcher]:
        """The compiled grammar of each request, where the call has one: all requests of a call have the same."""
        grammar = call.requests[0].grammar
        if grammar is None:
            return []
        eos_ids = model.target.eos_ids
        first = await self._service.on_grammar_thread(
            lambda: self._service.grammars.compile(model.tokenizer, grammar, eos_ids, call.grammar_from)
        )
        return [first, *(first.copy() for _ in call.requests[1:])]

    async def _whole(
        self, request: web.Request, call: plan.Call, whole: Whole, running: Admitted, watch: CallWatch
    ) -> web.StreamResponse:
        while (news := await running.take(self._service.limits.keep_alive_s)) is not None:
            now = time.monotonic()
            for item in news:
                watch.delta(item.prompt, item.delta, now)
                if (refused := reply.failure(item.delta)) is not None:
                    raise refused
                whole.add(item.prompt, item.delta)
        body = await self._service.on_thread(whole.body) if call.wordy else whole.body()
        return await send_whole(request, body, self._service.limits.stall_s)

    async def _stream(
        self, request: web.Request, stream: Stream, running: Admitted, watch: CallWatch
    ) -> web.StreamResponse:
        sse = request[SSE] = SseWriter(request, self._service.limits.stall_s, stream.error)
        running.pour_into(functools.partial(_write_now, sse, stream, watch))
        while (news := await running.take(self._service.limits.keep_alive_s)) is not None:
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
                if item.delta.prompt_logprobs:  # a scored prompt of some thousand tokens would hold up the loop
                    work = functools.partial(stream.events, item.prompt, item.delta)
                    events.append(await self._service.on_thread(work))
                else:
                    events.append(stream.events(item.prompt, item.delta))
            if written := b"".join(events):  # a delta whose text is held back has no event
                await sse.send(written)
            if refused is not None:
                raise refused
        await sse.finish(stream.end())
        return sse.response

    async def _encode_chat(self, model: ServedModel, body: ChatBody, talk: tools.Talk) -> list[int]:
        messages = parse.messages_of(body)
        self._refuse_hopeless(model, sum(map(parse.content_chars, messages)), "messages")
        # A template is a program that came with the checkpoint: it never runs on the loop.
        return await self._service.on_thread(
            functools.partial(
                model.tokenizer.encode_chat,
                messages,
                tools=talk.tools,
                add_generation_prompt=body.add_generation_prompt is not False,
                kwargs=talk.kwargs,
            )
        )

    async def _encode_prompts(self, model: ServedModel, body: CompletionBody) -> list[list[int]]:
        given = parse.prompts_of(body)
        for text in given:
            if isinstance(text, str):
                self._refuse_hopeless(model, len(text), "prompt")
        work = functools.partial(_encode_all, model.tokenizer, given, body)
        long = sum(len(prompt) for prompt in given) > self._service.limits.inline_chars
        return await self._service.on_thread(work) if long else work()

    async def _echo(self, model: ServedModel, body: CompletionBody, call: plan.Call) -> tuple[str, ...]:
        """The text of each prompt: as it was given, or of its ids where it was ids or its tokens are shown too."""
        work = functools.partial(_prompt_texts, model.tokenizer, parse.prompts_of(body), call)
        long = call.prompt_tokens > self._service.limits.inline_chars
        return await self._service.on_thread(work) if long else work()

    def _refuse_hopeless(self, model: ServedModel, chars: int, param: str) -> None:
        # Short texts need no look at the vocabulary, which takes 60 ms once.
        if chars > self._service.limits.hopeless_chars:
            plan.refuse_hopeless(chars, model.tokenizer.longest_token_chars, model.target, param)


def _write_now(sse: SseWriter, stream: Stream, watch: CallWatch, news: list[News]) -> bool:
    """Write news the moment they come, where that takes no waiting; False leaves them to the handler."""
    if not sse.flowing:
        return False
    for item in news:
        if item.delta.prompt_logprobs or item.delta.finish in _ABNORMAL:
            return False
    now = time.monotonic()
    written = b""
    for item in news:
        watch.delta(item.prompt, item.delta, now)
        written += stream.events(item.prompt, item.delta)
    if written:
        sse.send_now(written)
    return True


def _encode_all(tokenizer: Tokenizer, given: Sequence[str | list[int]], body: CompletionBody) -> list[list[int]]:
    add_special = body.add_special_tokens is not False
    # A raw prompt is the client's own template, so what it spells as special is special.
    return [
        tokenizer.encode(prompt, add_special=add_special, parse_special=True) if isinstance(prompt, str) else prompt
        for prompt in given
    ]


def _prompt_texts(tokenizer: Tokenizer, given: Sequence[str | list[int]], call: plan.Call) -> tuple[str, ...]:
    return tuple(
        prompt
        if isinstance(prompt, str) and not call.logprobs
        else tokenizer.decode(request.prompt, request.skip_special_tokens)
        for prompt, request in zip(given, call.requests, strict=True)
    )


def label(prefix: str) -> plan.Label:
    seed = int.from_bytes(os.urandom(8)) >> 1
    return plan.Label(id=prefix + os.urandom(16).hex(), created_s=int(time.time()), seed=seed)
