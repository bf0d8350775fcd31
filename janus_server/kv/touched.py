"""What of a memory the system has provided already: the first touch of 2 MiB costs 1 to 7 ms, every later one nothing.

`xtensor` and `host` keep one each over their memory. `touch` works through it ahead of need, copy threads in bulk just
before they fill what nobody was in time for. Nothing here decides when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from janus_server.kv.move import Pace, Stopped

# So much is provided at a time where nothing is disturbed: how long a stop may take to be noticed.
_BULK_UNITS = 16
# Beside running streams: one, then a pause of so many times as long.
_PAUSE_SHARE = 4.0


class Touched:
    """A bitmap over the units (pages, chunks) of a memory. Any thread: two that touch the same unit do no harm."""

    def __init__(self, units: int, provide: Callable[[int, int], None]) -> None:
        """provide(first, count) makes the system give those units now, and keeps what is in them."""
        self.units = units
        self._provide = provide
        self._known = bytearray(units)

    def __contains__(self, unit: int) -> bool:
        return bool(self._known[unit])

    def missing(self, first: int, count: int) -> int:
        """How many of the units first … first+count-1 were never touched."""
        return count - self._known.count(1, first, first + count)

    def leave(self, first: int, count: int) -> None:
        """Never provide those units: nobody writes them."""
        self._known[first : first + count] = b"\x01" * count

    def touch(self, first: int, count: int = 1) -> None:
        """Have those units provided that are not yet."""
        for unit, size in self._gaps(first, count, count):
            self._touch(unit, size)

    def prepare(self, runs: Iterable[tuple[int, int]], pace: Pace) -> int:
        """Have every unit of the runs (first, count) provided before it is filled; how many were not yet.

        One by one with pauses while the pace has a limit: streams are served meanwhile. Raises Stopped.
        """
        fresh = 0
        for first, count in runs:
            for gap, size in self._gaps(first, count, _BULK_UNITS):
                fresh += size
                for unit in range(gap, gap + size):
                    if not pace.may_go():
                        raise Stopped
                    if pace.bytes_per_s() is None:
                        self._touch(unit, gap + size - unit)
                        break
                    start_s = time.monotonic()
                    self._touch(unit, 1)
                    time.sleep(_PAUSE_SHARE * (time.monotonic() - start_s))
        return fresh

    def _gaps(self, first: int, count: int, most: int) -> Iterator[tuple[int, int]]:
        """(first, count) of neighbouring units that were not touched, of at most `most`; each is touched before the
        next is asked for."""
        unit, end = first, first + count
        while (unit := self._known.find(0, unit, end)) >= 0:
            last = self._known.find(1, unit, end)
            size = min((last if last >= 0 else end) - unit, most)
            yield unit, size
            unit += size

    def _touch(self, first: int, count: int) -> None:
        self._provide(first, count)
        self._known[first : first + count] = b"\x01" * count
