"""Moves weights between memories of one host: in pieces, counted, stoppable, paced, and checked by samples.

`resident` calls it on a copy thread for wake, sleep and fork. Both sides are lists of flat uint8 arrays, which may be
cut differently: a window is one, pages and chunks are runs. The interpreter lock is dropped for a piece, so the loop
and the device thread go on.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from janus_server.errors import require

PIECE_BYTES = 8 << 20  # 1 ms at memory speed: how long a cancel or a pause may take to be noticed
# A paced move copies what is due in so long, then sleeps: each piece holds up a step by a small part of that.
PACED_PIECE_S = 0.002
_SMALLEST_BYTES = 4096
# A paced move that fell behind makes up for no more than this; it does not rush after a pause.
_CATCH_UP_S = 0.01
_NAP_S = 0.05
SAMPLE_BYTES = 4096
SAMPLE_EVERY_BYTES = 1 << 20  # a lost or swapped page of 2 MiB never goes unseen; 0.4 % of the bytes are read

Copy = Callable[[np.ndarray, np.ndarray], None]


class Stopped(Exception):
    """The move was cancelled, or its deadline passed; the target holds only part of the bytes."""


def unpaced() -> float | None:
    """As fast as memory goes."""
    return None


class Pace(msgspec.Struct, frozen=True):
    """How a move goes: on_bytes(done) after each piece, may_go() before it.

    bytes_per_s is asked before each piece, and may say another pace each time; None is full speed.
    """

    on_bytes: Callable[[int], None]
    may_go: Callable[[], bool]
    bytes_per_s: Callable[[], float | None] = unpaced


def move(
    target: Sequence[np.ndarray], source: Sequence[np.ndarray], pace: Pace, copy: Copy = np.copyto, threads: int = 1
) -> None:
    """Copy the bytes of source over those of target, equally many, by copy(to, from). Raises Stopped between pieces.

    `threads` share the pieces while there is no pace to keep: on two cores two copied 13 GB/s where one did 9.
    """
    require(sum(map(len, target)) == sum(map(len, source)), "a move has equal sizes")
    run = _Run(target, source, pace, copy)
    if threads == 1 or pace.bytes_per_s() is not None:
        run.go_on()
        return
    with ThreadPoolExecutor(threads - 1, "janus-copy") as helpers:
        helping = [helpers.submit(run.help) for _ in range(threads - 1)]
        try:
            run.go_on()
        except BaseException:
            run.over = True
            raise
    for one in helping:
        one.result()


class _Run:
    """One move under way: the pieces that are left, and how much is done. Its own thread keeps the pace."""

    def __init__(self, target: Sequence[np.ndarray], source: Sequence[np.ndarray], pace: Pace, copy: Copy) -> None:
        self.over = False
        self._pace = pace
        self._copy = copy
        self._clock = Clock(pace)
        self._pieces = paired(target, source, self._clock.next_piece_bytes)
        self._done = 0
        self._lock = threading.Lock()

    def go_on(self) -> None:
        while (moved_bytes := self._one()) is not None:
            self._clock.wait(moved_bytes)

    def help(self) -> None:
        """Take pieces as well, until there are none or they are to be moved at a pace."""
        while not self.over and self._pace.bytes_per_s() is None and self._one() is not None:
            pass

    def _one(self) -> int | None:
        """Move the next piece; None when there is none."""
        with self._lock:
            piece = next(self._pieces, None)
            if piece is None:
                return None
            if not self._pace.may_go():
                raise Stopped
        to, part = piece
        self._copy(to, part)
        with self._lock:
            self._done += len(part)
            self._pace.on_bytes(self._done)
        return len(part)


class Clock:
    """Keeps a move at its pace, piece by piece, as the pace changes."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._bytes_per_s: float | None = None
        self._due_s = time.monotonic()

    def next_piece_bytes(self) -> int:
        """At most so many bytes go next."""
        self._bytes_per_s = self._pace.bytes_per_s()
        if self._bytes_per_s is None:
            return PIECE_BYTES
        return min(PIECE_BYTES, max(_SMALLEST_BYTES, int(self._bytes_per_s * PACED_PIECE_S)))

    def wait(self, moved_bytes: int) -> None:
        """Sleep until the next piece is due; no longer once the move may go no further, or at another pace."""
        now = time.monotonic()
        if self._bytes_per_s is None:
            self._due_s = now
            return
        self._due_s = max(self._due_s, now - _CATCH_UP_S) + moved_bytes / self._bytes_per_s
        while (left_s := self._due_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _NAP_S))
            if not self._pace.may_go() or self._pace.bytes_per_s() != self._bytes_per_s:
                return


def paired(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray], most: Callable[[], int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Equal pieces of two lists of arrays, of at most `most()` bytes each, which is asked before each piece.

    Example: lists cut as 5 and as 2 + 3 bytes, most 4, give pieces of 2, 3 bytes.
    """
    i = j = at = bt = 0
    while i < len(first) and j < len(second):
        size = min(len(first[i]) - at, len(second[j]) - bt)
        if size:
            size = min(size, most())
            yield first[i][at : at + size], second[j][bt : bt + size]
        at, bt = at + size, bt + size
        if at == len(first[i]):
            i, at = i + 1, 0
        if bt == len(second[j]):
            j, bt = j + 1, 0


def sampled_digest(array: np.ndarray) -> int:
    """A checksum of 4 KiB of every MiB of a flat uint8 array, and of its end.

    Example: two arrays that differ in a whole page of 2 MiB have different digests but for one chance in 2³².
    """
    digest = zlib.crc32(len(array).to_bytes(8, "little"))
    for first in range(0, len(array), SAMPLE_EVERY_BYTES):
        digest = zlib.crc32(array[first : first + SAMPLE_BYTES], digest)
    return zlib.crc32(array[-SAMPLE_BYTES:], digest)


def sampled_digest_of(parts: Sequence[np.ndarray]) -> int:
    """The same over pages that are no window, given one by one: samples of every one of them, in their order."""
    digest = 0
    for part in parts:
        digest = zlib.crc32(sampled_digest(part).to_bytes(4, "little"), digest)
    return digest


def full_digest(parts: Sequence[np.ndarray]) -> int:
    """A checksum of every byte of a list of arrays, however it is cut; about 1 GB/s."""
    digest = 0
    for part in parts:
        for first in range(0, len(part), PIECE_BYTES):
            digest = zlib.crc32(part[first : first + PIECE_BYTES], digest)
    return digest
