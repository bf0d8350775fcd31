"""One model's KV pages: taken from the pool one by one, shared by reference counts. Pure.

A page holds `page_tokens` consecutive positions of one sequence, all layers of them. Several sequences and the prefix
cache may hold the same page; it returns to the pool with its last holder. Nobody writes a position that another holder
reads: only full pages are shared, or the start of a page while it is copied.
"""

from __future__ import annotations

from janus_server.errors import require
from janus_server.kv.pages import PagePool
from janus_server.types import Owner, PageKind


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` positions. Example: pages_for(29, 14) == 3."""
    return -(-tokens // page_tokens)


class KvPages:
    """Reference counts over the pages that one model's sequences and prefix cache hold."""

    def __init__(self, pool: PagePool, model: str, page_tokens: int) -> None:
        require(page_tokens > 0, "a KV page holds at least one token")
        self.page_tokens = page_tokens
        self.owner = Owner(model, PageKind.KV)
        self._pool = pool
        self._refs: dict[int, int] = {}

    @property
    def held(self) -> int:
        """Physical pages held, each counted once however often it is shared."""
        return len(self._refs)

    def take(self, n: int) -> tuple[int, ...] | None:
        """n fresh pages with one reference each, or None when the pool has fewer."""
        reservation = self._pool.reserve_high(n, self.owner)
        if reservation is None:
            return None
        pages = reservation.commit()
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page that someone holds already."""
        require(page in self._refs, f"page {page} has no holder to share with")
        self._refs[page] += 1

    def drop(self, page: int) -> bool:
        """One holder less; True when that was the last one and the page went back to the pool."""
        refs = self._refs.get(page, 0)
        require(refs > 0, f"page {page} was dropped more often than held")
        if refs > 1:
            self._refs[page] = refs - 1
            if refs == 2:
                self._pool.ease()  # the one holder left may be the prefix cache, which gives pages up when asked
            return False
        del self._refs[page]
        self._pool.release(self.owner, (page,))
        return True

    def refs(self, page: int) -> int:
        return self._refs.get(page, 0)
