"""One request on one socket: an `Exchange` from its start to its outcome, and the `Connection` that carries it.

`load` makes both and is told what happens (Owner). The moment of an arrival is read first, before anything is parsed.
No scheduling here, and no judgement of what an answer means: that is `reading`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Protocol

from .reading import Reading
from .records import Outcome, Plan
from .wire import ResponseParser, WireFault


class Owner(Protocol):
    """What a connection tells the run that made it."""

    def now(self) -> float:
        """Seconds since the start of the run."""

    def reading(self) -> Reading: ...

    def arrived(self, tokens: int) -> None: ...

    def ticked(self, now_s: float) -> None:
        """The clock was read: send what has become due meanwhile."""

    def connect(self, exchange: Exchange) -> None: ...

    def finished(self, exchange: Exchange, outcome: Outcome) -> None: ...

    def free(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...


class Exchange:
    """One request from its start to its outcome, over one connection or, when an idle one had died, two."""

    __slots__ = ("_run", "connection", "held", "over", "payload", "plan", "reading", "reused", "sent_s", "start_s")

    def __init__(self, run: Owner, plan: Plan, payload: bytes, start_s: float, *, held: bool) -> None:
        self._run = run
        self.plan = plan
        self.payload = payload
        self.start_s = start_s
        self.held = held
        self.sent_s = start_s
        self.reading = run.reading()
        self.connection: Connection | None = None
        self.over = False
        self.reused = False

    def end(self, now_s: float) -> None:
        """The response has ended by its framing."""
        self.reading.end()
        self._finish(now_s)

    def give_up(self, reason: str, message: str, now_s: float) -> None:
        if self.over:
            return
        self.reading.cut(reason, message)
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.exchange = None
            connection.close()
        self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        self.over = True
        self.payload = b""
        reading = self.reading
        good_end_s = reading.finish_s if reading.failure is None else None
        outcome = Outcome(
            plan=self.plan,
            start_s=self.start_s,
            sent_s=self.sent_s,
            end_s=now_s if good_end_s is None else good_end_s,
            first_s=reading.first_s,
            last_s=reading.last_s,
            gaps_s=reading.gaps_s,
            carried=reading.carried,
            usage_prompt=reading.prompt_tokens,
            usage_completion=reading.completion_tokens,
            usage_cached=reading.cached_tokens,
            event_tokens=reading.event_tokens,
            finish=reading.finish,
            failure=reading.failure,
            detail=reading.detail,
            reused=self.reused,
            held=self.held,
            text=None if reading.texts is None else "".join(reading.texts),
        )
        self._run.finished(self, outcome)


class Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time."""

    def __init__(self, run: Owner) -> None:
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._fd = -1
        self._told_head = False
        self._got_bytes = False
        self.exchange: Exchange | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, exchange: Exchange, *, reused: bool) -> None:
        self.exchange = exchange
        exchange.connection = self
        exchange.reused = reused
        self._parser = ResponseParser()
        self._told_head = self._got_bytes = False
        self._write(exchange.payload)
        exchange.sent_s = self._run.now()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _write(self, payload: bytes) -> None:
        transport = self._transport
        if transport is None:
            return
        sent = 0
        if self._fd >= 0 and transport.get_write_buffer_size() == 0:
            # uvloop writes at the end of a turn of its loop, after all tokens that have arrived: too late for a send
            # that is due now. The descriptor does not block; what does not fit is left to the transport.
            with contextlib.suppress(OSError):
                sent = os.write(self._fd, payload)
        if sent < len(payload):
            transport.write(payload[sent:])

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        socket = transport.get_extra_info("socket")
        if socket is not None and transport.get_extra_info("sslcontext") is None:
            self._fd = socket.fileno()

    def data_received(self, data: bytes) -> None:
        now_s = self._run.now()
        exchange = self.exchange
        if exchange is None:
            # Bytes that nobody asked for: what follows could not be told apart from an answer.
            self.close()
            return
        self._got_bytes = True
        try:
            pieces = self._parser.feed(data)
            if not self._told_head and self._parser.has_head:
                self._told_head = True
                exchange.reading.head(self._parser.status, self._parser.headers.get("content-type", ""))
            for piece in pieces:
                self._run.arrived(exchange.reading.body(piece, now_s))
        except WireFault as fault:
            exchange.give_up(fault.reason, str(fault), now_s)
            return
        if self._parser.complete:
            self._answered(exchange, now_s)
        self._run.ticked(now_s)

    def eof_received(self) -> bool:
        self._ended(None)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._ended(error)
        self._run.lost(self)
        self._transport = None
        self._fd = -1

    def _answered(self, exchange: Exchange, now_s: float) -> None:
        self.exchange = exchange.connection = None
        if self._parser.keep_alive and not self._parser.rest and self.usable:
            # Before the outcome is told: a request that waits for it may go out over this very connection.
            self._run.free(self)
        else:
            self.close()
        exchange.end(now_s)

    def _ended(self, error: Exception | None) -> None:
        """No more bytes will come."""
        exchange = self.exchange
        if exchange is None:
            return
        now_s = self._run.now()
        if exchange.reused and not self._got_bytes:
            # The server closed an idle connection as the request went out: it has not seen it. Once more, on a new one.
            self.exchange = exchange.connection = None
            self._run.connect(exchange)
            return
        try:
            if error is not None:
                raise WireFault("closed", f"the connection broke ({error})")
            self._parser.eof()
        except WireFault as fault:
            exchange.give_up(fault.reason, str(fault), now_s)
            return
        self._answered(exchange, now_s)
