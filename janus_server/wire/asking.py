"""What one process asks of one other, whichever connection carries it just now: requests to run, events, orders.

`link` attaches it to connections as they come and go. A `Reading` is one stream: whoever reads it gets every emit once
and in order, however often the connection broke, or learns that it is lost. Lives on the loop; decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from janus_server.types import Emit
from janus_server.wire.credits import Inflow
from janus_server.wire.frames import (
    MOST_STREAMS,
    Ack,
    Broken,
    Cancel,
    Credit,
    Ended,
    Frame,
    Given,
    Heard,
    Item,
    Outcome,
    Question,
    Replied,
    Reply,
    Resume,
    Run,
    Taken,
    Tokens,
    Told,
)
from janus_server.wire.items import emit_of
from janus_server.wire.post import Orders, Outtray
from janus_server.wire.questions import Questions
from janus_server.wire.trouble import Trouble

if TYPE_CHECKING:
    from janus_server.wire.connection import Connection

Answered = Callable[[int, int, Outcome], None]

# A tenth of the shortest lease that an order could live by.
_AGAIN_S: Final = 0.1


class Reading:
    """One request that runs on another node, as the node sees it that asked for it."""

    def __init__(self, asking: Asking, run: Run, arrived_s: float, until_s: float | None, news: Callable[[], None]):
        """news() is called when something came: `drain` has it. Times are monotonic seconds."""
        self.run = run
        self.taken = False
        self.flow = Inflow(run.upto)
        self.count: int | None = None
        self.broken: Trouble | None = None
        self.cancelled: set[int] = set()
        self._asking = asking
        self._arrived_s = arrived_s
        self._until_s = until_s
        self._news = news
        self._emits: list[Emit] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Nothing more will come; what came may still be there to drain."""
        return self.broken is not None or self.count is not None

    @property
    def streamed(self) -> bool:
        """Something has come of it: it can go on elsewhere only from there."""
        return self.flow.have > 0

    def drain(self) -> list[Emit]:
        """What has come since the last time. Taking it is what lets more come."""
        emits, self._emits = self._emits, []
        if emits and self.flow.use(len(emits)) and not self.over:
            self._asking.grant(self)
        return emits

    async def wait(self) -> None:
        """Until there is something to drain, or nothing more will come. One at a time may wait."""
        while not self._emits and not self.over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def cancel(self, index: int | None = None) -> None:
        """One choice, or the whole request, is not wanted any more."""
        self._asking.cancel(self, index)

    def frame(self, now: float) -> Run | None:
        """The request as it is sent now; None when its time is over."""
        remaining_s = None if self._until_s is None else self._until_s - now
        if remaining_s is not None and remaining_s <= 0.0:
            return None
        age_s = max(0.0, now - self._arrived_s)
        return msgspec.structs.replace(self.run, age_s=age_s, remaining_s=remaining_s, upto=self.flow.upto)

    def take(self, item: Item) -> Trouble | None:
        new = self.flow.take(item.position)
        if isinstance(new, Trouble):
            return new
        if new:
            emit = emit_of(self.run.request.id, item)
            if emit is None or emit.index >= self.run.request.n:
                return Trouble.GARBAGE
            self._emits.append(emit)
            self._tell()
        return None

    def finish(self, count: int) -> Trouble | None:
        if count != self.flow.have:
            return Trouble.ORDER
        self.count = count
        self._tell()
        return None

    def fail(self, why: Trouble) -> None:
        if not self.over:
            self.broken = why
            self._tell()

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._news()


class Asking:
    """Everything open between this process and one other, as the side that asks."""

    def __init__(self, first: int, answered: Answered) -> None:
        """first is where its numbers begin; answered(term, id, outcome) is told what became of each order."""
        self._readings: dict[int, Reading] = {}
        self._next = first
        self._tray = Outtray(first)
        self._orders = Orders()
        self._questions = Questions(first)
        self._answered = answered
        self._control: Connection | None = None
        self._stream: Connection | None = None
        self._unsent: dict[int, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._readings)

    @property
    def quiet_s(self) -> float | None:
        """For how long the other has not beaten, on the quieter of both connections; None while one is not open."""
        if self._control is None or self._stream is None:
            return None
        return max(self._control.pulse.quiet_s, self._stream.pulse.quiet_s)

    # What the node asks

    def run(self, run: Run, arrived_s: float, until_s: float | None, news: Callable[[], None]) -> Reading:
        """Have a request run; its stream number is given here."""
        run = msgspec.structs.replace(run, stream=self._next)
        self._next += 1
        reading = Reading(self, run, arrived_s, until_s, news)
        if len(self._readings) >= MOST_STREAMS:
            reading.fail(Trouble.CROWDED)
            return reading
        self._readings[run.stream] = reading
        self._send_run(reading)
        return reading

    def tell(self, term: int, events: Sequence[Told]) -> bool:
        """False where the other has not heard for so long that nothing more is kept for it."""
        tell = self._tray.add(term, events)
        if tell is not None and self._control is not None:
            self._control.send(tell)
        return tell is not None

    def give(self, term: int, id: int, action: Given, valid_s: float) -> bool:
        """An order of this leader, repeated until it is answered or valid_s are over. id is unique in the term."""
        added = self._orders.add(term, id, action, time.monotonic() + valid_s)
        self._send_orders()
        self._look_again()
        return added

    async def ask(self, term: int, question: Question, limit_s: float) -> Replied | None:
        """The other's answer. None where it has none, or is not reached in that time; it is not asked again then."""
        return await self._questions.ask(self._control, term, question, limit_s)

    def forget_told(self) -> None:
        self._tray.drop()

    def grant(self, reading: Reading) -> None:
        if self._stream is not None:
            self._stream.send_first(Credit((reading.flow.place(reading.run.stream),)))

    def cancel(self, reading: Reading, index: int | None) -> None:
        if index is None:
            self._close(reading)
            reading.fail(Trouble.CLOSED)
            return
        if not reading.over and index not in reading.cancelled:
            reading.cancelled.add(index)
            if self._stream is not None and reading.run.stream not in self._unsent:
                self._stream.send(Cancel(reading.run.stream, index))

    def lost(self, why: Trouble) -> None:
        """The other process is gone, with all that ran there."""
        readings, self._readings = list(self._readings.values()), {}
        self._unsent.clear()
        for reading in readings:
            reading.fail(why)

    def close(self, why: Trouble) -> None:
        """Nothing is asked any more. Orders that are open may or may not be carried out."""
        self.lost(why)
        self._questions.drop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # What connections bring

    def control_up(self, connection: Connection) -> None:
        self._control = connection
        for tell in self._tray.unheard():
            connection.send(tell)
        self._orders.connected()
        self._send_orders()

    def stream_up(self, connection: Connection) -> None:
        """Requests that are not known to have been taken are sent when the other end says that it lacks them."""
        self._stream = connection
        self._unsent.clear()
        connection.send_first(Resume(tuple(one.flow.place(stream) for stream, one in self._readings.items())))
        for stream, reading in self._readings.items():
            for index in sorted(reading.cancelled):
                connection.send(Cancel(stream, index))

    def down(self, connection: Connection) -> None:
        if connection is self._control:
            self._control = None
            self._questions.drop()
        if connection is self._stream:
            self._stream = None

    def more(self) -> Iterable[Frame]:
        """The next request to send: packed only now, since a hundred long ones are as many megabytes."""
        while self._unsent:
            stream = next(iter(self._unsent))
            del self._unsent[stream]
            reading = self._readings[stream]
            frame = reading.frame(time.monotonic())
            if frame is not None:
                return [frame, *(Cancel(stream, index) for index in sorted(reading.cancelled))]
            del self._readings[stream]
            reading.fail(Trouble.TOO_LATE)
        return ()

    def nothing(self) -> Iterable[Frame]:
        """The control connection sends when it is told to, and never by itself."""
        return ()

    def heard(self, connection: Connection, frame: Frame) -> Trouble | None:
        """What comes on the control connection."""
        match frame:
            case Heard(number):
                return None if self._tray.heard(number) else Trouble.GARBAGE
            case Ack(term, id):
                outcome = self._orders.answered(frame)
                if outcome is not None:
                    self._answered(term, id, outcome)
            case Reply():
                return self._questions.take(frame)
        return None

    def streamed(self, connection: Connection, frame: Frame) -> Trouble | None:
        """What comes on the stream connection. Of streams that were left since, it is dropped."""
        match frame:
            case Tokens(items):
                return self._take(items)
            case Taken(stream) if stream in self._readings:
                self._readings[stream].taken = True
            case Ended(stream, count) if stream in self._readings:
                reading = self._readings[stream]
                trouble = reading.finish(count)
                self._close(reading)
                if trouble is not None:
                    reading.fail(trouble)
                return trouble
            case Broken(stream, why) if stream in self._readings:
                reading = self._readings[stream]
                if why is Trouble.UNKNOWN and not reading.taken:
                    self._send_run(reading)
                    return None
                self._close(reading)
                reading.fail(Trouble.LOST if why is Trouble.UNKNOWN else why)
        return None

    def _take(self, items: Iterable[Item]) -> Trouble | None:
        for item in items:
            reading = self._readings.get(item.stream)
            if reading is not None and (trouble := reading.take(item)) is not None:
                self._close(reading)
                reading.fail(trouble)
                return trouble
        return None

    def _send_run(self, reading: Reading) -> None:
        if self._stream is not None:
            self._unsent[reading.run.stream] = None
            self._stream.wake()

    def _close(self, reading: Reading) -> None:
        """It is over here; the other end may forget it."""
        stream = reading.run.stream
        if self._readings.pop(stream, None) is None or self._stream is None:
            return
        if stream in self._unsent:
            del self._unsent[stream]
        else:
            self._stream.send(Cancel(stream))

    def _look_again(self) -> None:
        """While orders are open: those whose time is over, and those that came too early the last time."""
        if self._timer is None and len(self._orders):
            self._timer = asyncio.get_running_loop().call_later(_AGAIN_S, self._again)

    def _again(self) -> None:
        self._timer = None
        for term, id in self._orders.expired(time.monotonic()):
            self._answered(term, id, Outcome.EXPIRED)
        self._send_orders()
        self._look_again()

    def _send_orders(self) -> None:
        if self._control is not None:
            for give in self._orders.due(time.monotonic(), self._control.pulse.heard):
                self._control.send(give)
