"""The one owner of scarcity on a node: what happens when a sequence needs a page and none is free. Pure.

First unpinned prefix pages of any model go, then sequences are preempted (by recompute), youngest first across models.
The oldest running sequence of the node is never a victim, so it always finishes; then the next one is the oldest. Two
models that each hold pages and need one more therefore both finish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from janus_server.kv.pages import PagePool
from janus_server.sched.sequence import Sequence, by_age

if TYPE_CHECKING:
    from janus_server.sched.batcher import Batcher


class Scarcity:
    """Frees pages of one pool on behalf of the batchers that share it.

    Whoever puts a batcher to work lets it `join`, and `leave` before its pages are reclaimed.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._batchers: list[Batcher] = []

    def join(self, batcher: Batcher) -> None:
        self._batchers.append(batcher)

    def leave(self, batcher: Batcher) -> None:
        self._batchers.remove(batcher)

    @property
    def eased(self) -> int:
        """Grows whenever there may be room where there was none; see `PagePool.eased`."""
        return self._pool.eased

    def evict(self, n: int) -> bool:
        """True when n pages are free, after giving up cached prefixes as far as needed; nobody is preempted.

        All or nothing: when even the whole cache would not do, it is kept.
        """
        missing = n - self._pool.free_pages
        for batcher in self._batchers:
            if missing > 0:
                missing -= batcher.prefix.evictable(missing)
        if missing > 0:
            return False
        for batcher in self._batchers:
            batcher.prefix.evict(max(0, n - self._pool.free_pages))
        return True

    def clear(self, n: int) -> bool:
        """True when n pages are free for weights, sequences preempted for them youngest first.

        The oldest sequence of the node keeps its pages. False only when those and the weights of others leave less.
        """
        while not self.evict(n):
            if self._preempt_youngest() is None:
                return False
        return True

    def yields(self, seq: Sequence) -> bool:
        """True when an older sequence of another model waits for room: what comes free is for that one.

        Without this a model with a stream of small requests keeps a large one of its neighbour waiting for ever.
        """
        return any(b.starved is not None and b.starved.order < seq.order for b in self._batchers)

    def make_room(self, n: int, asker: Sequence) -> bool:
        """True when n pages are free for `asker`; False when it must wait, because it was preempted itself."""
        while not self.evict(n):
            if self._preempt_youngest() in (None, asker):
                return False
        return True

    def _preempt_youngest(self) -> Sequence | None:
        """Preempt the youngest running sequence of the node; None when only the oldest is left, which is no victim."""
        running = [(seq, batcher) for batcher in self._batchers for seq in batcher.running]
        if len(running) < 2:
            return None
        victim, batcher = max(running, key=lambda one: by_age(one[0]))
        batcher.preempt(victim)
        return victim
