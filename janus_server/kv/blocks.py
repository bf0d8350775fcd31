"""One model's KV pages: taken from the pool one by one, shared by reference counts. Pure.

A page holds `page_tokens` consecutive positions of one sequence, all layers of them. Several sequences and the prefix
cache may hold the same page; it returns to the pool with its last holder. Nobody writes a position that another holder
reads: only full pages are shared, or the start of a page while it is copied. A model may have a floor (pages that no
other can take from it) and a ceiling (it never holds more).
"""

from __future__ import annotations

from janus_server.errors import require
from janus_server.kv.pages import PagePool
from janus_server.types import Owner, PageKind


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` positions. Example: pages_for(29, 14) == 3."""
    return -(-tokens // page_tokens)


class KvPages:
    """Reference counts over the pages that one model's sequences and prefix cache hold.

    The floor stands in the pool's books from `keep_floor` to `drop_floor`; the ceiling holds always.
    """

    def __init__(
        self, pool: PagePool, model: str, page_tokens: int, floor_pages: int = 0, ceiling_pages: int | None = None
    ) -> None:
        require(page_tokens > 0, "a KV page holds at least one token")
        require(ceiling_pages is None or floor_pages <= ceiling_pages, "a floor is at most its ceiling")
        self.page_tokens = page_tokens
        self.floor_pages = floor_pages
        self.ceiling_pages = ceiling_pages
        self.owner = Owner(model, PageKind.KV)
        self._pool = pool
        self._refs: dict[int, int] = {}

    @property
    def held(self) -> int:
        """Physical pages held, each counted once however often it is shared."""
        return len(self._refs)

    @property
    def surplus(self) -> int:
        """Pages held beyond the floor: what other models can gain here."""
        return max(0, self.held - self.floor_pages)

    @property
    def available(self) -> int:
        """Free pages that may be taken as far as other models' floors go; the ceiling is another matter."""
        return self._pool.available(self.owner)

    def above_ceiling(self, n: int) -> int:
        """How many pages too many n more would be; 0 while they fit under the ceiling."""
        return 0 if self.ceiling_pages is None else max(0, self.held + n - self.ceiling_pages)

    def keep_floor(self) -> None:
        """Have the pool leave free pages for this model until it holds its floor."""
        self._pool.keep(self.owner, self.floor_pages)

    def drop_floor(self) -> None:
        self._pool.keep(self.owner, 0)

    def take(self, n: int) -> tuple[int, ...] | None:
        """n fresh pages with one reference each; None when the pool has fewer, or they would be above the ceiling."""
        if self.above_ceiling(n):
            return None
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

    def part(self, pages: tuple[int, ...], owner: Owner) -> None:
        """Pages that nobody shares are `owner`'s from now on, who writes them beside all steps."""
        for page in pages:
            require(self._refs.get(page) == 1, f"page {page} is shared, or not held")
        for page in pages:
            del self._refs[page]
        self._pool.hand_over(pages, self.owner, owner)

    def adopt(self, pages: tuple[int, ...], owner: Owner) -> None:
        """The same back: pages of `owner` are this model's, with one reference each. They fit under its ceiling."""
        require(not self.above_ceiling(len(pages)), "pages are adopted above the ceiling")
        self._pool.hand_over(pages, owner, self.owner)
        for page in pages:
            self._refs[page] = 1

    def refs(self, page: int) -> int:
        return self._refs.get(page, 0)
