"""Moves bytes between the memories of two processes of one host: the owner's pages are mapped and copied from.

`serving` registers the node's memory once and hands its handle to peers that hold a grant; `pull` reads through it on a
copy thread. The owner's process does nothing meanwhile and may even die: whether the bytes were right is what a grant
says, not this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from janus_server.kv.move import PIECE_BYTES, Pace, move
from janus_server.kv.vmm_cpu import CpuMemory, PeerMemory

# How long a paced pull may take to notice that it was stopped.
_PIECE_S = 0.05


class Handle(NamedTuple):
    """A region that may be read: a read-only descriptor of its memory, and how much of it."""

    fd: int
    size_bytes: int

    def close(self) -> None:
        os.close(self.fd)


class Piece(NamedTuple):
    """size_bytes from offset `source` of the region to offset `target` of what is filled."""

    target: int
    source: int
    size_bytes: int


def register(memory: CpuMemory) -> Handle:
    """Let a node's pages be read by whoever is given the handle."""
    return Handle(memory.read_only(), memory.n_pages * memory.page_bytes)


def pull(handle: Handle, pieces: Sequence[Piece], into: np.ndarray, pace: Pace) -> None:
    """Fill flat uint8 `into` from the region. Raises Stopped between two pieces, OSError for a region that is not safe
    to map. Nothing is written after it has returned or raised."""
    most = PIECE_BYTES if pace.bytes_per_s is None else min(PIECE_BYTES, max(4096, int(pace.bytes_per_s * _PIECE_S)))
    cut = [part for piece in pieces for part in _cut(piece, most)]
    region = PeerMemory(handle.fd, handle.size_bytes)
    try:
        move(
            [into[p.target : p.target + p.size_bytes] for p in cut],
            [region.slab[p.source : p.source + p.size_bytes] for p in cut],
            pace,
        )
    finally:
        region.close()


def _cut(piece: Piece, most: int) -> list[Piece]:
    return [
        Piece(piece.target + at, piece.source + at, min(most, piece.size_bytes - at))
        for at in range(0, piece.size_bytes, most)
    ]
