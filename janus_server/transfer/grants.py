"""Who may read which model's pages just now, on the side that is read. Counts and decides nothing else.

`serving` opens and releases grants on the loop; `lifecycle` bars a model before its pages go, and the device thread
takes grants back when an instance is torn down: those two threads meet here, so a lock is held. A grant that was not
released ends by its time.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from janus_server.transfer.frames import Ask, Claim, Denial

BEING_READ = "it is being read by a peer"


class BeingRead(Exception):
    """Pages that a peer is reading stay where they are; nothing was changed."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that lie on the device: what they are, and in which pages, in the window's order."""

    layout: str
    checkpoint: str
    size_bytes: int
    pages: tuple[int, ...]
    digest: int


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """One peer's process may read size_bytes of these pages of one model in one layout until expires_s (monotonic).

    term is that of the leader who had it given; 0 where nobody was elected.
    """

    id: str
    peer: str
    incarnation: str
    model: str
    layout: str
    pages: tuple[int, ...]
    size_bytes: int
    expires_s: float
    term: int = 0


def _always() -> bool:
    """Weights stay where they are until the model is barred, or its grants are revoked."""
    return True


def _nothing() -> None:
    """Nobody holds anything for it."""


class Given(NamedTuple):
    """A grant, and what it was given on. still() is False once a page was given to others; ended() is told when the
    grant is released. Any thread."""

    grant: Grant
    offer: Offer
    still: Callable[[], bool] = _always
    ended: Callable[[], None] = _nothing


class Grants:
    """Every grant of a node by its id. Any thread."""

    def __init__(self) -> None:
        self._open: dict[str, Given] = {}
        self._barred: set[str] = set()
        self._lock = threading.Lock()

    def give(self, ask: Ask, offers: Callable[[str], Offer | None], lasts_s: Callable[[int], float]) -> Given | Denial:
        """A grant on what offers(model) says now; lasts_s gives its time by the bytes to be read."""
        with self._lock:
            if ask.model in self._barred:
                return Denial.GOING
            offer = offers(ask.model)
            if offer is None:
                return Denial.NOT_HERE
            if (offer.layout, offer.size_bytes) != (ask.layout, ask.size_bytes):
                return Denial.OTHER_LAYOUT
            if offer.checkpoint != ask.checkpoint:
                return Denial.OTHER_CHECKPOINT
            return self._given(ask.node, ask.incarnation, ask.model, offer, lasts_s(offer.size_bytes), ask.term)

    def issue(
        self, peer: str, incarnation: str, model: str, offer: Offer, lasts_s: float, term: int = 0,
        still: Callable[[], bool] = _always, ended: Callable[[], None] = _nothing,
    ) -> Grant | Denial:  # fmt: skip
        """A grant on pages of a model that are not its weights. The peer is told the id in some other way, and comes
        for them with a Claim. Whoever gives it keeps the pages as they are until its time is over or ended() is told;
        where they have to go earlier, still() is False before they do."""
        with self._lock:
            if model in self._barred:
                return Denial.GOING
            now = time.monotonic()  # of those that nobody came for, nobody is there to release them
            self._open = {key: given for key, given in self._open.items() if now < given.grant.expires_s}
            return self._given(peer, incarnation, model, offer, lasts_s, term, still, ended).grant

    def claim(self, claim: Claim) -> Given | Denial:
        """The grant of that id, where it is that process's."""
        return self.of(claim.grant, claim.node, claim.incarnation)

    def of(self, id: str, peer: str, incarnation: str) -> Given | Denial:
        """The grant of that id, where that process may use it now."""
        with self._lock:
            given = self._open.get(id)
            if given is None or time.monotonic() >= given.grant.expires_s or not given.still():
                return Denial.NO_GRANT
            mine = (given.grant.peer, given.grant.incarnation) == (peer, incarnation)
            return given if mine else Denial.NO_GRANT

    def valid(self, grant: Grant) -> bool:
        """True while the pages are sure to hold what was granted."""
        with self._lock:
            given = self._open.get(grant.id)
            return given is not None and time.monotonic() < grant.expires_s and given.still()

    def release(self, grant: Grant) -> None:
        """The peer has read, or is gone. A second time does nothing."""
        with self._lock:
            given = self._open.pop(grant.id, None)
        if given is not None:
            given.ended()

    def readers(self, model: str) -> list[Grant]:
        """Grants of a model that are valid now."""
        with self._lock:
            return self._readers(model)

    @contextlib.contextmanager
    def barred(self, model: str) -> Iterator[None]:
        """No peer reads the model while this is open. Raises BeingRead where one does already."""
        with self._lock:
            if self._readers(model):
                raise BeingRead(BEING_READ)
            self._barred.add(model)
        try:
            yield
        finally:
            with self._lock:
                self._barred.discard(model)

    @contextlib.contextmanager
    def revoked(self, model: str) -> Iterator[None]:
        """The model's pages go at once, whoever reads them: no grant on them outlives this, none is given meanwhile."""
        with self._lock:
            self._open = {key: given for key, given in self._open.items() if given.grant.model != model}
            yield

    def _readers(self, model: str) -> list[Grant]:
        now = time.monotonic()
        grants = (given.grant for given in self._open.values())
        return [grant for grant in grants if grant.model == model and now < grant.expires_s]

    def _given(
        self, peer: str, incarnation: str, model: str, offer: Offer, lasts_s: float, term: int,
        still: Callable[[], bool] = _always, ended: Callable[[], None] = _nothing,
    ) -> Given:  # fmt: skip
        grant = Grant(
            id=secrets.token_hex(16), peer=peer, incarnation=incarnation, model=model, layout=offer.layout,
            pages=offer.pages, size_bytes=offer.size_bytes, expires_s=time.monotonic() + lasts_s, term=term,
        )  # fmt: skip
        given = self._open[grant.id] = Given(grant, offer, still, ended)
        return given
