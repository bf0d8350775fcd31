"""The pool of physical pages: which page belongs to whom. Pure arithmetic; the bytes live in kv/xtensor.

Weights take the lowest free ids, KV and scratch the highest, so the border between them moves with the load (the
published system's two-ended allocation). Allocation is all or nothing: a `Reservation` holds real page ids and is
either committed to its owner or cancelled. An owner with a floor has free pages kept for it until it holds as many:
nobody else can take those. One thread owns a pool; nothing here locks.
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

    Floors cost O(1) a call: `kept_pages` is the sum, over owners, of what each lacks of its floor.
    """

    def __init__(self, n_pages: int) -> None:
        require(n_pages > 0, "a pool has at least one page")
        self.n_pages = n_pages
        self.free_pages = n_pages
        self.kept_pages = 0
        # The lowest id that was ever taken from the high end: pages from here up have been in use, or soon will be.
        self.high_mark = n_pages
        # Grows whenever a page came back, or can be given up now and could not before: while it stands, whoever found
        # no room need not look again.
        self.eased = 0
        self._owners: list[Owner | None] = [None] * n_pages
        self._held: dict[Owner, int] = {}
        self._floors: dict[Owner, int] = {}
        self._low = list(range(n_pages))
        self._high = [-page for page in range(n_pages - 1, -1, -1)]
        self._in_low = bytearray(b"\x01" * n_pages)
        self._in_high = bytearray(b"\x01" * n_pages)

    def reserve_low(self, n: int, owner: Owner) -> Reservation | None:
        """The n lowest free pages, or None when fewer are free for it."""
        return self._take(n, owner, self._pop_low)

    def reserve_high(self, n: int, owner: Owner) -> Reservation | None:
        """The n highest free pages, or None when fewer are free for it."""
        reservation = self._take(n, owner, self._pop_high)
        if reservation is not None:
            self.high_mark = min(self.high_mark, *reservation.pages, self.n_pages)
        return reservation

    def keep(self, owner: Owner, floor: int) -> None:
        """From now on leave free pages for `owner` until it holds `floor`; 0 for no longer.

        Where fewer are free than all floors lack, nothing is taken from anybody: the pages are kept as they come back.
        """
        require(floor >= 0, "pages are counted from 0")
        self.kept_pages -= self._lacking(owner)
        self._floors.pop(owner, None)
        if floor:
            self._floors[owner] = floor
        self.kept_pages += self._lacking(owner)
        self.eased += 1

    def available(self, owner: Owner | None = None) -> int:
        """Free pages that `owner` may take: all but those kept for others. Negative while floors lack more than is
        free. None stands for an owner without a floor.

        Example: 5 free, a lacks 2 of its floor and b lacks 1: available(a) == 4, available(None) == 2.
        """
        return self.free_pages - self.kept_pages + (0 if owner is None else self._lacking(owner))

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
        self._charge(owner, -len(pages))

    def hand_over(self, pages: tuple[int, ...], giver: Owner, taker: Owner) -> None:
        """Pages of one owner are another's from now on; none of them was free meanwhile."""
        require(len(set(pages)) == len(pages), "a page is handed over once")
        for page in pages:
            require(self._owners[page] == giver, f"page {page} is not held by {giver.model}")
        for page in pages:
            self._owners[page] = taker
        self._charge(giver, -len(pages))
        self._charge(taker, len(pages))

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
        require(self.kept_pages == sum(map(self._lacking, self._floors)), "the pages kept are not what floors lack")

    def _take(self, n: int, owner: Owner, pop: Callable[[], int]) -> Reservation | None:
        require(n >= 0, "pages are counted from 0")
        if n > min(self.free_pages, self.available(owner)):
            return None
        pages = tuple(pop() for _ in range(n))
        for page in pages:
            self._owners[page] = owner
        self.free_pages -= n
        self._charge(owner, n)
        return Reservation(self, owner, pages)

    def _charge(self, owner: Owner, more: int) -> None:
        """The owner holds `more` pages than before; what its floor lacks changes with it."""
        self.kept_pages -= self._lacking(owner)
        held = self._held.pop(owner, 0) + more
        if held:
            self._held[owner] = held
        self.kept_pages += self._lacking(owner)

    def _lacking(self, owner: Owner) -> int:
        """How many pages of its floor an owner does not hold."""
        floor = self._floors.get(owner, 0)
        return max(0, floor - self._held.get(owner, 0)) if floor else 0

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
