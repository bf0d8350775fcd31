"""Requests whose prompt another node computes: this one has that done, reads the pages, and then runs the request.

Every request that begins here passes `post`. Where a helper is named for it, the whole pages of its prompt go there as
a request that generates nothing; what came of it is read under a grant and cached here. The request is then queued as
any other and finds its prompt in the cache: its first token is drawn here, once, and no state but the cache's ever lay
elsewhere. Whatever goes wrong on the way, the prompt is computed here. Lives on the loop and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from janus_server.cluster.arrivals import Arrival, Arrivals
from janus_server.errors import BadConfig
from janus_server.executor import Cancel, Submit
from janus_server.fork import kv_words
from janus_server.kv.move import Pace, Stopped
from janus_server.orders import Helper
from janus_server.threads import ended, whole
from janus_server.transfer.frames import PeerTrouble
from janus_server.transfer.pull import Pull, claiming
from janus_server.transfer.rundir import Peering
from janus_server.types import Emit, FinishReason, HandedOver, Lent, Request, Sampling
from janus_server.wire.credits import WINDOW_ITEMS
from janus_server.wire.frames import Lend, Run

if TYPE_CHECKING:
    from janus_server.resident import Resident
    from janus_server.wire.link import Link

log = logging.getLogger("janus.cluster")

# A helper has so many times as long as the prompt is predicted to take here, and a second.
PATIENCE: Final = 4.0
LEAST_S: Final = 1.0


class _NotThere(Exception):
    """The helper cannot be of use, for that reason."""


class _Brought(NamedTuple):
    """What is here now: how many prompt tokens neither node had to compute."""

    cached_tokens: int


class _Waiting:
    """A request whose prompt is on its way, and the choices of it that nobody wants any more."""

    __slots__ = ("cancelled", "submit", "task")

    task: asyncio.Task[None]

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.cancelled: list[int] = []


class Prefills:
    """All requests of a node that wait for pages of another."""

    def __init__(
        self, residents: Mapping[str, Resident], arrivals: Arrivals, table: str, page_bytes: int, peering: Peering,
        link: Callable[[str], Link | None], work_s: Callable[[str, int], float],
    ) -> None:  # fmt: skip
        """table is the name of this node's kernels. link(node) is the link to it, work_s(model, tokens) predicts what a
        prompt takes."""
        self.counts = HandedOver()
        self._residents, self._arrivals = residents, arrivals
        self._table, self._page_bytes, self._peering = table, page_bytes, peering
        self._link, self._work_s = link, work_s
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def post(self, command: Submit | Cancel, helper: Helper | None = None) -> None:
        """Hand a request to the device thread, once its prompt is here as far as `helper` brings it; or end one."""
        if isinstance(command, Cancel):
            self._cancel(command)
        elif helper is None or not _can_be_split(command.request):
            self._device(command)
        else:
            self._arrivals.expect(command.request)
            waiting = self._waiting[command.request.id] = _Waiting(command)
            waiting.task = asyncio.create_task(self._go(waiting, helper))
            waiting.task.add_done_callback(_say_why)

    async def close(self) -> None:
        """What waits is not begun any more."""
        tasks = [waiting.task for waiting in self._waiting.values()]
        self._waiting = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, cancel: Cancel) -> None:
        waiting = self._waiting.get(cancel.request_id)
        if waiting is None:
            self._device(cancel)
        elif cancel.index is None:
            del self._waiting[cancel.request_id]
            waiting.task.cancel()
            self._arrivals.begun(waiting.submit.request)
        else:
            waiting.cancelled.append(cancel.index)

    def _device(self, command: Submit | Cancel) -> None:
        self._residents[command.model].flow.device.post(command)

    def _count(self, brought: int = 0, failed: int = 0, pages: int = 0, seconds: float = 0.0) -> None:
        so_far = self.counts
        self.counts = HandedOver(
            so_far.brought + brought, so_far.failed + failed, so_far.pages + pages, so_far.seconds + seconds
        )

    async def _go(self, waiting: _Waiting, helper: Helper) -> None:
        """However it goes, the request is begun; unless it is cancelled."""
        brought, start_s = None, time.monotonic()
        try:
            brought = await self._bring(waiting.submit, helper)
        finally:
            if self._waiting.get(waiting.submit.request.id) is waiting:
                self._begin(waiting, brought, time.monotonic() - start_s)

    def _begin(self, waiting: _Waiting, brought: _Brought | None, took_s: float) -> None:
        submit = waiting.submit
        del self._waiting[submit.request.id]
        if brought is not None:
            self._count(seconds=took_s)
            submit = msgspec.structs.replace(submit, cached=brought.cached_tokens)
        self._device(submit)
        self._arrivals.begun(submit.request)
        for index in waiting.cancelled:
            self._device(Cancel(submit.model, submit.request.id, index))

    async def _bring(self, submit: Submit, helper: Helper) -> _Brought | None:
        """Have the prompt's whole pages here; None where that did not work out, or there is nothing to bring."""
        request, resident = submit.request, self._residents[submit.model]
        # The last token is computed here in any case, and with it what its page lacks.
        tokens = min(helper.tokens, len(request.prompt) - 1)
        arrival = Arrival(request, tokens // resident.opened.kv.page_tokens)
        limit_s = LEAST_S + PATIENCE * self._work_s(submit.model, len(request.prompt))
        try:
            async with asyncio.timeout(limit_s):
                if not arrival.count or not await self._arrivals.look(arrival):
                    return None
                return await self._fetched(submit, helper.node, arrival)
        except TimeoutError:
            reason = f"not all of it was here within {limit_s:.1f} s"
        except (PeerTrouble, BadConfig, _NotThere) as trouble:
            reason = str(trouble)
        finally:
            await whole(self._arrivals.end(arrival))
        self._count(failed=1)
        log.info("%s: a prompt was to come from node %s and is computed here: %s", submit.model, helper.node, reason)
        return None

    async def _fetched(self, submit: Submit, helper: str, arrival: Arrival) -> _Brought:
        """Raises _NotThere, PeerTrouble."""
        opened = self._residents[submit.model].opened
        page_tokens, start_s = opened.kv.page_tokens, time.monotonic()
        last = await self._computed(submit, helper, arrival)
        lent = last.lent
        if last.finish is not FinishReason.LENGTH or lent is None:
            raise _NotThere("it was not computed")
        self._check(lent, arrival, kv_words(opened, self._table, self._page_bytes))
        if not await self._arrivals.reserve(arrival, lent.pages):
            raise _NotThere("there is no room for its pages")
        async with claiming(self._peering, helper, lent.grant, lent.pages * self._page_bytes) as pull:
            await self._fill(pull, arrival)
            await pull.confirm()
        if not await self._arrivals.take_in(arrival):
            raise _NotThere("what comes before it is gone")
        self._count(brought=1, pages=lent.pages)
        log.debug("%s: %d pages of a prompt came from node %s after %.3f s", submit.model, lent.pages, helper,
                  time.monotonic() - start_s)  # fmt: skip
        return _Brought(max(last.cached_tokens, arrival.first * page_tokens))

    async def _computed(self, submit: Submit, helper: str, arrival: Arrival) -> Emit:
        """How its prompt ended there."""
        link = self._link(helper)
        if link is None:
            raise _NotThere("it is not linked to")
        bare = _bare(submit.request, arrival.count * self._residents[submit.model].opened.kv.page_tokens)
        run = Run(
            stream=0, id=bare.id, call=bare.id, upto=WINDOW_ITEMS, request=bare,
            lend=Lend(arrival.first, self._peering.incarnation),
        )  # fmt: skip
        last = Emit(bare.id, 0)
        reading = link.asking.run(run, submit.arrived_s, None, lambda: None)
        try:
            while not reading.over:
                await reading.wait()
                for emit in reading.drain():
                    last = emit
        finally:
            if not reading.over:
                reading.cancel()
        if reading.broken is not None:
            raise _NotThere(reading.broken.sentence)
        return last

    def _check(self, lent: Lent, arrival: Arrival, words: str) -> None:
        """Before any page is taken for them: what is lent is what was asked for, and of use here."""
        if lent.layout != words:
            raise _NotThere("its pages are laid out in another way")
        if lent.first != arrival.first or not 1 <= lent.pages <= arrival.count - arrival.first:
            raise _NotThere("it lends other pages than were asked for")

    async def _fill(self, pull: Pull, arrival: Arrival) -> None:
        """On a thread; when this is cancelled, it ends at its next piece, and nothing is written afterwards."""
        stopped = False
        pace = Pace(lambda done: None, lambda: not stopped)

        def stop() -> None:
            nonlocal stopped
            stopped = True

        def work() -> None:
            self._arrivals.prepare(arrival, pace)
            pull.fill_parts(self._arrivals.parts(arrival), pace)

        try:
            await ended(asyncio.get_running_loop().run_in_executor(None, work), stop)
        except Stopped:
            raise _NotThere("it was stopped") from None


def _can_be_split(request: Request) -> bool:
    """Not one of which every row of the prompt is to be read, nor one that is such a part itself."""
    return request.prompt_logprobs is None and request.pooling is None and request.max_tokens > 0


def _bare(request: Request, tokens: int) -> Request:
    """The start of its prompt and nothing else, under a name of its own: the node may know the request by its own."""
    return Request(
        id=f"{request.id}+prompt", model=request.model, prompt=request.prompt[:tokens], max_tokens=0,
        sampling=Sampling(temperature=0.0), tenant=request.tenant, application=request.application,
        promise=request.promise, priority=request.priority,
    )  # fmt: skip


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the pages of a prompt could not be had from another node", exc_info=error)
