"""What one other process asks of this one, whichever connection carries it just now.

`listen` makes one for each process that proved itself and attaches it to connections as they come and go; a `Station`
is what the node has to say to what is asked. Streams outlive their connection for a while, then they are cancelled.
Lives on the loop; decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from janus_server.types import Emit
from janus_server.wire.credits import Outflow
from janus_server.wire.frames import (
    MOST_STREAMS,
    Ack,
    Ask,
    Broken,
    Cancel,
    Credit,
    Ended,
    Frame,
    Give,
    Heard,
    Outcome,
    Question,
    Replied,
    Reply,
    Resume,
    Run,
    Taken,
    Tell,
    Tokens,
    Told,
)
from janus_server.wire.handshake import Identity
from janus_server.wire.post import Intray, Judge
from janus_server.wire.sound import sound
from janus_server.wire.trouble import Trouble

if TYPE_CHECKING:
    from janus_server.wire.connection import Connection


class Station(Protocol):
    """What a node does with what it is asked. Called on the loop; none of these may wait."""

    def term(self) -> int:
        """The newest term that the coordinator told of."""

    def heard(self, peer: Identity, term: int, events: Sequence[Told]) -> None:
        """Events for the leader of that term, in the order they were told, each once."""

    def given(self, peer: Identity, give: Give, until_s: float) -> Outcome:
        """An order that is new and of the present term; to be begun before until_s (monotonic) or not at all."""

    def answer(self, peer: Identity, term: int, question: Question) -> Replied | None:
        """What there is to say to it; None where that is nothing."""

    def run(self, run: Run, answer: Answering) -> Trouble | None:
        """Run a request; its emits go to `answer`. Trouble where it cannot be run here."""

    def cancel(self, answer: Answering, index: int | None) -> None:
        """One choice, or with None the request, is not wanted any more. Nobody reads what it says afterwards."""


class Answering:
    """One request that runs here for another node: where its emits go."""

    def __init__(self, serving: Serving, run: Run) -> None:
        self.run = run
        self._serving = serving

    @property
    def peer(self) -> Identity:
        """Who asked."""
        return self._serving.peer

    def put(self, emit: Emit) -> None:
        """It is told in its turn; a reader that is too far behind ends the request, by `Station.cancel`."""
        self._serving.put(self, emit)

    def end(self) -> None:
        """That was all."""
        self._serving.finish(self)

    def fail(self, why: Trouble) -> None:
        """There will be no more, although it is not complete."""
        self._serving.fail(self, why)


class Serving:
    """Everything open between this process and one other, as the side that answers."""

    def __init__(self, peer: Identity, station: Station, resume_s: float) -> None:
        self.peer = peer
        self.control: Connection | None = None
        self.stream: Connection | None = None
        self._station = station
        self._resume_s = resume_s
        self._running: dict[int, Answering] = {}
        self._flow = Outflow()
        self._resumed = False
        self._intray = Intray()
        self._judge = Judge()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._running)

    # What the node answers

    def put(self, answer: Answering, emit: Emit) -> None:
        stream = answer.run.stream
        if self._running.get(stream) is answer:
            if not self._flow.put(stream, emit):
                self._stop(stream)
            self._wake()

    def finish(self, answer: Answering) -> None:
        if self._running.get(answer.run.stream) is answer:
            del self._running[answer.run.stream]
            self._flow.end(answer.run.stream)
            self._wake()

    def fail(self, answer: Answering, why: Trouble) -> None:
        if self._running.get(answer.run.stream) is answer:
            del self._running[answer.run.stream]
            self._flow.break_off(answer.run.stream, why)
            self._wake()

    # What connections bring

    def control_up(self, connection: Connection) -> None:
        self.control = connection

    def stream_up(self, connection: Connection) -> None:
        self.stream, self._resumed = connection, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def down(self, connection: Connection) -> None:
        if connection is self.control:
            self.control = None
        if connection is self.stream:
            self.stream, self._resumed = None, False
            self._timer = asyncio.get_running_loop().call_later(self._resume_s, self.drop)

    def drop(self) -> None:
        """The process is gone, or does not come back: nobody reads what runs for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flow = Outflow()
        for stream in list(self._running):
            self._stop(stream)

    def more(self) -> Iterable[Frame]:
        """What may be sent on the stream connection now: nothing before it is known where the reader stands."""
        frames: list[Tokens | Ended | Broken] = self._flow.take() if self._resumed else []
        return frames

    def nothing(self) -> Iterable[Frame]:
        """The control connection sends when it is asked to, and never by itself."""
        return ()

    def asked(self, connection: Connection, frame: Frame) -> Trouble | None:
        """What comes on the control connection."""
        match frame:
            case Tell(_, term, events):
                if self._intray.take(frame):
                    self._station.heard(self.peer, term, events)
                connection.send_first(Heard(self._intray.expected))
            case Give(term, id):
                connection.send_first(Ack(term, id, self._given(connection, frame)))
            case Ask(number, term, question):
                connection.send(Reply(number, self._station.answer(self.peer, term, question)))
        return None

    def streamed(self, connection: Connection, frame: Frame) -> Trouble | None:
        """What comes on the stream connection."""
        if self._resumed is isinstance(frame, Resume):  # the first frame, and never again
            return Trouble.GARBAGE
        match frame:
            case Resume(places):
                return self._resume(connection, frame)
            case Run():
                self._run(connection, frame)
            case Credit(places):
                for place in places:
                    if (trouble := self._flow.credit(place)) is not None:
                        return trouble
                connection.wake()
            case Cancel(stream, None):
                self._flow.forget(stream)
                self._stop(stream)
            case Cancel(stream, index) if stream in self._running:
                self._station.cancel(self._running[stream], index)
        return None

    def _given(self, connection: Connection, give: Give) -> Outcome:
        now = time.monotonic()
        sent_s = connection.pulse.sent_s(give.beat)
        until_s = None if sent_s is None else sent_s + give.valid_s
        outcome = self._judge.look(give, self._station.term(), until_s, now)
        if outcome is None and until_s is not None:
            outcome = self._station.given(self.peer, give, until_s)
            self._judge.note(give, outcome)
        return Outcome.STALE if outcome is None else outcome

    def _resume(self, connection: Connection, resume: Resume) -> Trouble | None:
        found = self._flow.resume(resume.places)
        if isinstance(found, Trouble):
            return found
        lacking, dropped = found
        self._resumed = True
        for stream in dropped:
            self._stop(stream)
        for place in resume.places:
            if place.stream in self._flow:
                connection.send(Taken(place.stream))
        for stream in lacking:
            connection.send(Broken(stream, Trouble.UNKNOWN))
        connection.wake()
        return None

    def _run(self, connection: Connection, run: Run) -> None:
        if run.stream not in self._flow:
            # A request under an id that runs already was given up by who asks for it anew.
            for stream, other in list(self._running.items()):
                if other.run.id == run.id:
                    self._flow.break_off(stream, Trouble.REPLACED)
                    self._stop(stream)
            if len(self._flow) >= MOST_STREAMS:
                connection.send(Broken(run.stream, Trouble.CROWDED))
                return
            self._flow.open(run.stream, run.upto)
            answer = self._running[run.stream] = Answering(self, run)
            trouble = self._station.run(run, answer) if sound(run) else Trouble.UNSOUND
            if trouble is not None:
                self.fail(answer, trouble)
                return
        connection.send(Taken(run.stream))

    def _stop(self, stream: int) -> None:
        answer = self._running.pop(stream, None)
        if answer is not None:
            self._station.cancel(answer, None)

    def _wake(self) -> None:
        if self.stream is not None:
            self.stream.wake()
