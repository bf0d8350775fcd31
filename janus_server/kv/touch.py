"""Touches memory ahead of its first use: KV pages below those in use, then what weights and host copies may need.

One background thread. The device thread tells it how far down the pool is in use, and those pages come at once: a step
would pay for them otherwise. The rest waits until the node rests, for as long as it takes: never beside a step or a
copy, never more than the catalogue can use at once, and never the last memory of the machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from janus_server.kv.touched import Touched

# Pages kept at hand below the lowest one in use: a burst of that many sequences starts without page faults.
_AHEAD_PAGES = 32
# The node has rested when nothing ran for so long: a client that sends one request after the other is not disturbed.
_REST_S = 0.25
_LOOK_EVERY_S = 0.05
# Left to others, in bytes: what is touched ahead of need may be needed by nobody.
_SPARE_BYTES = 1 << 30


class Ahead(msgspec.Struct, frozen=True):
    """What may be used at once by the whole catalogue: low pages for weights, chunks for host copies."""

    weight_pages: int
    host_chunks: int


class TouchAhead:
    """A thread that has memory provided by the system before anybody first writes it."""

    def __init__(self, pages: Touched, chunks: Touched, resting: Callable[[], bool]) -> None:
        """resting() is True while no request runs and no weights move; it is asked on the thread."""
        self._pages = pages
        self._chunks = chunks
        self._resting = resting
        self._wanted_from = pages.units
        self._touched_from = pages.units
        self._low, self._host = 0, 0
        self._ahead = Ahead(0, 0)
        self._changed = threading.Event()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="janus-touch", daemon=True)

    def start(self, ahead: Ahead) -> None:
        """Begin; `ahead` is what to have at hand once the node rests."""
        self._ahead = Ahead(min(ahead.weight_pages, self._pages.units), min(ahead.host_chunks, self._chunks.units))
        self._thread.start()

    def below(self, page: int) -> None:
        """Pages from `page` up are in use: have some more below it at hand. Any thread; cheap when nothing changed."""
        wanted = max(0, page - _AHEAD_PAGES)
        if wanted < self._wanted_from:
            self._wanted_from = wanted
            self._changed.set()

    @property
    def finished(self) -> bool:
        """True once there is nothing left to touch, as far as is known."""
        done = self._low >= self._ahead.weight_pages and self._host >= self._ahead.host_chunks
        return done and self._touched_from <= self._wanted_from

    def close(self) -> None:
        self._open = False
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        rested_s = time.monotonic()
        while self._open:
            self._touch_kv()
            if not self._resting():
                rested_s = time.monotonic()
            elif time.monotonic() - rested_s >= _REST_S and self._touch_next():
                continue
            self._changed.wait(None if self.finished else _LOOK_EVERY_S)
            self._changed.clear()

    def _touch_kv(self) -> None:
        while self._open and self._touched_from > self._wanted_from:
            self._touched_from -= 1
            self._pages.touch(self._touched_from)

    def _touch_next(self) -> bool:
        """Touch one more page or chunk; False when there is none, or no memory for it."""
        weights = self._low < self._ahead.weight_pages
        if not weights and self._host >= self._ahead.host_chunks:
            return False
        memory, unit = (self._pages, self._low) if weights else (self._chunks, self._host)
        if unit not in memory:
            if _available_bytes() < _SPARE_BYTES:
                self._ahead = Ahead(0, 0)  # whoever needs more has it provided when it does
                return False
            memory.touch(unit)
        if weights:
            self._low += 1
        else:
            self._host += 1
        return True


def _available_bytes() -> int:
    """What the system could give without taking it from others; plenty where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 1 << 62
