"""The side that reads: asks another node for one model's weights, or claims pages, and copies them into place.

`lifecycle` opens a pull for a FORK order, fills on a copy thread and confirms before it commits. Whatever is wrong with
the peer, its answer or its bytes is `PeerTrouble`; the target then holds anything, and the caller drops it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np

from janus_server.kv.blocks import pages_for
from janus_server.kv.move import Copy, Pace, Stopped, sampled_digest, sampled_digest_of
from janus_server.transfer.frames import (
    DENIALS,
    Ask,
    Check,
    Claim,
    Denial,
    Denied,
    Granted,
    PeerTrouble,
    Release,
    Valid,
)
from janus_server.transfer.mapped import Mapped
from janus_server.transfer.plane import Way
from janus_server.transfer.rundir import Peering
from janus_server.transfer.streamed import Streamed

T = TypeVar("T")

_OTHER_BYTES: Final = "the peer's bytes are not those that it announced"


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Weights as this node would hold them. digest is that of the bytes where they were here before, term that of the
    leader who wants them copied."""

    model: str
    layout: str
    checkpoint: str
    size_bytes: int
    digest: int | None
    term: int = 0


class Pull:
    """A grant being used: `attach`, `copy` and `verify`, or `fill_parts`, then `confirm`, each once."""

    def __init__(self, way: Way, granted: Granted, ends_s: float, peering: Peering) -> None:
        self.digest = granted.digest
        self._asked_bytes_per_s = granted.bytes_per_s
        self._way = way
        self._grant = granted.grant
        self._ends_s = ends_s
        self._peering = peering

    def fill_parts(self, parts: Sequence[np.ndarray], pace: Pace) -> None:
        """All three on a copy thread, for pages that are no window, given one by one: with the digest of
        `kv/move.sampled_digest_of`."""
        self.attach()
        self.copy(parts, pace)
        if sampled_digest_of(parts) != self.digest:
            raise PeerTrouble(_OTHER_BYTES)

    def attach(self) -> None:
        """Have the peer's pages at hand. On a copy thread."""
        self._way.attach()

    def detach(self) -> None:
        """Undo that. No copy may be under way."""
        self._way.detach()

    def copy(self, target: Sequence[np.ndarray], pace: Pace, copy: Copy = np.copyto, threads: int = 1) -> None:
        """Copy the peer's bytes over target, parts of flat uint8 of the wanted size, as `move` does. On a copy thread.
        Stops when the pace says so, the peer dies or stalls, or the grant's time is over."""
        watched = Pace(
            pace.on_bytes,
            lambda: pace.may_go() and self._trouble() is None,
            lambda: _slower(pace.bytes_per_s(), self._peering.bytes_per_s, self._asked_bytes_per_s),
        )
        try:
            self._way.copy(target, watched, copy, threads)
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
            raise PeerTrouble(_OTHER_BYTES)

    async def confirm(self) -> None:
        """Have the source say that the grant held until now, and release it."""
        trouble = self._trouble()
        if trouble is not None:
            raise PeerTrouble(trouble)
        _expect(await self._way.ask(Check(self._grant)), Valid)
        # It is over for this side: a source that cannot be told hears the socket close.
        with contextlib.suppress(PeerTrouble):
            await self._way.tell(Release(self._grant))

    def _trouble(self) -> str | None:
        if time.monotonic() >= self._ends_s:
            return DENIALS[Denial.NO_GRANT]
        return "the peer went away" if self._way.gone() else None


@contextlib.asynccontextmanager
async def pulling(peering: Peering, source: str, want: Want) -> AsyncIterator[Pull]:
    """A grant of the node `source` on what is wanted, for as long as this is open. PeerTrouble where there is none."""
    ask = Ask(peering.node, peering.incarnation, want.model, want.layout, want.checkpoint, want.size_bytes, want.term)
    async with _granted(peering, source, ask, want.size_bytes) as pull:
        if want.digest not in (None, pull.digest):
            raise PeerTrouble("the peer holds other weights than were here before")
        yield pull


@contextlib.asynccontextmanager
async def claiming(peering: Peering, source: str, grant: str, size_bytes: int) -> AsyncIterator[Pull]:
    """A grant that the node `source` has given to this process already (`Grants.issue`), on so many bytes."""
    claim = Claim(peering.node, peering.incarnation, grant)
    async with _granted(peering, source, claim, size_bytes) as pull:
        yield pull


@contextlib.asynccontextmanager
async def _granted(peering: Peering, source: str, ask: Ask | Claim, size_bytes: int) -> AsyncIterator[Pull]:
    way = await _way(peering, source)
    try:
        asked_s = time.monotonic()
        granted = _expect(await way.ask(ask), Granted)
        way.begin(granted, size_bytes)
        _check(granted, source, size_bytes)
        # Counted from before the question, the grant ends here before it ends there.
        yield Pull(way, granted, asked_s + granted.expires_in_s, peering)
    finally:
        way.close()


async def _way(peering: Peering, source: str) -> Way:
    """Through the run directory to a node of this host, which costs least; over TCP to all others that are known."""
    far = peering.others.far(source)
    if far is None:
        return Mapped.open(peering, source)
    if far.near:
        try:
            return Mapped.open(peering, source)
        except PeerTrouble as trouble:
            if not trouble.absent:  # it is of this host, but not of this run directory: in a container, say
                raise
    return await Streamed.open(far.dial, peering)


def _expect(answer: object, kind: type[T]) -> T:
    if isinstance(answer, Denied):
        raise PeerTrouble(DENIALS[answer.why])
    if not isinstance(answer, kind):
        raise PeerTrouble("the peer spoke out of turn")
    return answer


def _check(granted: Granted, source: str, size_bytes: int) -> None:
    """Before a byte moves: what was granted is whole and lies within the region."""
    if granted.node != source:
        raise PeerTrouble("the peer has another name")
    page, count = granted.page_bytes, sum(run.count for run in granted.runs)
    if page < 1 or count != pages_for(size_bytes, page):
        raise PeerTrouble("the peer granted other pages than were asked for")
    if any((run.first + run.count) * page > granted.region_bytes for run in granted.runs):
        raise PeerTrouble("the peer granted pages that it does not have")
    if not math.isfinite(granted.expires_in_s):
        raise PeerTrouble("the peer's grant has no end")
    if granted.bytes_per_s is not None and not 0 < granted.bytes_per_s < math.inf:
        raise PeerTrouble("the peer asks for a rate that is none")


def _slower(*rates: float | None) -> float | None:
    """The lowest of several rates; None is no limit."""
    given = [rate for rate in rates if rate is not None]
    return min(given, default=None)
