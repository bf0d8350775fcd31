"""How bytes come out of another process's pages: one small interface, and the memory of one host behind it.

A `Way` is a connection to a source over which a grant is asked for and its pages are read. There are two: `mapped`
(same host: the source's memory is mapped and copied from; what that takes is here) and `streamed` (TCP, other hosts).
`pull` uses either alike and picks one. Whether bytes were right is what a grant says, not this.

For pages that are not a model's weights, KV pages of a prefix, say, the same plane is used like this. The source pins
them and calls `Grants.issue(peer, incarnation, model, Offer(..., digest=sampled_digest_of(pages)), lasts_s)`; the
grant's id travels in a message of the caller's own. The reader then does

    async with claiming(peering, source, grant_id, size_bytes) as pull:
        await to_a_copy_thread(lambda: pull.fill_parts([views of its own pages], pace))
        await pull.confirm()

The grant's pages, in the offer's order, are read as one range of size_bytes, page after page into the views. peer and
incarnation are those of the reader's `Peering`, which in a cluster are the member's name and process.
PeerTrouble at any point means that the views hold anything and that nothing more is written into them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from janus_server.kv.move import Copy, Pace, move
from janus_server.kv.vmm_cpu import CpuMemory, PeerMemory
from janus_server.transfer.frames import Answer, Granted, Question


class Way(Protocol):
    """A connection to one source. `attach`, `copy` and `detach` are called on a copy thread, one after the other; the
    rest on the loop. Everything raises PeerTrouble."""

    async def ask(self, question: Question) -> Answer: ...

    async def tell(self, question: Question) -> None:
        """What has no answer."""

    def begin(self, granted: Granted, size_bytes: int) -> None:
        """These pages will be read."""

    def attach(self) -> None:
        """Whatever a copy should not have to wait for."""

    def copy(self, into: Sequence[np.ndarray], pace: Pace, copy: Copy, threads: int) -> None:
        """Fill `into`, parts of flat uint8, with all that was granted. Raises Stopped. Nothing is written after it has
        returned or raised."""

    def detach(self) -> None:
        """Undo `attach`, if it was done. No copy may be under way."""

    def gone(self) -> bool:
        """True where the source is known to have left. Any thread, no waiting."""

    def close(self) -> None: ...


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


def attach(handle: Handle, pieces: Sequence[Piece]) -> PeerMemory:
    """The region, mapped, with the pieces' pages looked up: copying them meets no page fault. The caller closes it.
    OSError for a region that is not safe to map."""
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
    """Fill `into`, parts of flat uint8, with the pieces of an attached region, in their order. Raises Stopped
    between two pieces. Nothing is written after it has returned or raised."""
    move(into, [region.slab[p.source : p.source + p.size_bytes] for p in pieces], pace, copy, threads)
