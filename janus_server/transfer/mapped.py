"""The way to a node of this host: its memory's descriptor comes over its socket, and its pages are mapped.

The source does nothing while it is read and may even die. `pull` opens it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from janus_server.errors import Bug
from janus_server.kv.move import Copy, Pace
from janus_server.kv.vmm_cpu import PeerMemory
from janus_server.transfer import plane
from janus_server.transfer.frames import ANSWER_MOST_BYTES, ANSWERS, Answer, Granted, Link, PeerTrouble, Question
from janus_server.transfer.rundir import Peering, RunDirectory


class Mapped:
    """A `plane.Way` through the run directory."""

    def __init__(self, link: Link, reply_s: float) -> None:
        self._link = link
        self._reply_s = reply_s
        self._handle: plane.Handle | None = None
        self._pieces: list[plane.Piece] = []
        self._region: PeerMemory | None = None

    @staticmethod
    def open(peering: Peering, source: str) -> Mapped:
        with RunDirectory(peering.run_dir) as directory:
            return Mapped(Link(directory.connect(source)), peering.reply_s)

    async def ask(self, question: Question) -> Answer:
        await self._link.send(question, self._reply_s)
        if self._handle is not None:
            return await self._link.receive(ANSWERS, ANSWER_MOST_BYTES, self._reply_s)
        answer, fd = await self._link.receive_with_fd(ANSWERS, ANSWER_MOST_BYTES, self._reply_s)
        self._handle = None if fd is None else plane.Handle(fd, 0)
        return answer

    async def tell(self, question: Question) -> None:
        await self._link.send(question, self._reply_s)

    def begin(self, granted: Granted, size_bytes: int) -> None:
        if self._handle is None:
            raise PeerTrouble("the peer handed over no memory")
        self._handle = self._handle._replace(size_bytes=granted.region_bytes)
        self._pieces = pieces_of(granted, size_bytes)

    def attach(self) -> None:
        if self._handle is None:
            raise Bug("pages are attached after they were granted")
        try:
            self._region = plane.attach(self._handle, self._pieces)
        except OSError:
            raise PeerTrouble("the peer's memory cannot be mapped") from None

    def copy(self, into: Sequence[np.ndarray], pace: Pace, copy: Copy, threads: int) -> None:
        if self._region is None:
            raise Bug("a peer's pages are attached before they are copied")
        plane.copy_from(self._region, self._pieces, into, pace, copy, threads)

    def detach(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None

    def gone(self) -> bool:
        return self._link.gone()

    def close(self) -> None:
        self.detach()
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        self._link.close()


def pieces_of(granted: Granted, size_bytes: int) -> list[plane.Piece]:
    """The runs of pages as pieces; of the last page only what is used."""
    pieces, at = [], 0
    for run in granted.runs:
        size = min(run.count * granted.page_bytes, size_bytes - at)
        pieces.append(plane.Piece(at, run.first * granted.page_bytes, size))
        at += size
    return pieces
