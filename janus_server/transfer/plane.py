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

from janus_server.kv.move import Copy, Pace, move
from janus_server.kv.vmm_cpu import CpuMemory, PeerMemory


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
    region = attach(handle, pieces)
    try:
        copy_from(region, pieces, [into[p.target : p.target + p.size_bytes] for p in pieces], pace)
    finally:
        region.close()


def attach(handle: Handle, pieces: Sequence[Piece]) -> PeerMemory:
    """The region, mapped, with the pieces' pages looked up: copying them meets no page fault. The caller closes it."""
    region = PeerMemory(handle.fd, handle.size_bytes)
    for piece in pieces:
        region.look_up(piece.source, piece.size_bytes)
    return region


def copy_from(
    region: PeerMemory,
    pieces: Sequence[Piece],
    into: Sequence[np.ndarray],
    pace: Pace,
    copy: Copy = np.copyto,
    threads: int = 1,
) -> None:
    """Fill `into`, parts of flat uint8, with the pieces of an attached region, in their order. Raises Stopped."""
    move(into, [region.slab[p.source : p.source + p.size_bytes] for p in pieces], pace, copy, threads)
