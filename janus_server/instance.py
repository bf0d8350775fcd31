"""The loop side of one model instance: requests in, text out. The HTTP layer calls it; it orders the device thread.

A `Call` is one API call's requests together: it turns the device thread's emits into deltas, text that can no longer
change, cut at stop strings. Leaving it early (a client that left) cancels what still runs, in queue, prefill and decode
alike. Everything here lives on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from janus_server.errors import Refused, require
from janus_server.executor import Cancel, Submit
from janus_server.streams import Streams
from janus_server.tokens.detokenize import Detokenizer, StopMatcher, Stops
from janus_server.types import Delta, Emit, Fault, FinishReason, ModelCard, Request, TokenLogprob

if TYPE_CHECKING:
    from janus_server.api.plan import Target
    from janus_server.flow import Entrance
    from janus_server.tokens.tokenizer import Tokenizer

_NOT_IN_TIME = "the model could not be made ready in time; other models keep its memory busy"
_ENDED_MESSAGE = "The request ended before it was complete because of an error on this server."


_NOTHING_FITS = (
    "The grammar of this request leaves no token that could follow what was written: it asks for a text that this "
    "model's tokens cannot spell, or took more work than the server does for one request."
)


def _ended_message(fault: Fault | None) -> str:
    return _NOTHING_FITS if fault is Fault.GRAMMAR else _ENDED_MESSAGE


class News(msgspec.Struct, frozen=True, gc=False):
    """A delta and the number of the prompt it belongs to."""

    prompt: int
    delta: Delta


Sink = Callable[[list[News]], bool]


class ServedModel:
    """One model as the API sees it. `target` is what requests to it are checked against."""

    def __init__(self, card: ModelCard, target: Target, tokenizer: Tokenizer, flow: Entrance, streams: Streams) -> None:
        self.card = card
        self.target = target
        self.tokenizer = tokenizer
        self._flow = flow
        self._streams = streams

    def submit(self, requests: Sequence[Request], matchers: Sequence[Any] = (), arrived_s: float | None = None) -> Call:
        """A call to enter with `async with`: entering queues its requests, leaving cancels what has not ended.

        matchers are the compiled grammars of the requests, None for one without; they are given away. None at all where
        no request has one. arrived_s, monotonic, is when it came to the server, from which promises count; now, where
        that is not said.
        """
        return Call(requests, matchers, self.tokenizer, self._flow, self._streams, arrived_s)


class Call:
    """The requests of one API call and what has come back of them."""

    def __init__(
        self,
        requests: Sequence[Request],
        matchers: Sequence[Any],
        tokenizer: Tokenizer,
        flow: Entrance,
        streams: Streams,
        arrived_s: float | None,
    ) -> None:
        require(len(matchers) in (0, len(requests)), "one matcher a request, or none at all")
        self._flow = flow
        self._streams = streams
        self._started = False
        self._refused: Refused | None = None
        self._matchers = matchers or [None] * len(requests)
        # Once for the call: the tables of 16 long stop strings take 10 ms, and a call may have 2,048 choices.
        stops = {stop: Stops(stop) for stop in {request.stop for request in requests} if stop}
        self._answers = [
            _Answer(self, prompt, request, tokenizer, stops.get(request.stop))
            for prompt, request in enumerate(requests)
        ]
        self.entered_s = 0.0
        self.arrived_s = time.monotonic() if arrived_s is None else arrived_s
        self._unfinished = sum(request.n for request in requests)
        self._unbegun = len(requests)
        self._arrived: list[tuple[_Answer, Emit]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()  # kept: asking for it costs a system call
        self._sink: Sink | None = None
        self._pouring = False
        self._broken = False
        self._kept: list[News] = []
        self._until_s = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = 0.0

    @property
    def prompts(self) -> int:
        return len(self._answers)

    @property
    def id(self) -> str:
        """That of its first request: no other call has it."""
        return self.first.id

    @property
    def first(self) -> Request:
        return self._answers[0].request

    @property
    def prompt_tokens(self) -> int:
        return sum(len(answer.request.prompt) for answer in self._answers)

    @property
    def ttft_s(self) -> float | None:
        """What is promised for its first token, if anything is."""
        promise = self._answers[0].request.promise
        return None if promise is None else promise.ttft_s

    async def __aenter__(self) -> Call:
        self.entered_s = time.monotonic()
        for answer in self._answers:
            self._streams.open(answer)
        self._flow.enter(self)
        return self

    def start(self) -> None:
        """The model is there: its requests queue, with the age they have."""
        self._started = True
        for answer, matcher in zip(self._answers, self._matchers, strict=True):
            self._flow.device.post(Submit(self._flow.model, answer.request, self.arrived_s, matcher))

    def stop(self) -> None:
        """What had begun it is gone, before anything came of it: it waits to be begun again."""
        self._started = False

    @property
    def priority(self) -> int:
        return self._answers[0].request.priority

    def begun(self) -> None:
        """The prompt of one of its requests is computed."""
        self._unbegun -= 1
        if not self._unbegun:
            self._flow.started(self)

    def refuse(self, refused: Refused) -> None:
        """The model cannot be had: `take` raises this."""
        self._refused = refused
        self._wake()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        for answer in self._answers:
            self._streams.close(answer)
            if self._started and not all(choice.finished for choice in answer.choices):
                self._flow.device.post(Cancel(self._flow.model, answer.request.id))
        self._flow.leave(self)

    def put(self, answer: _Answer, emit: Emit) -> None:
        self._arrived.append((answer, emit))
        if self._sink is None:
            self._wake()
        elif not self._pouring:
            self._pouring = True
            self._loop.call_soon(self._pour)

    def pour_into(self, sink: Sink) -> None:
        """From now on news go to `sink` as they come; what it does not take (False) waits for `take`, and all after it.

        It must not wait. This saves the half of a token's cost that waking a task is.
        """
        self._sink = sink

    def _pour(self) -> None:
        """A callback of its own, so that a sink that fails ends its call and no other."""
        self._pouring, broken = False, True
        try:
            news = self._read_all()
            if news and not (self._sink is not None and self._waiter is not None and self._sink(news)):
                self._kept = news
            broken = False
        finally:
            self._broken = self._broken or broken
            if self._kept or not self._unfinished or broken:
                self._wake()

    def _read_all(self) -> list[News]:
        kept, self._kept = self._kept, []
        arrived, self._arrived = self._arrived, []
        return kept + [one for answer, emit in arrived if (one := self._read(answer, emit)) is not None]

    async def take(self, timeout_s: float) -> list[News] | None:
        """What has come since the last call, at least one item; [] when nothing came in time; None after the end.

        Raises Refused when the call waited for a model that cannot be had.
        """
        self._until_s = 0.0
        while True:
            if not self._started or self._refused is not None:
                self._check_held()
            require(not self._broken, "what writes an answer has failed")
            if news := self._read_all():
                return news
            if not self._unfinished:
                return None
            if not await self._wait(timeout_s):
                return []

    def _check_held(self) -> None:
        """Raise the refusal that came while the call was held, or the one for having been held too long."""
        if self._flow.held_s(self) > self._flow.patience_s:
            raise Refused(_NOT_IN_TIME, status=503, kind="server_error", code="model_unavailable", retry_after_s=5.0)
        if self._refused is not None:
            raise self._refused

    async def _wait(self, timeout_s: float) -> bool:
        """Until something comes; False when nothing did in time, counted from the first wait of a `take`."""
        loop = self._loop
        now = loop.time()
        if not self._until_s:
            self._until_s = now + timeout_s
        if now >= self._until_s:
            return False
        # One alarm for many waits: a timer for each token would cost more than the token. It is set anew when it rings
        # too early, and only ever moved forward here.
        if self._alarm is None or self._until_s < self._alarm_s:
            self._set_alarm(loop)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        return True

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_s = self._until_s
        self._alarm = loop.call_at(self._until_s, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = None
        if self._waiter is not None and loop.time() < self._until_s:
            self._set_alarm(loop)
        else:
            self._wake()

    def _read(self, answer: _Answer, emit: Emit) -> News | None:
        choice = answer.choices[emit.index]
        if choice.finished:  # a stop string ended it; the device thread has not heard yet
            return None
        if emit.token is None and emit.finish is None:  # scores of a prompt that is still being computed
            choice.hold(emit.prompt_logprobs)
            return None
        delta = choice.take(emit)
        if choice.finished:
            self._unfinished -= 1
            if emit.finish is None:
                self._flow.device.post(Cancel(self._flow.model, answer.request.id, emit.index))
        return News(answer.prompt, delta)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Answer:
    """One request of a call and the text state of its choices."""

    __slots__ = ("call", "choices", "prompt", "request", "started")

    def __init__(self, call: Call, prompt: int, request: Request, tokenizer: Tokenizer, stops: Stops | None) -> None:
        self.call = call
        self.prompt = prompt
        self.request = request
        self.started = False
        self.choices = [_Choice(tokenizer, request, index, stops) for index in range(request.n)]


class _Choice:
    """Text state of one choice: what is held back, and whether it has ended."""

    __slots__ = ("_detokenizer", "_include_stop", "_matcher", "_scores", "_stop_ids", "_unmatched", "finished", "index")

    def __init__(self, tokenizer: Tokenizer, request: Request, index: int, stops: Stops | None) -> None:
        self.index = index
        self.finished = False
        self._detokenizer = Detokenizer(tokenizer, request.skip_special_tokens, request.prompt, request.shown_ids)
        self._matcher = StopMatcher(stops, request.include_stop) if stops is not None else None
        self._include_stop = request.include_stop
        self._stop_ids = request.stop_ids
        self._scores: tuple[TokenLogprob, ...] = ()
        # Stop strings do not count in the first min_tokens tokens.
        self._unmatched = request.min_tokens

    def hold(self, scores: tuple[TokenLogprob, ...]) -> None:
        """Keep what came of the prompt's log probabilities for the first delta."""
        self._scores += scores

    def take(self, emit: Emit) -> Delta:
        finish, token = emit.finish, emit.token
        if token is not None and not finish and self._matcher is None and not (emit.prompt_logprobs or self._scores):
            # What nearly every token is: no end, nothing to match or to score.
            logprobs = () if emit.logprob is None else (emit.logprob,)
            text = self._detokenizer.push(token)
            if emit.queued_s is None and not emit.cached_tokens:
                return Delta(self.index, text, (token,), logprobs)
            return Delta(self.index, text, (token,), logprobs, None, emit.cached_tokens, emit.queued_s)
        scores, self._scores = self._scores + emit.prompt_logprobs, ()
        # The token that ended the choice is counted but not shown, as every OpenAI server does. (The last one that a
        # grammar allows is no end token: it belongs to the text.)
        hidden = finish is FinishReason.STOP and emit.token in self._stop_ids and not self._include_stop
        text = "" if emit.token is None or hidden else self._detokenizer.push(emit.token)
        if finish is not None:
            text += self._detokenizer.finish()
        stop = None
        if self._matcher is not None and self._unmatched == 0:
            text, stop = self._match(self._matcher, text, last=finish is not None)
            finish = finish if stop is None else FinishReason.STOP
        self._unmatched = max(0, self._unmatched - 1)
        self.finished = finish is not None
        return Delta(
            index=self.index,
            text=text,
            tokens=() if emit.token is None else (emit.token,),
            logprobs=() if emit.logprob is None else (emit.logprob,),
            finish=finish,
            cached_tokens=emit.cached_tokens,
            queued_s=emit.queued_s,
            prompt_logprobs=scores,
            embedding=emit.embedding,
            message=_ended_message(emit.fault) if finish is FinishReason.ERROR else None,
            fault=emit.fault,
            stop=stop,
        )

    def _match(self, matcher: StopMatcher, text: str, last: bool) -> tuple[str, str | None]:
        """What may be shown of `text`, and the stop string that ended it, if one did."""
        found = matcher.push(text)
        if found.stopped or not last:
            return found.text, found.stop
        return found.text + matcher.finish(), None
