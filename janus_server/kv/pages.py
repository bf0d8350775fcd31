"""The pool of physical pages: which page belongs to whom. Pure arithmetic; the bytes live in kv/xtensor.

Weights take the lowest free ids, KV and scratch the highest, so the border between them moves with the load (the
published system's two-ended allocation). Allocation is all or nothing: a `Reservation` holds real page ids and is
either committed to its owner or cancelled. One thread owns a pool; nothing here locks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from janus_server.errors import require
from janus_server.types import Owner


class Reservation:
    """Pages taken out of the pool for an owner, not yet in use. Ends by exactly one of `commit` and `cancel`."""

    def __init__(self, pool: PagePool, owner: Owner, pages: tuple[int, ...]) -> None:
        self.owner = owner
        self.pages = pages
        self._pool = pool
        self._open = True

    def commit(self) -> tuple[int, ...]:
        """The pages are the owner's from now on; the owner returns them with `PagePool.release`."""
        self._close()
        return self.pages

    def cancel(self) -> None:
        """Give every page back, as if nothing had been reserved."""
        self._close()
        self._pool.release(self.owner, self.pages)

    def _close(self) -> None:
        require(self._open, "a reservation ends once")
        self._open = False


class PagePool:
    """Which of `n_pages` physical pages are free and how many each owner holds.

    Example: a pool of 8 pages; weights reserve 3 → (0, 1, 2); KV reserves 2 → (7, 6); free_pages == 3.

    Taking n pages costs O(n log pages). Each heap holds every free page, and pages taken at the other end since, which
    are dropped when met; a page stands at most once in each, so heaps never outgrow the pool.
    """

    def __init__(self, n_pages: int) -> None:
        require(n_pages > 0, "a pool has at least one page")
        self.n_pages = n_pages
        self.free_pages = n_pages
        # The lowest id that was ever taken from the high end: pages from here up have been in use, or soon will be.
        self.high_mark = n_pages
        # Grows whenever a page came back, or can be given up now and could not before: while it stands, whoever found
        # no room need not look again.
        self.eased = 0
        self._owners: list[Owner | None] = [None] * n_pages
        self._held: dict[Owner, int] = {}
        self._low = list(range(n_pages))
        self._high = [-page for page in range(n_pages - 1, -1, -1)]
        self._in_low = bytearray(b"\x01" * n_pages)
        self._in_high = bytearray(b"\x01" * n_pages)

    def reserve_low(self, n: int, owner: Owner) -> Reservation | None:
        """The n lowest free pages, or None when fewer are free."""
        return self._take(n, owner, self._pop_low)

    def reserve_high(self, n: int, owner: Owner) -> Reservation | None:
        """The n highest free pages, or None when fewer are free."""
        reservation = self._take(n, owner, self._pop_high)
        if reservation is not None:
            self.high_mark = min(self.high_mark, *reservation.pages, self.n_pages)
        return reservation

    def release(self, owner: Owner, pages: tuple[int, ...]) -> None:
        """Return pages of `owner`. A page that is not its owner's is a bug, and then nothing is returned.

        Checked before anything changes: other models go on using the pool after the one with the bug was torn down.
        """
        require(len(set(pages)) == len(pages), "a page is returned once")
        for page in pages:
            require(
                0 <= page < self.n_pages and self._owners[page] == owner, f"page {page} is not held by {owner.model}"
            )
        if not pages:
            return
        for page in pages:
            self._owners[page] = None
            if not self._in_low[page]:
                self._in_low[page] = 1
                heapq.heappush(self._low, page)
            if not self._in_high[page]:
                self._in_high[page] = 1
                heapq.heappush(self._high, -page)
        self.free_pages += len(pages)
        self.eased += 1
        self._held[owner] -= len(pages)
        if not self._held[owner]:
            del self._held[owner]

    def reclaim(self, owner: Owner) -> int:
        """Return every page of an owner whose instance died; how many there were."""
        pages = tuple(page for page in range(self.n_pages) if self._owners[page] == owner)
        if pages:
            self.release(owner, pages)
        return len(pages)

    def held(self) -> dict[Owner, int]:
        """Pages by owner; owners that hold none are absent."""
        return dict(self._held)

    def owners(self) -> tuple[Owner | None, ...]:
        """Who holds each page, in the order of ids; None where it is free."""
        return tuple(self._owners)

    def ease(self) -> None:
        """Somebody holds a page that can be given up from now on, though it has not come back."""
        self.eased += 1

    def check(self) -> None:
        """Raise Bug unless every page is either free or held by exactly the owner that is charged for it."""
        counts: dict[Owner, int] = {}
        for owner in self._owners:
            if owner is not None:
                counts[owner] = counts.get(owner, 0) + 1
        require(counts == self._held, "held counts differ from the pages themselves")
        require(self.free_pages + sum(counts.values()) == self.n_pages, "free and held pages do not add up to the pool")

    def _take(self, n: int, owner: Owner, pop: Callable[[], int]) -> Reservation | None:
        require(n >= 0, "pages are counted from 0")
        if n > self.free_pages:
            return None
        pages = tuple(pop() for _ in range(n))
        for page in pages:
            self._owners[page] = owner
        self.free_pages -= n
        if n:
            self._held[owner] = self._held.get(owner, 0) + n
        return Reservation(self, owner, pages)

    def _pop_low(self) -> int:
        while True:
            page = heapq.heappop(self._low)
            self._in_low[page] = 0
            if self._owners[page] is None:
                return page

    def _pop_high(self) -> int:
        while True:
            page = -heapq.heappop(self._high)
            self._in_high[page] = 0
            if self._owners[page] is None:
                return page
