"""Streams of tokens over one connection, so that one slow reader blocks nobody and a broken connection loses nothing.

Items of a stream are numbered. The reading side says up to which it may be sent (its credit) and up to which it has
them; the sending side keeps the others, so that a new connection can go on at any of them. What waits for credit is
bounded: a stream that outgrows it ends, the others go on. Pure: `serving` and `asking` call it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from janus_server.types import Emit
from janus_server.wire.frames import Broken, Ended, Item, Place, Tokens
from janus_server.wire.items import items_of, size_bytes
from janus_server.wire.trouble import Trouble

# At 100 tokens a second, a reader that is 5 s away is not slowed down.
WINDOW_ITEMS: Final = 512
# What a stream may be ahead of its credit: 40 s of a fast one. A reader further behind has stopped reading.
AHEAD_ITEMS: Final = 4096
# The log probabilities of a long prompt, all at once: 100,000 tokens with 20 of the likeliest take 37 MB.
STREAM_MOST_BYTES: Final = 64 << 20
# Of one stream before it is another one's turn, and of one frame.
_TURN_ITEMS: Final = 64
FRAME_BYTES: Final = 48 << 10


class _Out:
    """One stream as its sender has it: items base … base+len-1 are kept, those before `sent` were sent."""

    __slots__ = ("base", "broken", "ended", "items", "listed", "sent", "size_bytes", "told", "upto")

    def __init__(self, upto: int) -> None:
        self.items: deque[Item] = deque()
        self.base = 0
        self.sent = 0
        self.upto = upto
        self.size_bytes = 0
        self.ended = False
        self.broken: Trouble | None = None
        self.told = False  # of its end
        self.listed = False

    @property
    def count(self) -> int:
        return self.base + len(self.items)

    @property
    def ready(self) -> bool:
        """There is something that may be sent."""
        if self.broken is not None or (self.ended and self.sent == self.count):
            return not self.told
        return self.sent < min(self.count, self.upto)

    def forget(self, have: int) -> None:
        while self.base < have and self.items:
            self.size_bytes -= size_bytes(self.items.popleft())
            self.base += 1


class Outflow:
    """All streams that one process has open with this one, as their sender has them."""

    def __init__(self) -> None:
        self._streams: dict[int, _Out] = {}
        self._ready: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream: int) -> bool:
        return stream in self._streams

    def open(self, stream: int, upto: int) -> None:
        self._streams[stream] = _Out(upto)

    def put(self, stream: int, emit: Emit) -> bool:
        """Take what is to be sent. False when the stream has just ended by it: it was too far ahead of its reader."""
        out = self._streams.get(stream)
        if out is None or out.ended or out.broken is not None:
            return True
        for item in items_of(stream, out.count, emit):
            out.items.append(item)
            out.size_bytes += size_bytes(item)
        if out.count - out.upto > AHEAD_ITEMS or out.size_bytes > STREAM_MOST_BYTES:
            self.break_off(stream, Trouble.SLOW)
            return False
        self._list(stream, out)
        return True

    def end(self, stream: int) -> None:
        """There will be no more items."""
        out = self._streams.get(stream)
        if out is not None:
            out.ended = True
            self._list(stream, out)

    def break_off(self, stream: int, why: Trouble) -> None:
        """It ends here; what was not sent is dropped. One that has ended already has all its items, and keeps them."""
        out = self._streams.get(stream)
        if out is not None and not out.ended and out.broken is None:
            out.broken = why
            out.items.clear()
            self._list(stream, out)

    def forget(self, stream: int) -> None:
        self._streams.pop(stream, None)

    def credit(self, place: Place) -> Trouble | None:
        """The reader has more, and may be sent more; never less than it said before. Trouble where it cannot be."""
        out = self._streams.get(place.stream)
        if out is None or out.broken is not None:
            return None
        if place.have > out.sent:
            return Trouble.ORDER
        out.upto = max(out.upto, place.upto)
        out.forget(place.have)
        self._list(place.stream, out)
        return None

    def resume(self, places: Iterable[Place]) -> tuple[list[int], list[int]] | Trouble:
        """Go on where the reader says, on a new connection: streams that are not here, and those that it forgot.

        The latter are forgotten here too.
        """
        named = {place.stream: place for place in places}
        self._ready.clear()
        for stream, place in named.items():
            out = self._streams.get(stream)
            if out is None:
                continue
            if out.broken is None and not out.base <= place.have <= out.sent:
                return Trouble.ORDER
            out.forget(place.have)
            out.sent, out.upto, out.told, out.listed = max(place.have, out.base), place.upto, False, False
            self._list(stream, out)
        dropped = [stream for stream in self._streams if stream not in named]
        for stream in dropped:
            del self._streams[stream]
        return [stream for stream in named if stream not in self._streams], dropped

    def take(self) -> list[Tokens | Ended | Broken]:
        """What is to be sent next: at most one frame's worth of items, of all streams in turn; and ends."""
        items: list[Item] = []
        ends: list[Tokens | Ended | Broken] = []
        room_bytes = FRAME_BYTES
        while self._ready and room_bytes > 0:
            stream = self._ready.popleft()
            out = self._streams.get(stream)
            if out is None:
                continue
            out.listed = False
            for item in _turn(out):
                items.append(item)
                room_bytes -= size_bytes(item)
                if room_bytes <= 0:
                    break
            if out.broken is not None and not out.told:
                out.told = True
                ends.append(Broken(stream, out.broken))
            elif out.ended and out.sent == out.count and not out.told:
                out.told = True
                ends.append(Ended(stream, out.count))
            self._list(stream, out)
        return [Tokens(tuple(items)), *ends] if items else ends

    def _list(self, stream: int, out: _Out) -> None:
        if not out.listed and out.ready:
            out.listed = True
            self._ready.append(stream)


def _turn(out: _Out) -> Iterator[Item]:
    """What a stream sends in its turn; it counts as sent when it is taken from here."""
    for _ in range(min(_TURN_ITEMS, min(out.count, out.upto) - out.sent)):
        out.sent += 1
        yield out.items[out.sent - 1 - out.base]


class Inflow:
    """One stream as its reader has it: items before `have` came, `used` of them were taken."""

    __slots__ = ("_window", "have", "upto", "used")

    def __init__(self, window: int = WINDOW_ITEMS) -> None:
        self._window = window
        self.have = 0
        self.used = 0
        self.upto = window

    def take(self, position: int) -> bool | Trouble:
        """An item came: True when it is the next one, False when it was here before."""
        if position < self.have:
            return False
        if position > self.have:
            return Trouble.ORDER
        if position >= self.upto:
            return Trouble.CREDIT
        self.have += 1
        return True

    def use(self, count: int) -> bool:
        """So many items were taken by whoever reads. True when it is time to say so to the sender."""
        self.used += count
        if self.used + self._window - self.upto < max(1, self._window // 2):
            return False
        self.upto = self.used + self._window
        return True

    def place(self, stream: int) -> Place:
        return Place(stream, self.have, self.upto)
