"""Pages of keys and values on their way here from another node: reserved, filled beside all steps, then cached.

`prefill` has them filled. While a page is written it belongs to no model: one that is put to sleep or torn down
meanwhile takes nothing from under the writer, and what has arrived goes to whatever serves the model then, or back to
the pool. Everything but `parts` and `prepare` is done on the device thread, which owns the pool; nothing is decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np

from janus_server.errors import require
from janus_server.executor import DeviceThread
from janus_server.kv.move import Pace
from janus_server.kv.vmm_cpu import runs
from janus_server.kv.xtensor import XTensor
from janus_server.sched.scarcity import Scarcity
from janus_server.threads import ended
from janus_server.types import Owner, PageKind, Request

T = TypeVar("T")

# No model: its name begins as none does.
ARRIVING: Final = Owner("(arriving)", PageKind.KV)


class Arrival:
    """The first `count` whole pages of one prompt. `first` of them are here already, `pages` are for those after them;
    whoever makes one ends it (`Arrivals.end`)."""

    __slots__ = ("count", "first", "pages", "request")

    def __init__(self, request: Request, count: int) -> None:
        self.request = request
        self.count = count
        self.first = 0
        self.pages: tuple[int, ...] = ()


class Arrivals:
    """All of a node."""

    def __init__(self, device: DeviceThread, scarcity: Scarcity, xtensor: XTensor) -> None:
        self._device, self._scarcity, self._xtensor = device, scarcity, xtensor

    def expect(self, request: Request) -> None:
        """It will run here: its model stays until it has begun, or is let go."""
        self._scarcity.awaited[request.id] = request.model

    def begun(self, request: Request) -> None:
        """It was handed to the device thread, which has it by the time that it hears of this; or nobody wants it."""
        self._device.ask(lambda: self._scarcity.awaited.pop(request.id, None))

    async def look(self, arrival: Arrival) -> bool:
        """True when some of its pages are not here, and could be kept if they were."""
        return await self._on_device(lambda: self._look(arrival))

    async def reserve(self, arrival: Arrival, count: int) -> bool:
        """True when it has that many pages now. Nobody is preempted for them."""
        return await self._on_device(lambda: self._reserve(arrival, count))

    def parts(self, arrival: Arrival) -> list[np.ndarray]:
        """Its pages as they may be written, one by one: flat uint8."""
        size = self._xtensor.page_bytes
        return [self._xtensor.slab[page * size : (page + 1) * size] for page in arrival.pages]

    def prepare(self, arrival: Arrival, pace: Pace) -> None:
        """Have the system provide those that were never used. On a copy thread."""
        self._xtensor.touched.prepare(runs(arrival.pages), pace)

    async def take_in(self, arrival: Arrival) -> bool:
        """They hold what they should: let the model's requests start from them. False where nothing serves it."""
        return await self._on_device(lambda: self._take_in(arrival))

    async def end(self, arrival: Arrival) -> None:
        """Give back whatever it has still. Nothing writes it any more."""
        if arrival.pages:
            await self._on_device(lambda: self._release(arrival))

    def _look(self, arrival: Arrival) -> bool:
        batcher, request = self._scarcity.batcher(arrival.request.model), arrival.request
        if batcher is None or not batcher.limits.prefix_caching:
            return False
        match = batcher.prefix.match(request.prompt, arrival.count * batcher.kv.page_tokens, request.tenant)
        arrival.first = len(match.pages)
        for page in reversed(match.held):
            batcher.kv.drop(page)
        return arrival.first < arrival.count

    def _reserve(self, arrival: Arrival, count: int) -> bool:
        """A page is left for each sequence that runs, as for a newcomer among them."""
        require(not arrival.pages, "an arrival has its pages once")
        batcher = self._scarcity.batcher(arrival.request.model)
        if batcher is None or not self._scarcity.evict(count + len(batcher.running), batcher.kv):
            return False
        pages = batcher.kv.take(count)
        if pages is None:
            return False
        batcher.kv.part(pages, ARRIVING)
        arrival.pages = pages
        self._scarcity.expecting += 1
        return True

    def _take_in(self, arrival: Arrival) -> bool:
        request, count = arrival.request, len(arrival.pages)
        batcher = self._scarcity.batcher(request.model)
        if batcher is None or batcher.kv.above_ceiling(count):
            self._release(arrival)
            return False
        kv, prefix = batcher.kv, batcher.prefix
        kv.adopt(arrival.pages, ARRIVING)
        pages, arrival.pages = arrival.pages, ()
        self._scarcity.expecting -= 1
        match = prefix.match(request.prompt, arrival.first * kv.page_tokens, request.tenant)
        known = len(match.pages) == arrival.first  # else those before them are gone, and they continue nothing
        held = [*match.held, *pages]
        if known:
            held = prefix.publish(request.prompt, held, request.tenant)
        for page in reversed(held):
            kv.drop(page)
        return known

    def _release(self, arrival: Arrival) -> None:
        pages, arrival.pages = arrival.pages, ()
        if pages:
            self._xtensor.pool.release(ARRIVING, pages)
            self._scarcity.expecting -= 1

    async def _on_device(self, work: Callable[[], T]) -> T:
        return await ended(asyncio.wrap_future(self._device.ask(work)))
