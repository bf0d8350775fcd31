"""The twin of the batcher, and a fake model over simulated KV memory, for the property tests of the pure core.

`generate` is what a request must produce: one sequence at a time, no pages, no cache. `Memory` is the device: it keeps
which (token, whole prefix) each slot of each page holds, so a lost, aliased, stale or wrongly copied slot is seen the
moment a sequence reads it back. `Node` puts real batchers on one pool over that memory, for tests of single situations.
"""

from __future__ import annotations

from collections.abc import Sequence

from janus_server.kv.blocks import KvPages
from janus_server.kv.pages import PagePool
from janus_server.kv.prefix import PrefixCache
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.scarcity import Scarcity
from janus_server.types import Batch, Chunk, Emit, FinishReason, PageCopy, Request, Sampled

VOCABULARY = 6
_START = 0x9E3779B97F4A7C15
_MASK = (1 << 61) - 1

Slot = tuple[int, int]  # a token, and the chain over the whole sequence up to it


def chain(before: int, token: int) -> int:
    """A number that names a whole token sequence, extended by one token."""
    mixed = ((before ^ (token + 1)) * 0xD6E8FEB86659FD93) & _MASK
    return mixed ^ (mixed >> 29)


def chain_of(tokens: Sequence[int]) -> int:
    value = _START
    for token in tokens:
        value = chain(value, token)
    return value


def draw(context: int, seed: int, choice: int, banned: Sequence[int]) -> int:
    """The fake model: the next token as a function of everything before it, seed, choice and what is banned."""
    value = chain(chain(context, seed + VOCABULARY), choice)
    allowed = [token for token in range(VOCABULARY) if token not in banned]
    return allowed[value % len(allowed)]


def generate(request: Request, index: int, context_tokens: int) -> tuple[list[int], FinishReason]:
    """The tokens of one choice and why it ends, generated alone."""
    output: list[int] = []
    context = chain_of(request.prompt)
    while True:
        banned = request.stop_ids if len(output) < request.min_tokens else ()
        token = draw(context, request.sampling.seed, index, banned)
        output.append(token)
        context = chain(context, token)
        if token in request.stop_ids:
            return output, FinishReason.STOP
        if len(output) >= request.max_tokens or len(request.prompt) + len(output) >= context_tokens:
            return output, FinishReason.LENGTH


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

    def write(self, chunk: Chunk) -> int:
        """Compute a chunk's positions in order, each from the one before it as memory has it; the last one's chain."""
        context = self._read(chunk.pages, chunk.start - 1)[1] if chunk.start else _START
        for offset, token in enumerate(chunk.tokens):
            page, slot = divmod(chunk.start + offset, self.page_tokens)
            context = chain(context, token)
            self._slots.setdefault(chunk.pages[page], {})[slot] = (token, context)
        return context

    def read(self, pages: Sequence[int], tokens: int) -> list[Slot]:
        """The first `tokens` positions of a page table."""
        return [self._read(pages, position) for position in range(tokens)]

    def forget(self, page: int) -> None:
        """The page is free: whatever it held is garbage now."""
        self._slots.pop(page, None)

    def run(self, batch: Batch) -> list[Sampled]:
        """The executor: copies first, then every chunk, then a token for each row that samples."""
        for copy in batch.copies:
            self.copy(copy)
        contexts = [self.write(chunk) for chunk in batch.chunks]
        return [
            Sampled(draw(context, chunk.sample.sampling.seed, chunk.sample.choice, chunk.sample.banned))
            for chunk, context in zip(batch.chunks, contexts, strict=True)
            if chunk.sample is not None
        ]

    def _read(self, pages: Sequence[int], position: int) -> Slot:
        page, slot = divmod(position, self.page_tokens)
        return self._slots[pages[page]][slot]


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

    def __init__(self, pages: int, page_tokens: int = 4, models: int = 1, **limits: int | bool) -> None:
        self.pool = PagePool(pages)
        self.memory = Memory(page_tokens)
        scarcity = Scarcity(self.pool)
        self.limits = BatcherLimits(**{"context_tokens": 1000, "capacity_pages": pages, **limits})
        kvs = [KvPages(self.pool, f"m{model}", page_tokens) for model in range(models)]
        self.batchers = [Batcher(kv, PrefixCache(kv, b"s"), scarcity, self.limits) for kv in kvs]
        for batcher in self.batchers:
            scarcity.join(batcher)
        self.batcher = self.batchers[0]
        self.emits: list[Emit] = []

    def step(self, model: int = 0) -> Batch | None:
        batcher = self.batchers[model]
        batch = batcher.plan(0.0)
        if batch is not None:
            self.emits += batcher.commit(batch, self.memory.run(batch))
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

    def tokens(self, request_id: str, index: int = 0) -> list[int | None]:
        return [e.token for e in self.emits if (e.request_id, e.index) == (request_id, index)]

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
