"""The way to a node of another host: its pages come over TCP, a piece at a time, on one line or several.

The next piece is asked for before the last has come, so that neither end waits for the other; while a pace is to be
kept it is one piece after the other on one line. Bytes go from the socket into the pages that they are for. `pull`
opens it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np

from janus_server.errors import Bug
from janus_server.kv.move import Clock, Copy, Pace, Stopped
from janus_server.threads import ended
from janus_server.transfer.frames import (
    ANSWER_MOST_BYTES,
    ANSWERS,
    ASK_MOST_BYTES,
    DENIALS,
    FETCH_MOST_BYTES,
    Answer,
    Denied,
    Fetch,
    Granted,
    PeerTrouble,
    Question,
    Sending,
)
from janus_server.transfer.line import Line
from janus_server.transfer.rundir import Peering

log = logging.getLogger("janus.transfer")

# Asked for at a time on one line, while there is no pace to keep.
_AHEAD: Final = 2
# A second line pays where its handshake, some milliseconds, is little beside the copy.
_SHARED_BYTES: Final = 64 << 20


class _Piece(NamedTuple):
    """So many bytes of the grant from `at` on, and what they are to fill."""

    at: int
    size_bytes: int
    into: tuple[memoryview, ...]


class Streamed:
    """A `plane.Way` over lines that dial(limit_s) opens."""

    def __init__(self, line: Line, dial: Callable[[float], Line], peering: Peering) -> None:
        self._line = line
        self._dial = dial
        self._peering = peering
        self._granted: Granted | None = None
        self._size_bytes = 0

    @staticmethod
    async def open(dial: Callable[[float], Line], peering: Peering) -> Streamed:
        dialling = asyncio.ensure_future(asyncio.to_thread(dial, peering.reply_s))
        try:
            return Streamed(await ended(dialling), dial, peering)
        except asyncio.CancelledError:
            if dialling.done() and not dialling.cancelled() and dialling.exception() is None:
                dialling.result().close()
            raise

    async def ask(self, question: Question) -> Answer:
        def exchange() -> Answer:
            self._line.send(question, self._peering.reply_s)
            return self._line.receive(ANSWERS, ANSWER_MOST_BYTES, self._peering.reply_s)

        return await ended(asyncio.ensure_future(asyncio.to_thread(exchange)), self._line.cut)

    async def tell(self, question: Question) -> None:
        work = asyncio.to_thread(self._line.send, question, self._peering.reply_s)
        await ended(asyncio.ensure_future(work), self._line.cut)

    def begin(self, granted: Granted, size_bytes: int) -> None:
        self._granted, self._size_bytes = granted, size_bytes

    def attach(self) -> None:
        """Nothing is at hand before it is sent."""

    def copy(self, into: Sequence[np.ndarray], pace: Pace, copy: Copy, threads: int) -> None:
        """Other threads copy from other lines as long as there is no pace to keep. `copy` is not used."""
        if self._granted is None:
            raise Bug("pages are copied after they were granted")
        run = _Run(self._granted.grant, into, pace, self._peering)
        more = min(self._peering.streams, self._size_bytes // _SHARED_BYTES) - 1
        if more < 1 or pace.bytes_per_s() is not None:
            run.go_on(self._line)
            return
        with ThreadPoolExecutor(more, "janus-stream") as helpers:
            helping = [helpers.submit(run.help, self._dial) for _ in range(more)]
            try:
                run.go_on(self._line)
            except BaseException as error:
                run.over = True
                if isinstance(error, Stopped) and run.trouble is not None:
                    raise run.trouble from None
                raise
        for one in helping:
            one.result()
        if run.trouble is not None:
            raise run.trouble

    def detach(self) -> None:
        """Nothing was attached."""

    def gone(self) -> bool:
        """It is noticed where it is read from."""
        return False

    def close(self) -> None:
        self._line.close()


class _Run:
    """One copy under way: the pieces that are left, and how much is done. The thread of the first line keeps the
    pace; trouble is what went wrong on another."""

    def __init__(self, grant: str, into: Sequence[np.ndarray], pace: Pace, peering: Peering) -> None:
        self.over = False
        self.trouble: PeerTrouble | None = None
        self._grant = grant
        self._pace = pace
        self._peering = peering
        self._clock = Clock(pace)
        self._pieces = _cut([part.data for part in into], self._clock.next_piece_bytes)
        self._done = 0
        self._lock = threading.Lock()

    def go_on(self, line: Line) -> None:
        asked: deque[_Piece] = deque()
        while True:
            ahead = _AHEAD if self._pace.bytes_per_s() is None else 1
            while len(asked) < ahead and (piece := self._ask(line)) is not None:
                asked.append(piece)
            if not asked:
                return
            self._receive(line, asked[0])
            self._clock.wait(asked.popleft().size_bytes)

    def help(self, dial: Callable[[float], Line]) -> None:
        """Take pieces as well, over a line of its own, until there are none or they are to be moved at a pace."""
        try:
            line = dial(self._peering.reply_s)
        except PeerTrouble as trouble:
            log.info("one line less to a peer: %s", trouble)
            return
        try:
            asked: deque[_Piece] = deque()
            while True:
                while len(asked) < _AHEAD and self._pace.bytes_per_s() is None:
                    if (piece := self._ask(line)) is None:
                        break
                    asked.append(piece)
                if not asked:
                    return
                self._receive(line, asked.popleft())
        except PeerTrouble as trouble:
            self.trouble, self.over = trouble, True
        finally:
            line.close()

    def _ask(self, line: Line) -> _Piece | None:
        """Have the next piece sent; None when there is none."""
        with self._lock:
            piece = next(self._pieces, None)
        if piece is None:
            return None
        if not self._may_go():
            raise Stopped
        line.send(Fetch(self._grant, piece.at, piece.size_bytes), self._peering.reply_s)
        return piece

    def _receive(self, line: Line, piece: _Piece) -> None:
        stall_s = self._peering.stall_s
        answer = line.receive(ANSWERS, ASK_MOST_BYTES, stall_s, self._may_go)
        if isinstance(answer, Denied):
            raise PeerTrouble(DENIALS[answer.why])
        if answer != Sending(piece.size_bytes):
            raise PeerTrouble("the peer spoke out of turn")
        for part in piece.into:
            line.receive_pages(part, stall_s, self._may_go)
        with self._lock:
            self._done += piece.size_bytes
            self._pace.on_bytes(self._done)

    def _may_go(self) -> bool:
        return not self.over and self._pace.may_go()


def _cut(parts: Sequence[memoryview], most: Callable[[], int]) -> Iterator[_Piece]:
    """The bytes that parts are to hold, in their order, as pieces of at most `most()` bytes, asked before each.

    Example: parts of 5 and 2 bytes, most 4: the pieces are 4 bytes of the first, then its last one and the second.
    """
    at = i = offset = 0
    while i < len(parts):
        room, into, size = min(most(), FETCH_MOST_BYTES), [], 0
        while i < len(parts) and size < room:
            take = min(len(parts[i]) - offset, room - size)
            if take:
                into.append(parts[i][offset : offset + take])
            size, offset = size + take, offset + take
            if offset == len(parts[i]):
                i, offset = i + 1, 0
        if size:
            yield _Piece(at, size, tuple(into))
        at += size
