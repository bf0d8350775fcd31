"""The loop side of one model instance: requests in, text out. Called by the HTTP layer; talks to the device thread.

`ServedModel.generate` turns the device thread's emits into deltas: detokenized text that can no longer change, cut at
stop strings. Closing the generator (a client that left) cancels the request in queue, prefill and decode alike.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from janus_server.errors import Refused
from janus_server.executor import Cancel, DeviceThread, StepReport, Submit
from janus_server.tokens.detokenize import Detokenizer, StopMatcher
from janus_server.tokens.tokenizer import Tokenizer
from janus_server.types import Delta, Emit, FinishReason, ModelCard, Request, Sampling

_ENDED_MESSAGE = "The request ended before it was complete because of an error on this server."


class Stream:
    """Where one request's emits wait for their reader. Filled and read on the event loop."""

    __slots__ = ("_emits", "_ready")

    def __init__(self) -> None:
        self._emits: deque[Emit] = deque()
        self._ready = asyncio.Event()

    def put(self, emit: Emit) -> None:
        self._emits.append(emit)
        self._ready.set()

    async def take(self) -> deque[Emit]:
        """Everything that has arrived, at least one emit."""
        await self._ready.wait()
        self._ready.clear()
        emits, self._emits = self._emits, deque()
        return emits


class Streams:
    """All open requests of a node by id; one call per step spreads the device thread's report."""

    def __init__(self) -> None:
        self._open: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str) -> Stream:
        stream = self._open[request_id] = Stream()
        return stream

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def deliver(self, report: StepReport) -> None:
        """Emits of requests that nobody reads any more are dropped: their cancel is on its way."""
        for emit in report.emits:
            stream = self._open.get(emit.request_id)
            if stream is not None:
                stream.put(emit)


class ServedModel:
    """One model as the API sees it."""

    def __init__(
        self,
        card: ModelCard,
        defaults: Sampling,
        tokenizer: Tokenizer,
        eos_ids: tuple[int, ...],
        vocab: int,
        refuse_unfit: Callable[[Request], None],
        device: DeviceThread,
        streams: Streams,
    ) -> None:
        self.card = card
        self.defaults = defaults
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.vocab = vocab
        self.failed = False
        self._refuse_unfit = refuse_unfit
        self._device = device
        self._streams = streams

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Yield deltas until every choice has its `finish`. Raises Refused first when the request can never run."""
        if self.failed:
            raise _unavailable(self.card.id)
        self._refuse_unfit(request)
        stream = self._streams.open(request.id)
        choices = [_Choice(self.tokenizer, request, index) for index in range(request.n)]
        open_choices = request.n
        try:
            self._device.post(Submit(self.card.id, request))
            while open_choices:
                for emit in await stream.take():
                    choice = choices[emit.index]
                    if choice.finished:
                        continue
                    delta = choice.take(emit)
                    if choice.finished:
                        open_choices -= 1
                        if emit.finish is None:
                            self._device.post(Cancel(self.card.id, request.id, emit.index))
                    yield delta
        finally:
            self._streams.close(request.id)
            if open_choices:
                self._device.post(Cancel(self.card.id, request.id))


class _Choice:
    """Text state of one choice: what is held back, and whether it has ended."""

    __slots__ = ("_detokenizer", "_include_stop", "_matcher", "finished", "index")

    def __init__(self, tokenizer: Tokenizer, request: Request, index: int) -> None:
        self.index = index
        self.finished = False
        self._detokenizer = Detokenizer(tokenizer, request.skip_special_tokens, request.prompt)
        self._matcher = StopMatcher(request.stop, request.include_stop) if request.stop else None
        self._include_stop = request.include_stop

    def take(self, emit: Emit) -> Delta:
        finish = emit.finish
        # The token that ended the choice is counted but not shown, as every OpenAI server does.
        hidden = finish is FinishReason.STOP and not self._include_stop
        text = "" if emit.token is None or hidden else self._detokenizer.push(emit.token)
        if finish is not None:
            text += self._detokenizer.finish()
        if self._matcher is not None:
            text, stopped = self._match(text, last=finish is not None)
            finish = FinishReason.STOP if stopped else finish
        self.finished = finish is not None
        return Delta(
            index=self.index,
            text=text,
            tokens=() if emit.token is None else (emit.token,),
            logprobs=() if emit.logprob is None else (emit.logprob,),
            finish=finish,
            cached_tokens=emit.cached_tokens,
            queued_s=emit.queued_s,
            message=_ENDED_MESSAGE if finish is FinishReason.ERROR else None,
        )

    def _match(self, text: str, last: bool) -> tuple[str, bool]:
        matcher = self._matcher
        if matcher is None:
            return text, False
        found = matcher.push(text)
        if found.stopped or not last:
            return found.text, found.stopped
        return found.text + matcher.finish(), False


def _unavailable(model: str) -> Refused:
    return Refused(
        f"The model {model!r} stopped after an error and is not available.",
        status=503, kind="server_error", code="model_unavailable", retry_after_s=30.0,
    )  # fmt: skip
