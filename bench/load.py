"""The load itself: requests leave at their times over raw sockets, and each becomes one outcome.

`serve` makes a LoadRun and awaits `run`. Open loop: a request's time comes from its plan alone, never from an answer,
unless a concurrency limit holds it back. What is due is sent from wherever the clock is read, in the middle of a wave
of arriving tokens too, so that thousands of busy streams do not make sends late. No policy about figures lives here.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import gc
import math
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from .connection import Connection, Exchange
from .reading import ChunkDecoder, Reading
from .records import Outcome, Plan
from .target import Caller, Target

# Bodies made ahead of their time, so that making one never delays a send; bounded, since a prompt can be a megabyte.
_AHEAD: Final = 2048
_AHEAD_BYTES: Final = 32 << 20
# Sends in one go; then what has arrived is read before more leave.
_BURST: Final = 32
_SWEEP_S: Final = 0.25
_LAG_LOOK_S: Final = 0.02


@dataclasses.dataclass(slots=True)
class Counts:
    """What has happened so far; `tokens` are those seen in events. Read by the progress display."""

    sent: int = 0
    active: int = 0
    waiting: int = 0
    completed: int = 0
    failed: int = 0
    tokens: int = 0
    most_active: int = 0


class LoadRun:
    """One run over plans in order of time."""

    def __init__(
        self,
        target: Target,
        caller: Caller,
        plans: Sequence[Plan],
        *,
        max_concurrency: int | None = None,
        timeout_s: float = 600.0,
        keep_text: bool = False,
    ) -> None:
        self.counts = Counts()
        self.outcomes: list[Outcome] = []
        self.cpu_s = self.wall_s = 0.0
        self.lags_s = array("f")
        self._target = target
        self._caller = caller
        self._plans = plans
        self._limit = max_concurrency or len(plans) + 1
        self._timeout_s = timeout_s
        self._keep_text = keep_text
        self._decoder = ChunkDecoder()
        self._next = 0
        self._next_due_s = math.inf
        self._held = False
        self._ahead: deque[bytes] = deque()
        self._ahead_bytes = 0
        self._idle: list[Connection] = []
        self._active: dict[Exchange, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()

    async def run(self) -> list[Outcome]:
        """Send everything and wait for the last answer."""
        self._loop = asyncio.get_running_loop()
        while self._prepare():
            pass
        with _quiet_collector():
            cpu_s = time.process_time()
            self._started_s = time.perf_counter()
            self._pump(0.0)
            keepers = [asyncio.ensure_future(self._sweep()), asyncio.ensure_future(self._look())]
            try:
                if self._plans:
                    await self._over.wait()
            finally:
                for keeper in keepers:
                    keeper.cancel()
                self._close()
            self.cpu_s, self.wall_s = time.process_time() - cpu_s, self.now()
        return self.outcomes

    def stop(self) -> None:
        """Send nothing more, and give up what is under way: it counts as interrupted."""
        self._next = len(self._plans)
        self._next_due_s = math.inf
        for exchange in list(self._active):
            exchange.give_up("interrupted", "the run was stopped", self.now())
        self._check_over()

    def enough(self) -> None:
        """Send nothing more; what is under way goes on to its end."""
        self._next = len(self._plans)
        self._next_due_s = math.inf
        self._held = False
        self._check_over()

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._started_s

    # Sending

    def _pump(self, now_s: float) -> None:
        """Send what is due, and set the timer for what comes next."""
        left = _BURST
        while self._next < len(self._plans) and self._plans[self._next].due_s <= now_s:
            if self.counts.active >= self._limit:
                self._held = True
                self._next_due_s = math.inf
                return
            if left == 0:
                self._next_due_s = math.inf
                self._loop.call_soon(self._wake)
                return
            left -= 1
            self._launch(now_s)
            now_s = self.now()
        self._held = False
        if self._next == len(self._plans):
            self._next_due_s = math.inf
            return
        self._next_due_s = self._plans[self._next].due_s
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, self._next_due_s - now_s), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._pump(self.now())

    def _launch(self, now_s: float) -> None:
        if not self._ahead:
            self._prepare()
        payload = self._ahead.popleft()
        self._ahead_bytes -= len(payload)
        exchange = Exchange(self, self._plans[self._next], payload, now_s, held=self._held)
        self._next += 1
        self._active[exchange] = None
        self.counts.sent += 1
        self.counts.active += 1
        self.counts.most_active = max(self.counts.most_active, self.counts.active)
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.send(exchange, reused=True)
                break
        else:
            self.connect(exchange)
        self._loop.call_soon(self._prepare)

    def _prepare(self) -> bool:
        """Make the bytes of one request to come; False when enough are ready."""
        number = self._next + len(self._ahead)
        if number >= len(self._plans) or len(self._ahead) >= _AHEAD:
            return False
        if self._ahead_bytes >= _AHEAD_BYTES and self._ahead:
            return False
        payload = self._caller.encode(self._plans[number], number)
        self._ahead.append(payload)
        self._ahead_bytes += len(payload)
        return True

    def connect(self, exchange: Exchange) -> None:
        """Send over a new connection."""
        task = self._loop.create_task(self._connect(exchange))
        # The loop keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, exchange: Exchange) -> None:
        target = self._target
        try:
            _, connection = await self._loop.create_connection(
                lambda: Connection(self),
                target.address,
                target.port,
                ssl=target.tls,
                server_hostname=target.host if target.tls else None,
            )
        except OSError as error:
            exchange.give_up("connect", f"{type(error).__name__}: {error.strerror or error}", self.now())
            return
        if exchange.over:
            connection.close()
        else:
            connection.send(exchange, reused=False)

    # What connections report (connection.Owner)

    def arrived(self, tokens: int) -> None:
        self.counts.tokens += tokens

    def ticked(self, now_s: float) -> None:
        """The clock was read: send what has become due meanwhile."""
        if now_s >= self._next_due_s:
            self._pump(now_s)

    def finished(self, exchange: Exchange, outcome: Outcome) -> None:
        del self._active[exchange]
        self.outcomes.append(outcome)
        self.counts.active -= 1
        if outcome.ok:
            self.counts.completed += 1
        else:
            self.counts.failed += 1
        if self._held:
            self._pump(self.now())
        self._check_over()

    def free(self, connection: Connection) -> None:
        """An answer has ended and its connection can carry another request."""
        self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def reading(self) -> Reading:
        return Reading(self._decoder, wants_text=self._keep_text)

    # Housekeeping

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = self.now()
            self.counts.waiting = self._waiting(now_s)
            for exchange in list(self._active):
                if now_s - exchange.start_s > self._timeout_s:
                    exchange.give_up("timeout", f"no end within {self._timeout_s:g} s", now_s)
            # The collector is off; what connections leave behind is young and cheap to find.
            gc.collect(0)

    async def _look(self) -> None:
        """Note how late the loop wakes: the bound on how late an arrival may have been read."""
        while True:
            before_s = self.now()
            await asyncio.sleep(_LAG_LOOK_S)
            self.lags_s.append(max(0.0, self.now() - before_s - _LAG_LOOK_S))

    def _waiting(self, now_s: float) -> int:
        """Requests that are due and held back by the concurrency limit."""
        if not self._held:
            return 0
        return bisect.bisect_right(self._plans, now_s, lo=self._next, key=lambda plan: plan.due_s) - self._next

    def _check_over(self) -> None:
        if self._next == len(self._plans) and not self._active:
            self._over.set()

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        for connection in list(self._idle):
            connection.close()


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """A full collection stops everything for tens of milliseconds once there are many plans and outcomes."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
