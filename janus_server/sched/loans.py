"""Cached pages that are held so that another node can read them, for a moment each. Pure; a `Scarcity` has one.

Newcomers wait for them as for pages in use: what another node had computed here is not thrown away for the next prompt.
Who runs does not wait, nor do weights that come in: before anybody is preempted, all is called back. The reader learns
by its last question that what it read is not to be trusted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from janus_server.sched.batcher import Batcher


class Loans:
    """Whose pages are held, by the number of the loan."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Batcher, tuple[int, ...]]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._open)

    def hold(self, batcher: Batcher, pages: tuple[int, ...]) -> int:
        """A loan of cached pages that the caller holds; with them all those that they continue, so that none of those
        is stuck above them."""
        self._next += 1
        self._open[self._next] = batcher, pages
        return self._next

    def stands(self, loan: int) -> bool:
        """False once its pages may be another's. Any thread: that is so before any of them is."""
        return loan in self._open

    def end(self, loan: int) -> None:
        """The pages are held no more. One that is over already is fine."""
        batcher, pages = self._open.pop(loan, (None, ()))
        if batcher is not None:
            for page in reversed(pages):
                batcher.kv.drop(page)

    def recall(self, batcher: Batcher | None = None) -> bool:
        """End all, or those of one model; False where there are none."""
        found = [loan for loan, (lender, _) in self._open.items() if batcher in (None, lender)]
        for loan in found:
            self.end(loan)
        return bool(found)

    def forget(self, batcher: Batcher) -> None:
        """Its pages go back by their owner: nothing of it is held any more."""
        self._open = {loan: one for loan, one in self._open.items() if one[0] is not batcher}
