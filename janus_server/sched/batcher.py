"""Continuous batching of one model: a queue and a page budget in, one step out. Pure: no clock, no I/O, no randomness.

The device thread calls `plan` → runs the step → `commit`, so nothing happens between the two. There is no prefill phase
or decode phase: a sequence has `computed` and known tokens and a step closes the gap within a token budget. Sequences
that need one token go first; what is left of the budget is shared between prompts, short ones first (water filling), or
given to one prompt at a time, which makes prefill times additive (what LST-IMH's guarantee assumes).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq

import msgspec

from janus_server.errors import require
from janus_server.kv.blocks import KvPages, pages_for
from janus_server.kv.prefix import Match, PrefixCache
from janus_server.sched.scarcity import Scarcity
from janus_server.sched.sequence import Sequence, by_age
from janus_server.sched.share import share
from janus_server.types import Batch, BatcherStats, Chunk, Emit, FinishReason, PageCopy, Request, Sampled, SampleSpec


class BatcherLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one model may use. capacity_pages bounds the longest form of a single sequence.

    shared_prompts is how many unfinished prompts share a step's budget even when the first could fill it alone.
    one_prompt_at_a_time admits the next prompt only when the one before is computed.
    At most min(sequences, step_tokens) sequences run at once, so that each always has its token in a step.
    """

    context_tokens: int
    capacity_pages: int
    step_tokens: int = 512
    sequences: int = 128
    shared_prompts: int = 4
    one_prompt_at_a_time: bool = False
    prefix_caching: bool = True


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


class Batcher:
    """Decides each step of one model on one node. Who makes one also lets it join and leave its `Scarcity`."""

    def __init__(self, kv: KvPages, prefix: PrefixCache, scarcity: Scarcity, limits: BatcherLimits) -> None:
        self.kv = kv
        self.prefix = prefix
        self.limits = limits
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._scarcity = scarcity
        self._most_running = min(limits.sequences, limits.step_tokens)
        self._starved: Sequence | None = None
        self._shortage: _Shortage | None = None
        self._next_number = 0
        self._steps = 0
        self._preemptions = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0
        self._computed_tokens = 0
        self._sampled_tokens = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def starved(self) -> Sequence | None:
        """The head of the queue, when it found no room at its last try or somebody was preempted since."""
        return self._starved if self.waiting and self.waiting[0] is self._starved else None

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Its other choices wait until the first computed the prompt.

        Its longest form fits the memory: the context that the API promises was bounded by it.
        """
        require(len(request.prompt) > 0, "a request has at least one prompt token")
        longest_pages = pages_for(len(request.prompt) + request.max_tokens, self.kv.page_tokens)
        require(longest_pages <= self.limits.capacity_pages, "a request is longer than the memory holds")
        first = self._new_sequence(request, 0, now)
        first.siblings = [self._new_sequence(request, index, now) for index in range(1, request.n)]
        self._queue(first)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Forget one choice of a request, or all; unknown ids are fine (the request may just have ended)."""
        for group in (self.running, self.waiting):
            for seq in [s for s in group if s.request.id == request_id]:
                seq.siblings = [s for s in seq.siblings if index not in (None, s.index)]
                if index not in (None, seq.index):
                    continue
                if seq.siblings:
                    _hand_over(seq)
                else:
                    group.remove(seq)
                    self._release(seq)

    def cancel_all(self) -> list[Emit]:
        """End everything because the server stops; every choice gets its one end and every page goes back."""
        for seq in [*self.running, *self.waiting]:
            self._release(seq)
        return self._end_all(FinishReason.ABORT)

    def abandon(self) -> list[Emit]:
        """End everything because this instance failed; the pages are left to whoever reclaims them by owner."""
        return self._end_all(FinishReason.ERROR)

    def plan(self, now: float) -> Batch | None:
        """The next step, or None when nothing can run."""
        decodes = self._grow_decodes()
        budget = self.limits.step_tokens - len(decodes)
        prompts = [s for s in self.running if s.gap > 1]
        prompts += self._admit(prompts, budget, now)
        shares = share([s.gap for s in prompts], max(0, budget))
        work = [(s, 1) for s in decodes] + [(s, n) for s, n in zip(prompts, shares, strict=True) if n]
        if not work:
            return None
        self._steps += 1
        copies = tuple(s.copy for s, _ in work if s.copy is not None)
        return Batch(self._steps, tuple(self._chunk(s, n) for s, n in work), copies)

    def commit(self, batch: Batch, results: Seq[Sampled]) -> list[Emit]:
        """Take in what the step produced; returns this step's news in the order of the batch."""
        by_number = {s.number: s for s in self.running}
        require(len(results) == sum(c.sample is not None for c in batch.chunks), "one result for each row that samples")
        emits: list[Emit] = []
        sampled = iter(results)
        for chunk in batch.chunks:
            seq = by_number[chunk.sequence]
            seq.computed += len(chunk.tokens)
            self._computed_tokens += len(chunk.tokens)
            self._drop_copy(seq)
            self._publish(seq)
            if chunk.sample is not None:
                self._fork_siblings(seq)
                emits.append(self._accept(seq, next(sampled)))
        return emits

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's pages and queue it to be computed again."""
        self.running.remove(seq)
        self._release(seq)
        seq.computed = 0
        self._preemptions += 1
        self._queue(seq)
        self._starved = self.waiting[0]

    def stats(self) -> BatcherStats:
        return BatcherStats(
            running=len(self.running),
            waiting=len(self.waiting) + sum(len(s.siblings) for s in [*self.running, *self.waiting]),
            preemptions=self._preemptions,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            computed_tokens=self._computed_tokens,
            sampled_tokens=self._sampled_tokens,
        )

    # Planning

    def _grow_decodes(self) -> list[Sequence]:
        """Sequences one token behind, each with a page for it; oldest first, so that victims are always later ones."""
        decodes = []
        for seq in list(self.running):
            if seq.gap != 1 or not seq.pages:  # no pages: preempted for an older one a moment ago
                continue
            missing = pages_for(len(seq.tokens), self.kv.page_tokens) - len(seq.pages)
            if missing > 0 and not self._take(seq, missing):
                continue
            decodes.append(seq)
        return [s for s in decodes if s.pages]

    def _take(self, seq: Sequence, n: int) -> bool:
        if not self._scarcity.make_room(n, seq):
            return False
        pages = self.kv.take(n)
        require(pages is not None, "make_room promised pages that are not there")
        seq.pages.extend(pages or ())
        return True

    def _admit(self, prompts: Seq[Sequence], budget: int, now: float) -> list[Sequence]:
        """Move waiting sequences into the batch while the budget, the sequence limit and free pages allow."""
        admitted: list[Sequence] = []
        wanted = sum(s.gap for s in prompts)
        while self.waiting and len(self.running) < self._most_running and budget > 0:
            unfinished = len(prompts) + len(admitted)
            if unfinished and self.limits.one_prompt_at_a_time:
                break
            if wanted >= budget and unfinished >= self.limits.shared_prompts:
                break
            seq = self.waiting[0]
            if self._scarcity.yields(seq):
                break
            if self._still_short(seq) or not self._place(seq):
                self._starved = seq
                break
            self.waiting.pop(0)
            seq.started_s = now if seq.started_s is None else seq.started_s
            bisect.insort(self.running, seq, key=by_age)
            admitted.append(seq)
            wanted += seq.gap
        return admitted

    def _place(self, seq: Sequence) -> bool:
        """Give a waiting sequence the pages of all its known tokens, cached ones first; False when there is no room.

        One page a running sequence is left free, so that an admission does not at once cause a preemption.
        """
        match = self.prefix.match(seq.tokens, len(seq.tokens) - 1) if self.limits.prefix_caching else Match()
        hit = match.pages
        fresh_n = pages_for(len(seq.tokens), self.kv.page_tokens) - len(hit)
        fresh = self.kv.take(fresh_n) if self._scarcity.evict(fresh_n + len(self.running)) else None
        if fresh is None:
            for page in match.held:
                self.kv.drop(page)
            # The pages just matched may be what stood in the way of eviction: without them the pool always suffices
            # once nothing else runs.
            if match.held and not self.running and self._place_uncached(seq):
                return True
            continuations = self.prefix.continuations(match)
            self._shortage = _Shortage(seq, match, continuations, len(self.running), self._scarcity.eased)
            return False
        seq.pages = [*hit, *fresh]
        seq.computed = len(hit) * self.kv.page_tokens
        if match.partial is not None:
            seq.copy = PageCopy(match.partial, fresh[0])
            seq.computed += match.partial_tokens
        seq.published = len(hit)
        self._prefix_query_tokens += len(seq.tokens)
        self._prefix_hit_tokens += seq.computed
        if seq.cached is None:
            seq.cached = seq.computed
        return True

    def _still_short(self, seq: Sequence) -> bool:
        """True when `seq` found no room at its last try and nothing has changed since that could give it some."""
        last = self._shortage
        if last is None or last.seq is not seq or last.eased != self._scarcity.eased:
            return False
        if len(self.running) < last.running or self.prefix.continuations(last.match) != last.continuations:
            return False
        # As another try would: what the head of the queue waits to use again is not the first to be given up.
        self.prefix.touch(last.match)
        return True

    def _place_uncached(self, seq: Sequence) -> bool:
        n = pages_for(len(seq.tokens), self.kv.page_tokens)
        fresh = self.kv.take(n) if self._scarcity.evict(n) else None
        if fresh is None:
            return False
        seq.pages, seq.computed, seq.published = list(fresh), 0, 0
        seq.cached = seq.cached or 0
        return True

    def _chunk(self, seq: Sequence, n: int) -> Chunk:
        end = seq.computed + n
        sample = self._sample_spec(seq) if end == len(seq.tokens) else None
        pages = tuple(seq.pages[: pages_for(end, self.kv.page_tokens)])
        return Chunk(seq.number, seq.computed, tuple(seq.tokens[seq.computed : end]), pages, sample)

    def _sample_spec(self, seq: Sequence) -> SampleSpec:
        request = seq.request
        history = request.sampling.needs_history
        return SampleSpec(
            sampling=request.sampling,
            position=seq.generated,
            choice=seq.index,
            banned=request.stop_ids if seq.generated < request.min_tokens else (),
            prompt=request.prompt if history else (),
            output=tuple(seq.tokens[len(request.prompt) :]) if history else (),
        )

    # Committing

    def _accept(self, seq: Sequence, result: Sampled) -> Emit:
        request = seq.request
        seq.tokens.append(result.token)
        self._sampled_tokens += 1
        finish = None
        if result.token in request.stop_ids:
            finish = FinishReason.STOP
        elif seq.generated >= request.max_tokens or len(seq.tokens) >= self.limits.context_tokens:
            finish = FinishReason.LENGTH
        cached = (seq.cached or 0) if seq.first else 0
        queued_s = seq.started_s - seq.order[0] if seq.first and seq.started_s is not None else None
        seq.first = False
        if finish is not None:
            self.running.remove(seq)
            self._release(seq)
        return Emit(request.id, seq.index, result.token, result.logprob, finish, cached, queued_s)

    def _publish(self, seq: Sequence) -> None:
        full = seq.computed // self.kv.page_tokens
        if self.limits.prefix_caching and full > seq.published:
            seq.pages[:full] = self.prefix.publish(seq.tokens, seq.pages[:full])
            seq.published = full

    def _fork_siblings(self, seq: Sequence) -> None:
        """The prompt is computed: its other choices start from its pages, one token short, and draw their own next."""
        siblings, seq.siblings = seq.siblings, []
        reuse = len(seq.request.prompt) - 1
        whole, rest = divmod(reuse, self.kv.page_tokens)
        for sibling in siblings:
            if len(self.running) >= self._most_running or not self._scarcity.evict(1 + len(self.running)):
                self._queue(sibling)
                continue
            tail = self.kv.take(1)
            require(tail is not None, "evict promised a page that is not there")
            for page in seq.pages[:whole]:
                self.kv.share(page)
            sibling.pages = [*seq.pages[:whole], *(tail or ())]
            sibling.computed = reuse
            sibling.published = whole
            if rest:
                self.kv.share(seq.pages[whole])
                sibling.copy = PageCopy(seq.pages[whole], sibling.pages[whole])
            bisect.insort(self.running, sibling, key=by_age)

    # Book-keeping

    def _end_all(self, finish: FinishReason) -> list[Emit]:
        groups = [[seq, *seq.siblings] for seq in [*self.running, *self.waiting]]
        self.running, self.waiting = [], []
        return [Emit(seq.request.id, seq.index, finish=finish) for group in groups for seq in group]

    def _new_sequence(self, request: Request, index: int, now: float) -> Sequence:
        self._next_number += 1
        return Sequence(self._next_number, request, index, now)

    def _queue(self, seq: Sequence) -> None:
        bisect.insort(self.waiting, seq, key=by_age)

    def _release(self, seq: Sequence) -> None:
        """Give up every page of a sequence, youngest first, so that a prefix is the last to go."""
        self._drop_copy(seq)
        for page in reversed(seq.pages):
            self.kv.drop(page)
        seq.pages = []

    def _drop_copy(self, seq: Sequence) -> None:
        """The copy has run, or never will: its source need not be held for it any longer."""
        if seq.copy is not None:
            self.kv.drop(seq.copy.source)
            seq.copy = None


def _hand_over(seq: Sequence) -> None:
    """The first choice was cancelled before it drew anything: the next one takes over its place, pages and siblings."""
    heir, *seq.siblings = seq.siblings
    seq.index = heir.index
