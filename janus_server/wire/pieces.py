"""Cuts messages that are too long for one, and puts them together again, within bounds. Pure.

A connection carries one such message at a time; others go between its pieces, so that a prompt of megabytes holds up
nobody's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from janus_server.wire.frames import WHOLE_MOST_BYTES, Piece, write
from janus_server.wire.trouble import Trouble

# 64 KiB at 1 Gbit/s are 0.5 ms: what a token may have to wait for a long prompt.
PIECE_BYTES: Final = 64 << 10


def cut(message: bytes) -> Iterator[bytes]:
    """The messages that carry it: itself where it is short enough."""
    if len(message) <= PIECE_BYTES:
        yield message
        return
    for start in range(0, len(message), PIECE_BYTES):
        data = message[start : start + PIECE_BYTES]
        yield write(Piece(data, len(message) - start - len(data)))


class Assembly:
    """What has come so far of a message in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._left = 0

    def add(self, piece: Piece) -> bytes | Trouble | None:
        """The whole message once its last piece came; None before."""
        if not self._data:
            if len(piece.data) + piece.left > WHOLE_MOST_BYTES:
                return Trouble.TOO_LONG
        elif piece.left != self._left - len(piece.data):
            return Trouble.GARBAGE
        if not piece.data:
            return Trouble.GARBAGE
        self._data += piece.data
        self._left = piece.left
        if piece.left:
            return None
        whole, self._data = bytes(self._data), bytearray()
        return whole
