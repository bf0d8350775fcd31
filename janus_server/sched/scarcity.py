"""The one owner of scarcity on a node: what happens when a sequence needs a page and none is free for it. Pure.

First unpinned prefix pages go, of any model that holds more than its floor, then sequences are preempted (by
recompute), youngest first across those models. A model at its ceiling has only its own pages to give up. The oldest
running sequence of the node is never a victim, so it always finishes; then the next one is the oldest. Two models that
each hold pages and need one more therefore both finish. `Scarcity` says why that holds with floors and ceilings too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from janus_server.kv.blocks import KvPages, pages_for
from janus_server.kv.pages import PagePool
from janus_server.sched.loans import Loans
from janus_server.sched.sequence import Sequence, by_seniority

if TYPE_CHECKING:
    from janus_server.sched.batcher import Batcher

# In how many periods the idle time of a cached prefix is counted: the use of a page costs no clock, only a number.
IDLE_PERIODS = 4


class Scarcity:
    """Frees pages of one pool on behalf of the batchers that share it.

    Whoever puts a batcher to work lets it `join`, and `leave` before its pages are reclaimed. While it has joined, its
    model's floor is kept for it.

    Why the oldest sequence of the node always finishes: let K pages be left beside all weights, model j hold h_j with
    floor f_j and ceiling c_j, and let the oldest run in m, where a sequence takes at most L_m ≤ c_m. `pages_needed`
    lets models be Active together only where K ≥ Σf + max(0, L_m − f_m) for each m. Once everything else that helps was
    preempted and evicted, no other model holds more than its floor, and m nothing but that sequence: m may take what is
    left, K − h_m − Σ_{j≠m} max(h_j, f_j) = K − h_m − Σ_{j≠m} f_j ≥ max(L_m, f_m) − h_m, all that the sequence lacks;
    nor does a ceiling c_m ≥ L_m stop it. By the same sum `join` finds room for the floor of a model that is new, and
    `clear` for its weights; from then on free pages never fall below what all floors lack, so a model gets pages within
    its floor without anybody being preempted.
    """

    def __init__(self, pool: PagePool, idle_s: float | None = None) -> None:
        """Cached prefixes that nobody used for `idle_s` seconds are to go back to the pool; None keeps them."""
        self._pool = pool
        self._batchers: list[Batcher] = []
        self._period_s = None if idle_s is None else idle_s / IDLE_PERIODS
        self._due_s = 0.0
        # Pages that are being filled from elsewhere, by so many; and those that are being read.
        self.expecting = 0
        self.loans = Loans()
        # Requests that will run here once pages of theirs have arrived, with their models. Any thread may add one.
        self.awaited: dict[str, str] = {}

    def join(self, batcher: Batcher) -> None:
        self._batchers.append(batcher)
        batcher.kv.keep_floor()
        self.clear(0)

    def leave(self, batcher: Batcher) -> None:
        self._batchers.remove(batcher)
        self.loans.forget(batcher)
        batcher.kv.drop_floor()

    def awaits(self, model: str) -> bool:
        """True while requests of the model are to come."""
        return model in tuple(self.awaited.values())

    @property
    def passing(self) -> bool:
        """True while pages will be free without a step of anybody's, soon: who waits for room is no bug."""
        return self.expecting > 0 or len(self.loans) > 0

    @property
    def eased(self) -> int:
        """Grows whenever there may be room where there was none; see `PagePool.eased`."""
        return self._pool.eased

    def evict(self, n: int, kv: KvPages | None = None) -> bool:
        """True when n pages are free for `kv` (None: for weights), after giving up cached prefixes as far as needed.

        Nobody is preempted. All or nothing: when even the whole cache would not do, it is kept.
        """
        givers = self._givers(n, kv)
        for batcher, pages in givers or ():
            batcher.prefix.evict(pages)
        return givers is not None

    def capped(self, n: int, kv: KvPages) -> bool:
        """True when n more pages are above the ceiling of `kv` whatever its cache gives up: nobody else can help."""
        above = kv.above_ceiling(n)
        return above > 0 and all(b.prefix.evictable(above) < above for b in self._batchers if b.kv is kv)

    def clear(self, n: int) -> bool:
        """True when n pages are free for weights, sequences preempted for them youngest first.

        The oldest sequence of the node keeps its pages. False only when those, floors and the weights of others leave
        less.
        """
        while not self.evict(n):
            if not self.loans.recall() and self._preempt_last(n, None) is None:
                return False
        return True

    def yields(self, seq: Sequence, batcher: Batcher) -> bool:
        """True when an older sequence of another model waits for room: what comes free is for that one.

        Without this a model with a stream of small requests keeps a large one of its neighbour waiting for ever. What
        stays within its model's floor to its end takes nothing that the other could have, and need not wait.
        """
        waits = any(b.starved is not None and b.starved.order < seq.order for b in self._batchers if b is not batcher)
        return waits and not _sheltered(seq, batcher)

    def make_room(self, n: int, asker: Sequence, kv: KvPages) -> bool:
        """True when n pages are free for `asker`; False when it must wait, because it was preempted itself."""
        while not self.evict(n, kv):
            if not self.loans.recall() and self._preempt_last(n, kv) in (None, asker):
                return False
        return True

    def batcher(self, model: str) -> Batcher | None:
        """That of a model which takes its turns now. Any thread may look."""
        return next((batcher for batcher in tuple(self._batchers) if batcher.kv.owner.model == model), None)

    def period_over(self, now: float) -> bool:
        """True once a period: every prefix cache is then to `age` by IDLE_PERIODS. One comparison while it lasts.

        A page goes after idle_s without use at the earliest, and idle_s·(1 + 1/IDLE_PERIODS) at the latest where this
        is asked whenever `next_period` says.
        """
        if self._period_s is None or now < self._due_s:
            return False
        self._due_s = now + self._period_s
        return True

    def next_period(self) -> float | None:
        """When the period ends; None while that matters to nobody: nothing is cached, or it is kept for good."""
        cached = self._period_s is not None and any(len(batcher.prefix) for batcher in self._batchers)
        return self._due_s if cached else None

    def _givers(self, n: int, kv: KvPages | None) -> list[tuple[Batcher, int]] | None:
        """Who gives up how many cached pages so that n are free for `kv`; None when all of them would not do."""
        missing = n - (self._pool.available() if kv is None else kv.available)
        above = 0 if kv is None else kv.above_ceiling(n)
        givers: list[tuple[Batcher, int]] = []
        if missing <= 0 and above <= 0:
            return givers
        # What a ceiling asks of its own model is counted first: those pages are free for everybody.
        for batcher in sorted(self._batchers, key=lambda b: not (above and b.kv is kv)):
            own = batcher.kv is kv
            most = max(missing, above) if own else min(missing, batcher.kv.surplus)
            found = batcher.prefix.evictable(most) if most > 0 else 0
            missing, above = missing - found, above - (found if own else 0)
            givers.append((batcher, found))
        return givers if missing <= 0 and above <= 0 else None

    def _preempt_last(self, n: int, kv: KvPages | None) -> Sequence | None:
        """Preempt the youngest running sequence whose pages would help `kv` to n more; None when there is none.

        The node's oldest is no victim. A sequence of another model helps only as far as that one is above its floor
        with pages that are not just cached, and not where a ceiling is what stands in the way.
        """
        running = [(seq, batcher) for batcher in self._batchers for seq in batcher.running]
        if len(running) < 2:
            return None
        oldest = min((seq for seq, _ in running), key=by_seniority)
        capped = kv is not None and self.capped(n, kv)
        helpful = {id(b) for b in self._batchers if b.kv is kv or (not capped and _pinned_surplus(b))}
        victims = [(seq, batcher) for seq, batcher in running if seq is not oldest and id(batcher) in helpful]
        if not victims:
            return None
        victim, batcher = max(victims, key=lambda one: by_seniority(one[0]))
        batcher.preempt(victim)
        return victim


def _pinned_surplus(batcher: Batcher) -> bool:
    """True when a model holds pages beyond its floor that its cache cannot give up."""
    surplus = batcher.kv.surplus
    return batcher.prefix.evictable(surplus) < surplus


def _sheltered(seq: Sequence, batcher: Batcher) -> bool:
    """True when its model's floor holds `seq` and all that run there, each at its longest."""
    kv = batcher.kv
    if not kv.floor_pages:
        return False
    longest = (len(s.request.prompt) + s.request.max_tokens for s in (*batcher.running, seq))
    return sum(pages_for(tokens, kv.page_tokens) for tokens in longest) <= kv.floor_pages
