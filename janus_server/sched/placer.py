"""The pages of one model's sequences: where a waiting one is placed, how a running one grows, how all is given back.

The batcher decides who runs and calls this for the pages. A sequence takes what the prefix cache has of it, the rest
from the pool; `scarcity` says whether there is room. Nothing here preempts but through `scarcity`. Pure.
"""

from __future__ import annotations

import msgspec

from janus_server.errors import require
from janus_server.kv.blocks import KvPages, pages_for
from janus_server.kv.prefix import Match, PrefixCache
from janus_server.sched.chunk import reusable
from janus_server.sched.scarcity import Scarcity
from janus_server.sched.sequence import Sequence
from janus_server.types import PageCopy


class _Shortage(msgspec.Struct, frozen=True):
    """A try to place the head of the queue that found no room, and how all stood that it depends on.

    Until something of that changed for the better, another try would hash the prompt and walk the caches for the same
    answer.
    """

    seq: Sequence
    match: Match
    continuations: int
    running: int
    eased: int
    capped: bool


class Placer:
    """Writes the pages of sequences (`pages`, `computed` where they come from a cache, `published`, `copy`).

    `running` is how many sequences run: one page for each is left free, so that a newcomer does not at once cause a
    preemption. query_tokens and hit_tokens count what was looked for in the prefix cache, and found.
    """

    def __init__(self, kv: KvPages, prefix: PrefixCache, scarcity: Scarcity, caching: bool) -> None:
        self.query_tokens = 0
        self.hit_tokens = 0
        self._kv = kv
        self._prefix = prefix
        self._scarcity = scarcity
        self._caching = caching
        self._shortage: _Shortage | None = None

    def place(self, seq: Sequence, running: int) -> bool:
        """Give a waiting sequence the pages of all its known tokens, cached ones first; False when there is no room."""
        match = self._prefix.match(seq.tokens, reusable(seq), seq.request.tenant) if self._caching else Match()
        hit = match.pages
        fresh_n = pages_for(len(seq.tokens), self._kv.page_tokens) - len(hit)
        fresh = self._kv.take(fresh_n) if self._scarcity.evict(fresh_n + running, self._kv) else None
        if fresh is None:
            capped = self._scarcity.capped(fresh_n + running, self._kv)
            for page in match.held:
                self._kv.drop(page)
            # The pages just matched may be what stood in the way of eviction: without them the pool always suffices
            # once nothing else runs.
            if match.held and not running and self._place_uncached(seq):
                return True
            continuations = self._prefix.continuations(match, seq.request.tenant)
            self._shortage = _Shortage(seq, match, continuations, running, self._scarcity.eased, capped)
            return False
        seq.pages = [*hit, *fresh]
        seq.computed = len(hit) * self._kv.page_tokens
        if match.partial is not None:
            seq.copy = PageCopy(match.partial, fresh[0])
            seq.computed += match.partial_tokens
        seq.published = len(hit)
        self.query_tokens += len(seq.tokens)
        self.hit_tokens += seq.computed
        if seq.cached is None:
            seq.cached = seq.computed
        return True

    @property
    def capped(self) -> bool:
        """True when the last sequence that found no room was kept out by its own model's ceiling."""
        return self._shortage is not None and self._shortage.capped

    def still_short(self, seq: Sequence, running: int) -> bool:
        """True when `seq` found no room at its last try and nothing has changed since that could give it some."""
        last = self._shortage
        if last is None or last.seq is not seq or last.eased != self._scarcity.eased:
            return False
        if running < last.running or self._prefix.continuations(last.match, seq.request.tenant) != last.continuations:
            return False
        # As another try would: what the head of the queue waits to use again is not the first to be given up.
        self._prefix.touch(last.match)
        return True

    def grow(self, seq: Sequence) -> bool:
        """Give a running sequence the pages of its last known tokens; False when it must wait, preempted itself."""
        missing = pages_for(len(seq.tokens), self._kv.page_tokens) - len(seq.pages)
        if missing <= 0:
            return True
        if not self._scarcity.make_room(missing, seq, self._kv):
            return False
        pages = self._kv.take(missing)
        require(pages is not None, "make_room promised pages that are not there")
        seq.pages.extend(pages or ())
        return True

    def fork(self, seq: Sequence, sibling: Sequence, running: int) -> bool:
        """Let a sibling start from the prompt that `seq` computed, one token short; False when there is no room."""
        if not self._scarcity.evict(1 + running, self._kv):
            return False
        tail = self._kv.take(1)
        require(tail is not None, "evict promised a page that is not there")
        reuse = len(seq.request.prompt) - 1
        whole, rest = divmod(reuse, self._kv.page_tokens)
        for page in seq.pages[:whole]:
            self._kv.share(page)
        sibling.pages = [*seq.pages[:whole], *(tail or ())]
        sibling.computed = reuse
        sibling.published = whole
        if rest:
            self._kv.share(seq.pages[whole])
            sibling.copy = PageCopy(seq.pages[whole], sibling.pages[whole])
        return True

    def publish(self, seq: Sequence) -> None:
        """Let other sequences start from what this one has computed."""
        full = seq.computed // self._kv.page_tokens
        if self._caching and full > seq.published:
            seq.pages[:full] = self._prefix.publish(seq.tokens, seq.pages[:full], seq.request.tenant)
            seq.published = full

    def withdraw(self, seq: Sequence) -> None:
        """Let nobody start from a page of this sequence any more, not even from those that came from the cache."""
        self._prefix.withdraw(seq.pages)
        self._shortage = None  # the match in it may be among them

    def release(self, seq: Sequence) -> None:
        """Give up every page of a sequence, youngest first, so that a prefix is the last to go."""
        self.drop_copy(seq)
        for page in reversed(seq.pages):
            self._kv.drop(page)
        seq.pages = []

    def drop_copy(self, seq: Sequence) -> None:
        """The copy has run, or never will: its source need not be held for it any longer."""
        if seq.copy is not None:
            self._kv.drop(seq.copy.source)
            seq.copy = None

    def _place_uncached(self, seq: Sequence) -> bool:
        n = pages_for(len(seq.tokens), self._kv.page_tokens)
        fresh = self._kv.take(n) if self._scarcity.evict(n, self._kv) else None
        if fresh is None:
            return False
        seq.pages, seq.computed, seq.published = list(fresh), 0, 0
        seq.cached = seq.cached or 0
        return True
