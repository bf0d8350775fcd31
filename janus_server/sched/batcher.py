"""Continuous batching of one model: a queue and a page budget in, one step out. Pure: no clock, no I/O, no randomness.

The device thread calls `plan` → runs the step → `commit`, so nothing happens between the two. There is no prefill phase
or decode phase: a sequence has `computed` and known tokens and a step closes the gap within a token budget. Sequences
that need one token go first; what is left of the budget is shared between prompts, short ones first (water filling), or
given to one prompt at a time, which makes prefill times additive (what LST-IMH's guarantee assumes).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from janus_server.errors import require
from janus_server.kv.blocks import KvPages, pages_for
from janus_server.kv.prefix import PrefixCache
from janus_server.sched.chunk import chunk_of
from janus_server.sched.placer import Placer
from janus_server.sched.scarcity import Scarcity
from janus_server.sched.seen import Seen
from janus_server.sched.sequence import Begun, Sequence, by_seniority
from janus_server.sched.share import share
from janus_server.types import (
    Batch,
    BatcherStats,
    Emit,
    Fault,
    FinishReason,
    Reading,
    Request,
    Sampled,
    TokenLogprob,
)


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


class Batcher:
    """Decides each step of one model on one node. Who makes one also lets it join and leave its `Scarcity`."""

    def __init__(self, kv: KvPages, prefix: PrefixCache, scarcity: Scarcity, limits: BatcherLimits) -> None:
        self.kv = kv
        self.prefix = prefix
        self.limits = limits
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        # Every sequence that runs or waits, by its request: a cancel must not look through the queue.
        self._by_id: dict[str, list[Sequence]] = {}
        self._scarcity = scarcity
        # Grows with everything that may change which sequences run and wait, or what they have computed.
        self.changes = 0
        self.paced = 0  # choices with a promise of their TPOT
        self._planned_s = 0.0
        self._kept_out: Sequence | None = None
        self._most_running = min(limits.sequences, limits.step_tokens)
        self._starved: Sequence | None = None
        self._placer = Placer(kv, prefix, scarcity, limits.prefix_caching)
        self._next_number = 0
        self._steps = 0
        self._preemptions = 0
        self._computed_tokens = 0
        self._sampled_tokens = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def admits(self) -> bool:
        """False when nobody waits, or the head of the queue found no place at its last try."""
        full = len(self.running) >= self._most_running
        return bool(self.waiting) and self.waiting[0] is not self._kept_out and not full

    @property
    def starved(self) -> Sequence | None:
        """The head of the queue, when it found no room at its last try or somebody was preempted since.

        Not when what stood in its way was its own model's ceiling: nothing that others leave could help it.
        """
        return self._starved if self.waiting and self.waiting[0] is self._starved else None

    def add(self, request: Request, now: float, grammar: Any = None, cached: int | None = None) -> None:
        """Queue a request. Its other choices wait until the first computed the prompt.

        Its longest form fits the memory: the context that the API promises was bounded by it. grammar is the matcher
        that each choice draws under a copy of. cached is what it gained from caches, where others computed the rest.
        """
        self._check(request)
        first = self._new_sequence(request, 0, now, grammar)
        first.cached = cached
        first.siblings = [self._new_sequence(request, index, now, grammar) for index in range(1, request.n)]
        self.changes += 1
        self._enrol(first)
        self._queue(first)

    def resume(self, request: Request, now: float, choices: Seq[Begun]) -> None:
        """Go on with a request that ran elsewhere: these choices of it are not over. Each has its own pages."""
        self._check(request)
        self.changes += 1
        for begun in choices:
            seq = self._new_sequence(request, begun.choice, now, begun.grammar)
            if begun.tokens:
                seq.go_on(begun.tokens)
            self._enrol(seq)
            self._queue(seq)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Forget one choice of a request, or all; unknown ids are fine (the request may just have ended)."""
        self.changes += 1
        for seq in tuple(self._by_id.get(request_id, ())):
            seq.siblings = [s for s in seq.siblings if index not in (None, s.index)]
            if index not in (None, seq.index):
                continue
            if seq.siblings:
                _hand_over(seq)
            else:
                self._forget(seq)

    def cancel_all(self) -> list[Emit]:
        """End everything because the server stops; every choice gets its one end and every page goes back."""
        for seq in [*self.running, *self.waiting]:
            self._placer.release(seq)
        return self._end_all(FinishReason.ABORT)

    def abandon(self) -> list[Emit]:
        """End everything because this instance failed; the pages are left to whoever reclaims them by owner."""
        return self._end_all(FinishReason.ERROR)

    def plan(self, now: float, prompt_tokens: int | None = None) -> Batch | None:
        """The next step, or None when nothing can run.

        prompt_tokens, at least 1, bounds what the step computes of prompts where others wait for the device. Sequences
        that are one token behind always get theirs.
        """
        require(prompt_tokens is None or prompt_tokens > 0, "a step goes on with the prompts")
        self.changes += 1
        self._planned_s = now
        decodes = self._grow_decodes()
        budget = self.limits.step_tokens - len(decodes)
        budget = budget if prompt_tokens is None else min(budget, prompt_tokens)
        prompts = [s for s in self.running if s.gap > 1]
        prompts += self._admit(prompts, budget, now)
        shares = share([s.gap for s in prompts], max(0, budget))
        work = [(s, 1) for s in decodes] + [(s, n) for s, n in zip(prompts, shares, strict=True) if n]
        if not work:
            return None
        self._steps += 1
        copies = tuple(s.copy for s, _ in work if s.copy is not None)
        size = self.kv.page_tokens
        return Batch(self._steps, tuple(chunk_of(s, n, size) for s, n in work), copies)

    def commit(
        self, batch: Batch, results: Seq[Sampled], readings: Seq[Reading] = (), now: float | None = None
    ) -> list[Emit]:
        """Take in what the step produced; returns this step's news in the order of the batch.

        now is when it ended; without it, it took no time.
        """
        self.changes += 1
        now = self._planned_s if now is None else now
        by_number = {s.number: s for s in self.running}
        require(len(results) == sum(c.sample is not None for c in batch.chunks), "one result for each row that samples")
        require(len(readings) == sum(c.read is not None for c in batch.chunks), "one reading for each chunk that reads")
        emits: list[Emit] = []
        sampled, read = iter(results), iter(readings)
        for chunk in batch.chunks:
            seq = by_number[chunk.sequence]
            seq.computed += len(chunk.tokens)
            self._computed_tokens += len(chunk.tokens)
            if seq.copy is not None:
                self._placer.drop_copy(seq)
            drawn = None if chunk.sample is None else next(sampled)
            reading = None if chunk.read is None else next(read)
            if _spoilt(drawn, reading):
                emits += self._end_spoilt(seq)
                continue
            self._placer.publish(seq)
            if reading is not None:
                seq.read = min(seq.computed, seq.to_read)
                seq.sums = reading.sums
            scores = () if reading is None else reading.scores
            if drawn is not None:
                if seq.siblings:
                    self._fork_siblings(seq)
                emits.append(self._accept(seq, drawn, scores, now))
            elif seq.gap == 0:
                emits += self._end_prompt(seq, scores, None if reading is None else reading.embedding)
            elif scores:
                emits.append(Emit(seq.request.id, seq.index, prompt_logprobs=scores))
        return emits

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's pages and queue it to be computed again."""
        require(_take_out(self.running, seq), "only a sequence that runs is preempted")
        self.changes += 1
        self._placer.release(seq)
        seq.computed = 0
        self._preemptions += 1
        self._queue(seq)
        self._starved = self.waiting[0]

    def stats(self) -> BatcherStats:
        deferred = sum(len(s.siblings) for s in [*self.running, *self.waiting])
        return BatcherStats(
            running=len(self.running),
            waiting=len(self.waiting) + deferred,
            deferred=deferred,
            preemptions=self._preemptions,
            prefix_query_tokens=self._placer.query_tokens,
            prefix_hit_tokens=self._placer.hit_tokens,
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
            if self._placer.grow(seq):
                decodes.append(seq)
        return [s for s in decodes if s.pages]

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
            if self._scarcity.yields(seq, self):
                self._kept_out = seq
                break
            running = len(self.running)
            if self._placer.still_short(seq, running) or not self._placer.place(seq, running):
                self._starved = None if self._placer.capped else seq
                self._kept_out = seq
                break
            self._kept_out = None
            self.waiting.pop(0)
            seq.started_s = now if seq.started_s is None else seq.started_s
            bisect.insort(self.running, seq, key=by_seniority)
            admitted.append(seq)
            wanted += seq.gap
        return admitted

    # Committing

    def _accept(self, seq: Sequence, result: Sampled, scores: tuple[TokenLogprob, ...], now: float) -> Emit:
        request = seq.request
        finish = None
        if result.token is not None:
            seq.tokens.append(result.token)
            seq.drew(now)
            if seq.seen is not None:
                seq.seen.add(result.token)
            self._sampled_tokens += 1
        if result.fault is not None:
            finish = FinishReason.ERROR
        elif result.done or result.token in request.stop_ids:
            finish = FinishReason.STOP
        elif seq.generated >= request.max_tokens or len(seq.tokens) >= self.limits.context_tokens:
            finish = FinishReason.LENGTH
        return self._tell(seq, finish, result.token, result.logprob, scores, fault=result.fault)

    def _end_prompt(
        self, seq: Sequence, scores: tuple[TokenLogprob, ...], embedding: tuple[float, ...] | None
    ) -> list[Emit]:
        """The prompt of a request that generates nothing is computed: all its choices end."""
        finish = FinishReason.LENGTH if seq.request.pooling is None else FinishReason.STOP
        others = [Emit(seq.request.id, sibling.index, finish=finish) for sibling in seq.siblings]
        return [self._tell(seq, finish, scores=scores, embedding=embedding), *others]

    def _end_spoilt(self, seq: Sequence) -> list[Emit]:
        """What was computed for a sequence is not finite: it ends alone, with the choices that wait for its prompt.

        Nobody is to start from its pages, so none of them stays in the cache, not even those that came from there: the
        fault may lie in any. (Whose prompt starts with the same tokens meets the same fault, if the weights are why.)
        """
        self._placer.withdraw(seq)
        others = [Emit(seq.request.id, sibling.index, finish=FinishReason.ERROR) for sibling in seq.siblings]
        return [self._tell(seq, FinishReason.ERROR), *others]

    def _tell(
        self,
        seq: Sequence,
        finish: FinishReason | None,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        scores: tuple[TokenLogprob, ...] = (),
        embedding: tuple[float, ...] | None = None,
        fault: Fault | None = None,
    ) -> Emit:
        """A choice's news of a step in which it drew a token or ended; where it ended its pages go back."""
        cached = (seq.cached or 0) if seq.first else 0
        queued_s = seq.started_s - seq.arrived_s if seq.first and seq.started_s is not None else None
        seq.first = False
        if finish is not None:
            self._forget(seq)
        return Emit(seq.request.id, seq.index, token, logprob, finish, cached, queued_s, scores, embedding, fault)

    def _fork_siblings(self, seq: Sequence) -> None:
        """The prompt is computed: its other choices start from its pages, one token short, and draw their own next."""
        siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            self._enrol(sibling)
            if seq.seen is not None:
                sibling.seen = Seen(seq.seen.prompt_ids)
            if len(self.running) < self._most_running and self._placer.fork(seq, sibling, len(self.running)):
                bisect.insort(self.running, sibling, key=by_seniority)
            else:
                self._queue(sibling)

    # Book-keeping

    def _check(self, request: Request) -> None:
        require(len(request.prompt) > 0, "a request has at least one prompt token")
        alone = request.n == 1 and request.max_tokens == 0 and request.prompt_logprobs is None
        require(request.pooling is None or alone, "an embedding is all that its request asks for")
        longest_pages = pages_for(len(request.prompt) + request.max_tokens, self.kv.page_tokens)
        require(longest_pages <= self.limits.capacity_pages, "a request is longer than the memory holds")

    def _end_all(self, finish: FinishReason) -> list[Emit]:
        groups = [[seq, *seq.siblings] for seq in [*self.running, *self.waiting]]
        self.running, self.waiting, self._by_id, self.paced = [], [], {}, 0
        return [Emit(seq.request.id, seq.index, finish=finish) for group in groups for seq in group]

    def _new_sequence(self, request: Request, index: int, now: float, grammar: Any) -> Sequence:
        self._next_number += 1
        return Sequence(self._next_number, request, index, now, grammar)

    def _queue(self, seq: Sequence) -> None:
        bisect.insort(self.waiting, seq, key=by_seniority)

    def _enrol(self, seq: Sequence) -> None:
        self._by_id.setdefault(seq.request.id, []).append(seq)
        self.paced += seq.lane.paced

    def _forget(self, seq: Sequence) -> None:
        """A choice is over, wherever it was: nothing of it is left here, and its pages go back."""
        require(_take_out(self.running, seq) or _take_out(self.waiting, seq), "a sequence runs or waits until its end")
        self.paced -= seq.lane.paced
        of_request = self._by_id[seq.request.id]
        of_request.remove(seq)
        if not of_request:
            del self._by_id[seq.request.id]
        self._placer.release(seq)


def _take_out(group: list[Sequence], seq: Sequence) -> bool:
    """Remove a sequence from a list in the order of age; False when it is not in it."""
    at = bisect.bisect_left(group, by_seniority(seq), key=by_seniority)
    if at == len(group) or group[at] is not seq:
        return False
    del group[at]
    return True


def _spoilt(drawn: Sampled | None, reading: Reading | None) -> bool:
    """True when what the step computed for a sequence cannot be used, nor anything that would build on it."""
    if reading is not None and reading.fault is not None:
        return True
    return drawn is not None and drawn.fault is Fault.NOT_FINITE


def _hand_over(seq: Sequence) -> None:
    """The first choice was cancelled before it drew anything: the next one takes over its place, pages and siblings."""
    heir, *seq.siblings = seq.siblings
    seq.index = heir.index
