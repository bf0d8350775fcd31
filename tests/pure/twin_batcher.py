"""The twin of the batcher, and a fake model over simulated KV memory, for the property tests of the pure core.

`generate` is what a request must produce: one sequence at a time, no pages, no cache. `Memory` is the device: it keeps
which (token, whole prefix) each slot of each page holds, so a lost, aliased, stale or wrongly copied slot is seen the
moment a sequence reads it back. `Node` puts real batchers on one pool over that memory, for tests of single situations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from janus_server.kv.blocks import KvPages
from janus_server.kv.pages import PagePool
from janus_server.kv.prefix import PrefixCache
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.scarcity import Scarcity
from janus_server.types import (
    Batch,
    Chunk,
    Emit,
    Fault,
    FinishReason,
    PageCopy,
    Pooling,
    PoolSpec,
    Reading,
    Request,
    Sampled,
    SampleSpec,
    ScoreSpec,
    TokenLogprob,
)

VOCABULARY = 6
POISON = 1 << 20  # a prompt token whose row in the model is not finite: neither is anything after it
_SPOILT = -1
_START = 0x9E3779B97F4A7C15
_MASK = (1 << 61) - 1

Slot = tuple[int, int]  # a token, and the chain over the whole sequence up to it


def chain(before: int, token: int) -> int:
    """A number that names a whole token sequence, extended by one token."""
    if _SPOILT == before or token == POISON:
        return _SPOILT
    mixed = ((before ^ (token + 1)) * 0xD6E8FEB86659FD93) & _MASK
    return mixed ^ (mixed >> 29)


def chain_of(tokens: Sequence[int]) -> int:
    value = _START
    for token in tokens:
        value = chain(value, token)
    return value


class Rhythm:
    """A grammar: what may come next depends on what was said; it is complete after `length` tokens, or runs dry."""

    failed = False

    def __init__(self, length: int, dry_at: int = -1, said: tuple[int, ...] = ()) -> None:
        self.length, self.dry_at, self.said = length, dry_at, said

    @property
    def done(self) -> bool:
        return len(self.said) >= self.length

    def copy(self) -> Rhythm:
        return Rhythm(self.length, self.dry_at, self.said)

    def mask(self) -> list[int]:
        if len(self.said) == self.dry_at:
            return []
        return sorted({(sum(self.said) + 2 * i) % VOCABULARY for i in range(1 + len(self.said) % 3)})

    def accept(self, token: int) -> bool:
        self.said += (token,)
        return True


def draw(context: int, spec: SampleSpec) -> Sampled:
    """The fake model: the next token as a function of everything before it, seed, choice and what may be drawn."""
    if context == _SPOILT:
        return Sampled(None, fault=Fault.NOT_FINITE)
    grammar = spec.matcher
    if grammar is not None and grammar.done:
        return Sampled(None, done=True)
    possible = list(range(VOCABULARY)) if grammar is None else grammar.mask()
    if not possible:
        return Sampled(None, fault=Fault.GRAMMAR)
    allowed = [token for token in possible if token not in spec.banned] or possible
    token = allowed[chain(chain(context, spec.sampling.seed + VOCABULARY + 1), spec.choice) % len(allowed)]
    return Sampled(token, done=grammar is not None and grammar.accept(token) and grammar.done)


def generate(
    request: Request, index: int, context_tokens: int, grammar: Rhythm | None = None
) -> tuple[list[int], FinishReason]:
    """The tokens of one choice and why it ends, generated alone."""
    output: list[int] = []
    if spoilt(request):
        return output, FinishReason.ERROR
    if request.max_tokens == 0:
        return output, FinishReason.LENGTH if request.pooling is None else FinishReason.STOP
    own = None if grammar is None else grammar.copy()
    while True:
        banned = request.stop_ids if len(output) < request.min_tokens else ()
        context = chain_of([*request.prompt, *output])
        drawn = draw(context, SampleSpec(request.sampling, len(output), index, banned, matcher=own))
        if drawn.token is not None:
            output.append(drawn.token)
        if drawn.fault is not None:
            return output, FinishReason.ERROR
        if drawn.done or drawn.token in request.stop_ids:
            return output, FinishReason.STOP
        if len(output) >= request.max_tokens or len(request.prompt) + len(output) >= context_tokens:
            return output, FinishReason.LENGTH


def spoilt(request: Request) -> bool:
    """Whether something is drawn or read after a poisoned token."""
    rows = len(request.prompt)
    if request.max_tokens == 0 and request.pooling is None:
        rows = 0 if request.prompt_logprobs is None else rows - 1
    return POISON in request.prompt[:rows]


def scores(request: Request) -> list[TokenLogprob]:
    """The log probabilities of a prompt that is not spoilt."""
    if request.prompt_logprobs is None:
        return []
    prompt = request.prompt
    return [_score(chain_of(prompt[:i]), prompt[i], request.prompt_logprobs) for i in range(1, len(prompt))]


def embedding(request: Request) -> tuple[float, ...] | None:
    """The embedding of a prompt that is not spoilt."""
    rows = range(1, len(request.prompt) + 1)
    if request.pooling is None:
        return None
    if request.pooling is Pooling.LAST:
        rows = rows[-1:]
    return (sum(chain_of(request.prompt[:i]) for i in rows) / len(rows),)


def _score(context: int, target: int, top: int) -> TokenLogprob:
    value = -math.log2(3 + chain(context, target))
    return TokenLogprob(target, value, ((target, value),) * top)


class Answers(NamedTuple):
    """What the device says of a step."""

    sampled: list[Sampled]
    readings: list[Reading]


class Memory:
    """What every slot of every page holds: the device's KV memory, shared by all models of the pool."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._slots: dict[int, dict[int, Slot]] = {}

    def copy(self, copy: PageCopy) -> None:
        source = self._slots.get(copy.source, {})
        if not source or copy.source == copy.target:
            raise AssertionError(f"a copy of what is not there: {copy}")
        self._slots[copy.target] = dict(source)

    def write(self, chunk: Chunk) -> list[int]:
        """Compute a chunk's positions in order, each from the one before it as memory has it; the chain at each."""
        context = self._read(chunk.pages, chunk.start - 1)[1] if chunk.start else _START
        rows = []
        for offset, token in enumerate(chunk.tokens):
            page, slot = divmod(chunk.start + offset, self.page_tokens)
            context = chain(context, token)
            self._slots.setdefault(chunk.pages[page], {})[slot] = (token, context)
            rows.append(context)
        return rows

    def read(self, pages: Sequence[int], tokens: int) -> list[Slot]:
        """The first `tokens` positions of a page table."""
        return [self._read(pages, position) for position in range(tokens)]

    def forget(self, page: int) -> None:
        """The page is free: whatever it held is garbage now."""
        self._slots.pop(page, None)

    def run(self, batch: Batch) -> Answers:
        """The executor: copies first, then every chunk, then what is read and drawn of its rows."""
        for copy in batch.copies:
            self.copy(copy)
        answers = Answers([], [])
        for chunk, rows in [(chunk, self.write(chunk)) for chunk in batch.chunks]:
            if chunk.read is not None:
                answers.readings.append(_reading(chunk.read, rows[chunk.read.first :]))
            if chunk.sample is not None:
                answers.sampled.append(draw(rows[-1], chunk.sample))
        return answers

    def _read(self, pages: Sequence[int], position: int) -> Slot:
        page, slot = divmod(position, self.page_tokens)
        return self._slots[pages[page]][slot]


def _reading(spec: ScoreSpec | PoolSpec, rows: list[int]) -> Reading:
    if isinstance(spec, ScoreSpec):
        rows = rows[: len(spec.targets)]
        if _SPOILT in rows:
            return Reading(fault=Fault.NOT_FINITE)
        return Reading(tuple(_score(c, target, spec.top) for c, target in zip(rows, spec.targets, strict=True)))
    if _SPOILT in rows:
        return Reading(fault=Fault.NOT_FINITE)
    sums = sum(rows, spec.sums or 0)
    return Reading(sums=sums) if spec.mean_of is None else Reading(embedding=(sums / spec.mean_of,))


def expected_slots(tokens: Sequence[int]) -> list[Slot]:
    """What memory must hold for these tokens."""
    slots: list[Slot] = []
    context = _START
    for token in tokens:
        context = chain(context, token)
        slots.append((token, context))
    return slots


class Node:
    """One pool of `pages`, a batcher a model, and the fake device."""

    def __init__(
        self,
        pages: int,
        page_tokens: int = 4,
        models: int = 1,
        floors: tuple[int, ...] = (),
        ceilings: tuple[int | None, ...] = (),
        **limits: int | bool,
    ) -> None:
        self.pool = PagePool(pages)
        self.memory = Memory(page_tokens)
        self.scarcity = scarcity = Scarcity(self.pool)
        self.limits = BatcherLimits(**{"context_tokens": 1000, "capacity_pages": pages, **limits})
        bounds = list(zip((*floors, *[0] * models), (*ceilings, *[None] * models), strict=False))[:models]
        kvs = [KvPages(self.pool, f"m{model}", page_tokens, *bounds[model]) for model in range(models)]
        self.batchers = [Batcher(kv, PrefixCache(kv, b"s"), scarcity, self.limits) for kv in kvs]
        for batcher in self.batchers:
            scarcity.join(batcher)
        self.batcher = self.batchers[0]
        self.emits: list[Emit] = []

    def step(self, model: int = 0) -> Batch | None:
        batcher = self.batchers[model]
        batch = batcher.plan(0.0)
        if batch is not None:
            self.emits += batcher.commit(batch, *self.memory.run(batch))
        self.pool.check()
        return batch

    def run(self, rounds: int = 10_000) -> list[Emit]:
        for _ in range(rounds):
            ran = [self.step(model) for model in range(len(self.batchers))]
            if all(b.idle for b in self.batchers):
                return self.emits
            if not any(ran):
                raise AssertionError("work is left and nothing runs")
        raise AssertionError("not finished")

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        said = [e for e in self.emits if (e.request_id, e.index) == (request_id, index)]
        return [e.token for e in said if e.token is not None]

    def scores(self, request_id: str) -> list[TokenLogprob]:
        return [one for e in self.emits if e.request_id == request_id for one in e.prompt_logprobs]

    def right(self, *requests: Request) -> bool:
        """Every choice said what the twin says, and ended once."""
        for request in requests:
            for index in range(request.n):
                tokens, finish = generate(request, index, self.limits.context_tokens)
                ends = [e.finish for e in self.emits if (e.request_id, e.index) == (request.id, index) and e.finish]
                if (self.tokens(request.id, index), ends) != (tokens, [finish]):
                    return False
        return True


def request_of(name: str, prompt: int | tuple[int, ...], max_tokens: int = 4, **fields: object) -> Request:
    """A prompt of that many tokens of its own, or exactly these."""
    if isinstance(prompt, int):
        start = sum(name.encode())
        prompt = tuple(start + 7 * i for i in range(prompt))
    return Request(id=name, model="m", prompt=prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
