"""Moves weights between memories of one host: in pieces, counted, stoppable, paced, and checked by samples.

`lifecycle` calls it on a copy thread for wake, sleep and fork. numpy drops the interpreter lock for a piece, so the
loop and the device thread go on.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator

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


def move(target: np.ndarray, source: np.ndarray, pace: Pace) -> None:
    """Copy flat uint8 source over target of the same size. Raises Stopped between two pieces."""
    require(target.shape == source.shape, "a move has equal sizes")
    start_s = time.monotonic()
    for first, last in _pieces(len(source), PIECE_BYTES):
        if not pace.may_go():
            raise Stopped
        np.copyto(target[first:last], source[first:last])
        pace.on_bytes(last)
        if pace.bytes_per_s is not None:
            time.sleep(max(0.0, start_s + last / pace.bytes_per_s - time.monotonic()))


def sampled_digest(array: np.ndarray) -> int:
    """A checksum of 4 KiB of every MiB of a flat uint8 array, and of its end.

    Example: two arrays that differ in a whole page of 2 MiB have different digests but for one chance in 2³².
    """
    digest = zlib.crc32(len(array).to_bytes(8, "little"))
    for first in range(0, len(array), SAMPLE_EVERY_BYTES):
        digest = zlib.crc32(array[first : first + SAMPLE_BYTES], digest)
    return zlib.crc32(array[-SAMPLE_BYTES:], digest)


def full_digest(array: np.ndarray) -> int:
    """A checksum of every byte; about 1 GB/s."""
    digest = 0
    for first, last in _pieces(len(array), PIECE_BYTES):
        digest = zlib.crc32(array[first:last], digest)
    return digest


def _pieces(size: int, piece: int) -> Iterator[tuple[int, int]]:
    for first in range(0, size, piece):
        yield first, min(first + piece, size)
