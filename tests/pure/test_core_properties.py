"""The whole pure core under random load: batchers of one or two models, one pool, one Scarcity, simulated KV memory.

Whatever arrives, is cancelled, preempted or found in the prefix cache, every choice must produce exactly what the twin
generates alone, and after every step every page must be accounted for.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import random
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twin_batcher import POISON, VOCABULARY, Memory, Rhythm, embedding, expected_slots, generate, scores
from twin_sample import same_history

from janus_server.kv.blocks import KvPages, pages_for
from janus_server.kv.pages import PagePool
from janus_server.kv.prefix import PrefixCache
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.placer import Placer
from janus_server.sched.scarcity import Scarcity
from janus_server.sched.sequence import Sequence
from janus_server.types import (
    Batch,
    Chunk,
    Emit,
    FinishReason,
    Owner,
    PageKind,
    Pooling,
    Request,
    SampleSpec,
    Sampling,
    ScoreSpec,
    TokenLogprob,
)

Pick = Callable[[int, int], int]
Choice = tuple[str, int]
WEIGHTS = Owner("weights", PageKind.WEIGHTS)
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Arrival:
    round: int
    model: int
    request: Request
    grammar: Rhythm | None


@dataclasses.dataclass(frozen=True)
class Cancel:
    round: int
    request_id: str
    index: int | None


@dataclasses.dataclass(frozen=True)
class Scenario:
    page_tokens: int
    pool_pages: int
    weight_pages: int
    models: int
    limits: BatcherLimits
    arrivals: tuple[Arrival, ...]
    cancels: tuple[Cancel, ...]
    turns: tuple[int, ...]
    teardown_round: int | None
    floors: tuple[int, ...]
    ceilings: tuple[int | None, ...]
    cuts: tuple[int | None, ...]  # how many tokens of prompts a step may compute, step by step


def scenario(pick: Pick) -> Scenario:
    """A random load; pick(a, b) draws an integer a … b."""
    page_tokens = pick(1, 5)
    models = pick(1, 2)
    prompts: list[tuple[int, ...]] = []
    arrivals = []
    for number in range(pick(1, 9)):
        prompt = _prompt(pick, prompts)
        prompts.append(prompt)
        grammar = Rhythm(pick(0, 5), pick(0, 9)) if pick(0, 4) == 0 else None
        arrivals.append(Arrival(pick(0, 8), pick(0, models - 1), _request(pick, f"r{number}", prompt), grammar))
    # Now is the round, so requests of one round tie by number; the list is in order of arrival.
    arrivals.sort(key=lambda a: a.round)
    cancels = []
    for _ in range(pick(0, 4)):
        victim = arrivals[pick(0, len(arrivals) - 1)]
        index = None if pick(0, 1) else pick(0, victim.request.n - 1)
        cancels.append(Cancel(victim.round + pick(0, 12), victim.request.id, index))
    capacity = max(pages_for(len(a.request.prompt) + a.request.max_tokens, page_tokens) for a in arrivals)
    weight_pages = pick(0, 2)
    step_tokens = pick(1, 24)
    limits = BatcherLimits(
        context_tokens=pick(12, 40),
        capacity_pages=capacity,
        step_tokens=step_tokens,
        sequences=pick(1, 8),
        shared_prompts=pick(1, 4),
        one_prompt_at_a_time=pick(0, 3) == 0,
        prefix_caching=pick(0, 3) != 0,
    )
    turns = tuple(pick(0, 3) for _ in range(6))
    cuts = tuple(pick(0, 6) or None for _ in range(3))
    slack = pick(0, 3) * pick(0, 3)
    teardown = pick(1, 12) if pick(0, 7) == 0 else None
    floors = tuple(pick(0, capacity + 3) if pick(0, 2) == 0 else 0 for _ in range(models))
    ceilings = tuple(max(capacity, f) + pick(0, 2) if pick(0, 2) == 0 else None for f in floors)
    # As `pages_needed` plans: room for every floor, and for the longest sequence beyond its own.
    pool_pages = weight_pages + sum(floors) + max(0, capacity - min(floors)) + slack
    return Scenario(
        page_tokens, pool_pages, weight_pages, models, limits, tuple(arrivals), tuple(cancels), turns, teardown,
        floors, ceilings, cuts,
    )  # fmt: skip


def _prompt(pick: Pick, earlier: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Often the start of an earlier prompt, so that the prefix cache hits whole pages and parts of pages."""
    base: tuple[int, ...] = ()
    if earlier and pick(0, 3):
        base = earlier[pick(0, len(earlier) - 1)]
        base = base[: pick(0, len(base))]
    tail = tuple(pick(0, VOCABULARY - 1) for _ in range(pick(0 if base else 1, 10 if not base else 4)))
    return base + tail + ((POISON, *tail[:2]) if pick(0, 11) == 0 else ())


def _request(pick: Pick, name: str, prompt: tuple[int, ...]) -> Request:
    kind = pick(0, 11)
    if kind < 2:
        return Request(id=name, model="m", prompt=prompt, max_tokens=0, pooling=list(Pooling)[kind])
    max_tokens = pick(1, 10) if kind > 2 else 0
    history = pick(0, 3) == 0
    return Request(
        id=name,
        model="m",
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=pick(0, max_tokens),
        n=pick(1, 4) if pick(0, 1) else 1,
        sampling=Sampling(seed=pick(0, 2), presence_penalty=1.0 if history else 0.0),
        stop_ids=tuple(range(pick(0, 3))),
        priority=pick(-2, 2) if pick(0, 3) == 0 else 0,
        prompt_logprobs=pick(0, 2) if kind < 6 else None,
    )


def encoded(value: Rhythm | np.ndarray) -> object:
    """What a batch carries beside plain records."""
    return value.tolist() if isinstance(value, np.ndarray) else value.said


class Doubter(Placer):
    """Tries again wherever the placer is sure that trying is no use: it must find no room, and leave no trace."""

    def still_short(self, seq: Sequence, running: int) -> bool:
        if not super().still_short(seq, running):
            return False
        pool, last = self._scarcity._pool, self._shortage
        eased, order = pool.eased, list(self._prefix._nodes)
        assert not self.place(seq, running), "there was room for the head of the queue"
        assert list(self._prefix._nodes) == order, "another try would have changed what is given up first"
        pool.eased, self._shortage = eased, last
        return True


class World:
    """Drives a scenario round by round and checks everything after every step."""

    def __init__(self, plan: Scenario) -> None:
        self.plan = plan
        self.pool = PagePool(plan.pool_pages)
        self.memory = Memory(plan.page_tokens)
        self.scarcity = Scarcity(self.pool)
        if plan.weight_pages:
            weights = self.pool.reserve_low(plan.weight_pages, WEIGHTS)
            assert weights is not None
            weights.commit()
        self.batchers = []
        for model in range(plan.models):
            kv = KvPages(self.pool, f"m{model}", plan.page_tokens, plan.floors[model], plan.ceilings[model])
            batcher = Batcher(kv, PrefixCache(kv, b"secret"), self.scarcity, plan.limits)
            batcher._placer = Doubter(kv, batcher.prefix, self.scarcity, plan.limits.prefix_caching)
            self.batchers.append(batcher)
            self.scarcity.join(batcher)
        self.steps = [0] * plan.models
        self.trace = 0
        self.queue = list(plan.arrivals)
        self.requests: dict[str, tuple[int, Request]] = {}
        self.output: dict[Choice, list[int]] = {}
        self.ends: dict[Choice, FinishReason] = {}
        self.cancelled: set[Choice] = set()
        self.scores: dict[str, list[TokenLogprob]] = {}
        self.embeddings: dict[str, tuple[float, ...]] = {}
        self.rows_read: Counter[str] = Counter()
        self.twin = {
            (a.request.id, i): generate(a.request, i, plan.limits.context_tokens, a.grammar)
            for a in plan.arrivals
            for i in range(a.request.n)
        }

    def run(self) -> None:
        longest = sum(a.request.n * (len(a.request.prompt) + 2 * a.request.max_tokens + 2) for a in self.plan.arrivals)
        bound = 40 + longest * len(self.plan.arrivals)
        for now in range(bound):
            self._events(now)
            turn = self._turn(now)
            progressed = [self._step(model) for model in turn]
            work_left = any(not b.idle for b in self.batchers)
            if not work_left and not self.queue:
                break
            if work_left and len(turn) == self.plan.models:
                assert any(progressed), "work is left and nothing runs"
        else:
            raise AssertionError(f"not finished after {bound} rounds")
        self._check_end()

    def _turn(self, now: int) -> list[int]:
        """Which models step this round, in which order: all of them, forwards or backwards, or one."""
        turn = self.plan.turns[now] if now < len(self.plan.turns) else now % 2
        order = list(range(self.plan.models))
        return [order, order[::-1], order[:1], order[-1:]][turn]

    def _events(self, now: int) -> None:
        while self.queue and self.queue[0].round <= now:
            arrival = self.queue.pop(0)
            self.batchers[arrival.model].add(arrival.request, float(now), arrival.grammar)
            self.scores[arrival.request.id] = []
            self.requests[arrival.request.id] = (arrival.model, arrival.request)
            for index in range(arrival.request.n):
                self.output[arrival.request.id, index] = []
        for cancel in self.plan.cancels:
            if cancel.round == now and cancel.request_id in self.requests:
                self._cancel(cancel)
        if self.plan.teardown_round == now:
            self._teardown(self.batchers[0])
        self._check_pages()

    def _cancel(self, cancel: Cancel) -> None:
        model, request = self.requests[cancel.request_id]
        self.batchers[model].cancel(cancel.request_id, cancel.index)
        indices = range(request.n) if cancel.index is None else [cancel.index]
        self.cancelled |= {(request.id, i) for i in indices if (request.id, i) not in self.ends}

    def _teardown(self, batcher: Batcher) -> None:
        self._take_in(batcher.cancel_all())
        assert batcher.idle
        batcher.prefix.clear()
        assert batcher.kv.held == 0

    def _step(self, model: int) -> bool:
        batcher = self.batchers[model]
        before = {s.number for s in batcher.running}
        starved = [b.starved.order for b in self.batchers if b is not batcher and b.starved is not None]
        secure = [(b, b.kv.held, list(b.running)) for b in self.batchers if b is not batcher and not b.kv.surplus]
        batch = batcher.plan(0.0, self.plan.cuts[self.steps[model] % len(self.plan.cuts)])
        for other, pages, running in secure:
            assert (other.kv.held, other.running) == (pages, running), "a model was pressed below its floor"
        newcomers = [s for s in batcher.running if s.number not in before]
        for seq in newcomers if not self._sheltered(batcher) else []:
            assert not starved or seq.order <= min(starved), "a younger model pushed in"
        self._check_pages()
        if batch is None:
            return False
        self.steps[model] += 1
        assert batch.step == self.steps[model]
        self.trace = zlib.crc32(msgspec.json.encode(batch, enc_hook=encoded), self.trace)
        self._check_batch(batcher, batch)
        answers = self.memory.run(batch)
        self._check_memory(batcher, batch)
        emits = batcher.commit(batch, *answers)
        drawn = [one.token for one in answers.sampled if one.token is not None]
        assert [e.token for e in emits if e.token is not None] == drawn
        self._take_in(emits)
        self._check_pages()
        return True

    def _sheltered(self, batcher: Batcher) -> bool:
        """Everything that runs stays within its model's floor to its end."""
        ends = [len(s.request.prompt) + s.request.max_tokens for s in batcher.running]
        return sum(pages_for(end, self.plan.page_tokens) for end in ends) <= batcher.kv.floor_pages

    def _take_in(self, emits: list[Emit]) -> None:
        for emit in emits:
            choice = (emit.request_id, emit.index)
            assert choice not in self.ends, f"{choice} spoke after its end"
            assert choice not in self.cancelled, f"{choice} spoke after it was cancelled"
            prompt = self.requests[emit.request_id][1].prompt
            assert 0 <= emit.cached_tokens < len(prompt)
            assert not emit.cached_tokens or (self.plan.limits.prefix_caching and not self.output[choice])
            assert emit.token is not None or emit.finish is not None or emit.prompt_logprobs
            self.scores[emit.request_id] += emit.prompt_logprobs
            if emit.embedding is not None:
                assert emit.finish is FinishReason.STOP
                self.embeddings[emit.request_id] = emit.embedding
            if emit.token is not None:
                self.output[choice].append(emit.token)
            if emit.finish is not None:
                self.ends[choice] = emit.finish

    def _check_batch(self, batcher: Batcher, batch: Batch) -> None:
        limits = self.plan.limits
        running = {s.number: s for s in batcher.running}
        assert 0 < batch.tokens <= limits.step_tokens
        assert len(running) <= limits.sequences
        assert len({c.sequence for c in batch.chunks}) == len(batch.chunks)
        assert len({c.target for c in batch.copies}) == len(batch.copies)
        if limits.one_prompt_at_a_time:
            assert sum(s.gap > 1 for s in batcher.running) <= 1
        for chunk in batch.chunks:
            seq = running[chunk.sequence]
            end = chunk.start + len(chunk.tokens)
            assert chunk.start == seq.computed and chunk.tokens
            assert chunk.tokens == tuple(seq.tokens[chunk.start : end])
            assert len(chunk.pages) == pages_for(end, self.plan.page_tokens)
            assert (chunk.sample is not None) == (end == len(seq.tokens) and seq.request.max_tokens > 0)
            if chunk.sample is not None:
                self._check_sample(seq, chunk.sample)
            if chunk.read is not None:
                self._check_read(seq, chunk)

    def _check_read(self, seq: Sequence, chunk: Chunk) -> None:
        """Every row that is to be read is read once, in order, with the rows of the prompt that were before."""
        place = seq.request.id
        first = chunk.start + chunk.read.first
        if seq.request.pooling is Pooling.LAST:
            assert first == len(seq.request.prompt) - 1
            return
        assert first == self.rows_read[place], "a row was left out, or read twice"
        rows = len(chunk.tokens) - chunk.read.first
        if isinstance(chunk.read, ScoreSpec):
            rows = len(chunk.read.targets)
            assert chunk.read.targets == seq.request.prompt[first + 1 : first + rows + 1]
        self.rows_read[place] += rows

    @staticmethod
    def _check_sample(seq: Sequence, spec: SampleSpec) -> None:
        request = seq.request
        generated = tuple(seq.tokens[len(request.prompt) :])
        assert (spec.sampling, spec.choice) == (request.sampling, seq.index)
        assert spec.position == len(generated)
        assert spec.banned == (request.stop_ids if len(generated) < request.min_tokens else ())
        assert (spec.history is not None) == request.sampling.needs_history == (seq.seen is not None)
        assert spec.history is None or same_history(spec.history, request.prompt, generated)

    def _check_memory(self, batcher: Batcher, batch: Batch) -> None:
        """Every sequence of the step reads back, through its page table, exactly what the twin would have there."""
        running = {s.number: s for s in batcher.running}
        for chunk in batch.chunks:
            seq = running[chunk.sequence]
            end = chunk.start + len(chunk.tokens)
            true = [*seq.request.prompt, *self.twin[seq.request.id, seq.index][0]][:end]
            assert self.memory.read(chunk.pages, end) == expected_slots(true), f"{seq.request.id}/{seq.index}"

    def _check_pages(self) -> None:
        self.pool.check()
        held = self.pool.held()
        for batcher in self.batchers:
            kv = batcher.kv
            assert kv.ceiling_pages is None or kv.held <= kv.ceiling_pages, "above its ceiling"
            assert kv.available >= kv.floor_pages - kv.held, "somebody took what a floor keeps"
            nodes = [node.page for node in batcher.prefix._nodes.values()]
            of_sequences = Counter(page for s in batcher.running for page in s.pages)
            copies = Counter(s.copy.source for s in batcher.running if s.copy is not None)
            refs = of_sequences + copies + Counter(nodes)
            assert dict(kv._refs) == dict(refs), "references and holders differ"
            assert held.get(kv.owner, 0) == len(refs) == kv.held
            assert len(set(nodes)) == len(nodes)
            assert all(s.computed == 0 and not s.pages and s.copy is None for s in batcher.waiting)
            by_id: dict[str, list[Sequence]] = {}
            for seq in sorted([*batcher.running, *batcher.waiting], key=lambda s: s.number):
                by_id.setdefault(seq.request.id, []).append(seq)
            assert batcher._by_id == by_id, "a cancel would miss a sequence, or meet one that ended"
            alike = all(request.n == 1 and request.priority == 0 for _, request in self.requests.values())
            if alike and batcher.running and batcher.waiting:
                assert batcher.running[-1].order < batcher.waiting[0].order, "a younger one was admitted first"
            for seq in batcher.running:
                writable = seq.pages[seq.computed // self.plan.page_tokens :]
                assert all(of_sequences[page] == 1 for page in writable), "two sequences can write one page"
                assert not set(writable) & set(nodes), "a cached page can still be written"
        for page, owner in enumerate(self.pool._owners):
            if owner is None:
                self.memory.forget(page)

    def _check_end(self) -> None:
        for _, request in self.requests.values():
            ends = [self.ends.get((request.id, index)) for index in range(request.n)]
            whole = FinishReason.STOP in ends or FinishReason.LENGTH in ends
            said = self.scores[request.id]
            assert said == (scores(request) if whole else scores(request)[: len(said)])
            assert self.embeddings.get(request.id) == (embedding(request) if whole else None)
        for choice, (tokens, finish) in self.twin.items():
            said = self.output[choice]
            if choice in self.cancelled:
                assert said == tokens[: len(said)] and choice not in self.ends
            elif self.ends[choice] is FinishReason.ABORT:
                assert said == tokens[: len(said)] and self.plan.teardown_round is not None
            else:
                assert (said, self.ends[choice]) == (tokens, finish)
        for batcher in self.batchers:
            assert batcher.kv.held == len(batcher.prefix)
            batcher.prefix.clear()
            assert batcher.kv.held == 0
        assert self.pool.free_pages == self.plan.pool_pages - self.plan.weight_pages
        self.pool.check()


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    return scenario(lambda a, b: draw(st.integers(a, b)))


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenarios())
def test_random_load_equals_the_twin_and_every_page_adds_up(plan: Scenario) -> None:
    World(plan).run()


def trace(scenarios_n: int) -> list[int]:
    """A checksum over every batch of so many random loads: what the core decided, page by page."""
    traces = []
    for seed in range(scenarios_n):
        world = World(scenario(random.Random(seed).randint))
        world.run()
        traces.append(world.trace)
    return traces


def test_decisions_are_the_same_under_python_o_and_another_hash_seed() -> None:
    code = "import test_core_properties as t; print(t.trace(40))"
    path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "12345"}
    run = subprocess.run([sys.executable, "-O", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(trace(40))


def test_invariants_are_raised_not_asserted() -> None:
    """`python -O` drops assert statements, so the server has none."""
    found = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in sorted((REPOSITORY / "janus_server").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert not found
