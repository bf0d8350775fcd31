"""Moves weights between memories of one host: in pieces, counted, stoppable, paced, and checked by samples.

`lifecycle` calls it on a copy thread for wake, sleep and fork. Both sides are lists of flat uint8 arrays, which may be
cut differently: a window is one, pages and chunks are runs. numpy drops the interpreter lock for a piece, so the loop
and the device thread go on.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from janus_server.errors import require

PIECE_BYTES = 8 << 20  # 1 ms at memory speed: how long a cancel or a pause may take to be noticed
SAMPLE_BYTES = 4096
SAMPLE_EVERY_BYTES = 1 << 20  # a lost or swapped page of 2 MiB never goes unseen; 0.4 % of the bytes are read


class Stopped(Exception):
    """The move was cancelled, or its deadline passed; the target holds only part of the bytes."""


class Pace(msgspec.Struct, frozen=True):
    """How a move goes: on_bytes(done) after each piece, may_go() before it, and at most bytes_per_s where not None."""

    on_bytes: Callable[[int], None]
    may_go: Callable[[], bool]
    bytes_per_s: float | None = None


def move(target: Sequence[np.ndarray], source: Sequence[np.ndarray], pace: Pace) -> None:
    """Copy the bytes of source over those of target, equally many. Raises Stopped between two pieces."""
    require(sum(map(len, target)) == sum(map(len, source)), "a move has equal sizes")
    start_s = time.monotonic()
    done = 0
    for to, part in paired(target, source, PIECE_BYTES):
        if not pace.may_go():
            raise Stopped
        np.copyto(to, part)
        done += len(part)
        pace.on_bytes(done)
        if pace.bytes_per_s is not None:
            time.sleep(max(0.0, start_s + done / pace.bytes_per_s - time.monotonic()))


def paired(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray], most: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Equal pieces of two lists of arrays, of at most `most` bytes each.

    Example: lists cut as 5 and as 2 + 3 bytes, most 4, give pieces of 2, 3 bytes.
    """
    i = j = at = bt = 0
    while i < len(first) and j < len(second):
        size = min(len(first[i]) - at, len(second[j]) - bt, most)
        if size:
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


def full_digest(parts: Sequence[np.ndarray]) -> int:
    """A checksum of every byte of a list of arrays, however it is cut; about 1 GB/s."""
    digest = 0
    for part in parts:
        for first in range(0, len(part), PIECE_BYTES):
            digest = zlib.crc32(part[first : first + PIECE_BYTES], digest)
    return digest
