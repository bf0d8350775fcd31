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

from janus_server.transfer.frames import Ask, Denial

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
    """One peer's process may read these pages of one model in one layout until expires_s (monotonic)."""

    id: str
    peer: str
    incarnation: str
    model: str
    layout: str
    pages: tuple[int, ...]
    expires_s: float


class Given(NamedTuple):
    """A grant, and what it was given on."""

    grant: Grant
    offer: Offer


class Grants:
    """Every grant of a node by its id. Any thread."""

    def __init__(self) -> None:
        self._open: dict[str, Grant] = {}
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
            grant = Grant(
                id=secrets.token_hex(16),
                peer=ask.node,
                incarnation=ask.incarnation,
                model=ask.model,
                layout=offer.layout,
                pages=offer.pages,
                expires_s=time.monotonic() + lasts_s(offer.size_bytes),
            )
            self._open[grant.id] = grant
            return Given(grant, offer)

    def valid(self, grant: Grant) -> bool:
        """True while the pages are sure to hold what was granted."""
        with self._lock:
            return grant.id in self._open and time.monotonic() < grant.expires_s

    def release(self, grant: Grant) -> None:
        """The peer has read, or is gone. A second time does nothing."""
        with self._lock:
            self._open.pop(grant.id, None)

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
            self._open = {key: grant for key, grant in self._open.items() if grant.model != model}
            yield

    def _readers(self, model: str) -> list[Grant]:
        now = time.monotonic()
        return [grant for grant in self._open.values() if grant.model == model and now < grant.expires_s]
