"""The side that reads: asks a peer of this host for one model's weights and copies them into place.

`lifecycle` opens a pull for a FORK order, fills on a copy thread and confirms before it commits. Whatever is wrong with
the peer, its answer or its bytes is `PeerTrouble`; the target then holds anything, and the caller drops it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
import numpy as np

from janus_server.errors import Bug
from janus_server.kv.blocks import pages_for
from janus_server.kv.move import Copy, Pace, Stopped, sampled_digest
from janus_server.kv.vmm_cpu import PeerMemory
from janus_server.transfer import plane
from janus_server.transfer.frames import (
    ANSWER_MOST_BYTES,
    ANSWERS,
    Ask,
    Check,
    Denial,
    Denied,
    Granted,
    Link,
    PeerTrouble,
    Release,
    Valid,
)
from janus_server.transfer.rundir import Peering, RunDirectory

T = TypeVar("T")

_DENIALS: Final[Mapping[Denial, str]] = MappingProxyType(
    {
        Denial.NOT_HERE: "the peer does not hold it",
        Denial.GOING: "the peer is putting it away",
        Denial.OTHER_LAYOUT: "the peer holds it in another layout",
        Denial.OTHER_CHECKPOINT: "the peer holds another model of that name",
        Denial.NO_GRANT: "the peer's grant ended before the copy was whole",
    }
)


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Weights as this node would hold them. digest is that of the bytes where they were here before."""

    model: str
    layout: str
    checkpoint: str
    size_bytes: int
    digest: int | None


class Pull:
    """A grant being used: `fill`, or both its halves, then `confirm`, each once."""

    def __init__(
        self, link: Link, granted: Granted, handle: plane.Handle, want: Want, ends_s: float, peering: Peering
    ) -> None:
        self.digest = granted.digest
        self._asked_bytes_per_s = granted.bytes_per_s
        self._link = link
        self._grant = granted.grant
        self._handle = handle
        self._pieces = _pieces(granted, want.size_bytes)
        self._ends_s = ends_s
        self._peering = peering
        self._region: PeerMemory | None = None

    def fill(self, target: np.ndarray, pace: Pace) -> None:
        """`attach`, `copy`, `verify`."""
        self.attach()
        self.copy([target], pace)
        self.verify(target)

    def attach(self) -> None:
        """Map the peer's pages. On a copy thread."""
        try:
            self._region = plane.attach(self._handle, self._pieces)
        except OSError:
            raise PeerTrouble("the peer's memory cannot be mapped") from None

    def detach(self) -> None:
        """Unmap them, if they are mapped. No copy may be under way."""
        if self._region is not None:
            self._region.close()
            self._region = None

    def copy(self, target: Sequence[np.ndarray], pace: Pace, copy: Copy = np.copyto, threads: int = 1) -> None:
        """Copy the peer's bytes over target, parts of flat uint8 of the wanted size, as `move` does. On a copy thread.
        Stops when the pace says so, the peer dies or the grant's time is over."""
        watched = Pace(
            pace.on_bytes,
            lambda: pace.may_go() and self._trouble() is None,
            lambda: _slower(pace.bytes_per_s(), self._peering.bytes_per_s, self._asked_bytes_per_s),
        )
        if self._region is None:
            raise Bug("a peer's pages are attached before they are copied")
        try:
            plane.copy_from(self._region, self._pieces, target, watched, copy, threads)
        except Stopped:
            trouble = self._trouble()
            if trouble is not None:
                raise PeerTrouble(trouble) from None
            raise
        finally:
            self.detach()

    def verify(self, target: np.ndarray) -> None:
        """Check samples of what was copied."""
        if sampled_digest(target) != self.digest:
            raise PeerTrouble("the peer's bytes are not those that it announced")

    async def confirm(self) -> None:
        """Have the source say that the grant held until now, and release it."""
        trouble = self._trouble()
        if trouble is not None:
            raise PeerTrouble(trouble)
        await self._link.send(Check(self._grant), self._peering.reply_s)
        answer = await self._link.receive(ANSWERS, ANSWER_MOST_BYTES, self._peering.reply_s)
        _expect(answer, Valid)
        # It is over for this side: a source that cannot be told hears the socket close.
        with contextlib.suppress(PeerTrouble):
            await self._link.send(Release(self._grant), self._peering.reply_s)

    def _trouble(self) -> str | None:
        if time.monotonic() >= self._ends_s:
            return _DENIALS[Denial.NO_GRANT]
        return "the peer went away" if self._link.gone() else None


@contextlib.asynccontextmanager
async def pulling(peering: Peering, source: str, want: Want) -> AsyncIterator[Pull]:
    """A grant of the node `source` on what is wanted, for as long as this is open. PeerTrouble where there is none."""
    with RunDirectory(peering.run_dir) as directory:
        link = Link(directory.connect(source))
    try:
        asked_s = time.monotonic()
        ask = Ask(peering.node, peering.incarnation, want.model, want.layout, want.checkpoint, want.size_bytes)
        await link.send(ask, peering.reply_s)
        answer, fd = await link.receive_with_fd(ANSWERS, ANSWER_MOST_BYTES, peering.reply_s)
        with contextlib.ExitStack() as stack:
            handle = plane.Handle(-1 if fd is None else fd, 0)
            if fd is not None:
                stack.callback(handle.close)
            granted = _expect(answer, Granted)
            if fd is None:
                raise PeerTrouble("the peer handed over no memory")
            _check(granted, source, want)
            # Counted from before the question, the grant ends here before it ends there.
            ends_s = asked_s + granted.expires_in_s
            pull = Pull(link, granted, handle._replace(size_bytes=granted.region_bytes), want, ends_s, peering)
            stack.callback(pull.detach)
            yield pull
    finally:
        link.close()


def _expect(answer: object, kind: type[T]) -> T:
    if isinstance(answer, Denied):
        raise PeerTrouble(_DENIALS[answer.why])
    if not isinstance(answer, kind):
        raise PeerTrouble("the peer spoke out of turn")
    return answer


def _check(granted: Granted, source: str, want: Want) -> None:
    """Before a byte moves: what was granted is whole, lies within the region, and is what was here before."""
    if granted.node != source:
        raise PeerTrouble("the peer has another name")
    page, count = granted.page_bytes, sum(run.count for run in granted.runs)
    if page < 1 or count != pages_for(want.size_bytes, page):
        raise PeerTrouble("the peer granted other pages than were asked for")
    if any((run.first + run.count) * page > granted.region_bytes for run in granted.runs):
        raise PeerTrouble("the peer granted pages that it does not have")
    if not math.isfinite(granted.expires_in_s):
        raise PeerTrouble("the peer's grant has no end")
    if granted.bytes_per_s is not None and not 0 < granted.bytes_per_s < math.inf:
        raise PeerTrouble("the peer asks for a rate that is none")
    if want.digest not in (None, granted.digest):
        raise PeerTrouble("the peer holds other weights than were here before")


def _slower(*rates: float | None) -> float | None:
    """The lowest of several rates; None is no limit."""
    given = [rate for rate in rates if rate is not None]
    return min(given, default=None)


def _pieces(granted: Granted, size_bytes: int) -> list[plane.Piece]:
    """The runs of pages as pieces; of the last page only what is used."""
    pieces, at = [], 0
    for run in granted.runs:
        size = min(run.count * granted.page_bytes, size_bytes - at)
        pieces.append(plane.Piece(at, run.first * granted.page_bytes, size))
        at += size
    return pieces
