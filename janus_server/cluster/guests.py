"""Requests of other nodes that run here: from the wire into the device thread, and what it says back out.

The station of this node's listener calls it. A guest counts as a request of its model's like any other, so that the
model stays as long as it runs. It lives on the loop and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from janus_server.cluster.said import going_on
from janus_server.errors import Refused
from janus_server.executor import Cancel, Submit
from janus_server.orders import Helper
from janus_server.types import Emit, FinishReason, Request
from janus_server.wire.frames import Lend, Run
from janus_server.wire.trouble import Trouble

if TYPE_CHECKING:
    from janus_server.cluster.lending import Lending
    from janus_server.grammar.compile import Grammars
    from janus_server.grammar.matcher import Matcher
    from janus_server.lifecycle import Lifecycle
    from janus_server.resident import Resident
    from janus_server.streams import Streams
    from janus_server.wire.serving import Answering

log = logging.getLogger("janus.cluster")


class _Choice:
    __slots__ = ("finished",)

    def __init__(self, finished: bool) -> None:
        self.finished = finished


class Guest:
    """One request of another node: an answer of `Streams`, and its own hearer; an entrant of its model's flow."""

    __slots__ = ("_guests", "_resident", "answer", "choices", "entered_s", "request", "started")

    prompts = 1

    def __init__(self, answer: Answering, resident: Resident, guests: Guests) -> None:
        self.answer = answer
        self.request: Request = answer.run.request
        self.choices = [_Choice(index in answer.run.ended) for index in range(self.request.n)]
        self.entered_s = time.monotonic()
        self.started = False
        self._resident = resident
        self._guests = guests

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def call(self) -> Guest:
        return self

    def begun(self) -> None:
        """Its front sees that by its first token."""

    def put(self, answer: Any, emit: Emit) -> None:
        choice = self.choices[emit.index]
        if choice.finished:
            return
        if emit.finish is FinishReason.ABORT:  # this node ends before the request does: others may go on with it
            self.answer.fail(Trouble.DRAINING)
            self._guests.forget(self)
            return
        lend = self.answer.run.lend
        if lend is not None and emit.finish is FinishReason.LENGTH:
            self._guests.lend(self, emit, lend)
            return
        self.answer.put(emit)
        if emit.finish is not None:
            self.finish(emit.index)

    def finish(self, index: int) -> None:
        """A choice is over, by itself or because nobody wants it."""
        self.choices[index].finished = True
        if all(choice.finished for choice in self.choices):
            self.answer.end()
            self._guests.forget(self)

    def post(self, command: Submit | Cancel) -> None:
        self._guests.post(command, self.answer.run.helper)

    def leave(self) -> None:
        self._resident.flow.ended(self)


class Guests:
    """All of them. With leaving(), none is taken any more."""

    def __init__(
        self, residents: Callable[[], Lifecycle], streams: Streams, leaving: Callable[[], bool],
        post: Callable[[Submit | Cancel, Helper | None], None], lending: Callable[[], Lending],
    ) -> None:  # fmt: skip
        """post(command, helper) brings a command to the device thread, a request with the node that may compute its
        prompt."""
        self._lifecycle = residents
        self._streams = streams
        self._leaving = leaving
        self._lending = lending
        self.post = post
        self._open: dict[Answering, Guest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._grammars: Grammars | None = None

    def __len__(self) -> int:
        return len(self._open)

    def run(self, answer: Answering) -> Trouble | None:
        run = answer.run
        lifecycle, request = self._lifecycle(), run.request
        residents: Mapping[str, Resident] = lifecycle.residents
        resident = residents.get(request.model)
        if self._leaving():
            return Trouble.DRAINING
        if resident is None or not resident.flow.open:
            return Trouble.NOT_HERE
        if run.lend is not None and not self._lending().able(request.model):
            return Trouble.NOT_HERE
        if not self._fits(resident, run):
            return Trouble.UNSOUND
        guest = self._open[answer] = Guest(answer, resident, self)
        self._streams.host(guest)
        resident.flow.admit(guest)
        arrived_s = time.monotonic() - run.age_s
        if request.grammar is None:
            guest.post(_submit(run, arrived_s, None))
        else:
            self._start(guest, self._compile(guest, resident, arrived_s))
        return None

    def cancel(self, answer: Answering, index: int | None) -> None:
        guest = self._open.get(answer)
        if guest is None:
            return
        guest.post(Cancel(guest.request.model, guest.request.id, index))
        if index is None:
            self.forget(guest)
        elif index < len(guest.choices) and not guest.choices[index].finished:
            guest.finish(index)

    def forget(self, guest: Guest) -> None:
        if self._open.pop(guest.answer, None) is not None:
            self._streams.close(guest)
            guest.leave()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._grammars is not None:
            await asyncio.to_thread(self._grammars.close)

    def lend(self, guest: Guest, emit: Emit, lend: Lend) -> None:
        """A prompt that was to be computed for another node is: what came of it is told with its end."""
        self._start(guest, self._lend(guest, emit, lend))

    async def _lend(self, guest: Guest, emit: Emit, lend: Lend) -> None:
        resident = self._lifecycle().residents[guest.request.model]
        lent = await self._lending().lend(resident.opened, guest.request, lend, guest.answer.peer.node)
        if guest.answer in self._open:
            guest.answer.put(msgspec.structs.replace(emit, lent=lent))
            guest.finish(emit.index)

    def _fits(self, resident: Resident, run: Run) -> bool:
        opened, request = resident.opened, run.request
        said = (token for known in run.known for token in known.tokens)
        ids = (*request.prompt, *request.stop_ids, *(token for token, _ in request.sampling.logit_bias), *said)
        alone = request.n == 1 and request.max_tokens == 0 and request.prompt_logprobs is None
        if (request.pooling is not None and not alone) or any(len(k.tokens) >= request.max_tokens for k in run.known):
            return False
        return max(ids) < opened.spec.vocab and len(request.prompt) + request.max_tokens <= opened.context_tokens

    async def _compile(self, guest: Guest, resident: Resident, arrived_s: float) -> None:
        """Its grammar is compiled where it runs; the front has found that it can be."""
        from janus_server.grammar.compile import Grammars

        grammar = guest.request.grammar
        if grammar is None:
            return
        grammars = self._grammars = self._grammars or Grammars()
        served = await self._lifecycle().prepare(resident.name)
        try:
            matcher: Matcher | None = await asyncio.to_thread(
                grammars.compile, served.tokenizer, grammar, served.target.eos_ids
            )
        except Refused:
            matcher = None
        if guest.answer not in self._open:
            return
        if matcher is None or not resident.flow.open:
            self.forget(guest)
            guest.answer.fail(Trouble.FAILED if matcher is None else Trouble.NOT_HERE)
            return
        guest.post(_submit(guest.answer.run, arrived_s, matcher))

    def _start(self, guest: Guest, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._over(guest, task))

    def _over(self, guest: Guest, task: asyncio.Task[None]) -> None:
        """Whatever went wrong, its front is told at once."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("%s: a request of another node came to nothing here", guest.request.model, exc_info=error)
        if guest.answer in self._open:
            self.forget(guest)
            guest.answer.fail(Trouble.FAILED)


def _submit(run: Run, arrived_s: float, matcher: Matcher | None) -> Submit:
    request = run.request
    if not run.known and not run.ended:
        return Submit(request.model, request, arrived_s, matcher)
    return Submit(request.model, request, arrived_s, None, going_on(request, run.known, run.ended, matcher))
