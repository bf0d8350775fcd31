"""A node in the `step` fidelity: the real batchers, turns and page pool, imaginary tokens, steps of known length.

Everything that the live device thread decides is decided by the same code here (`sched.batcher`, `sched.turn`,
`sched.scarcity`, `kv`); only what a step takes is the roofline's. `devices.make` makes it, `world` drives it. It costs
some ten microseconds for every sequence in every step: `fluid` is for whole days.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from janus_server.errors import require
from janus_server.kv.blocks import KvPages
from janus_server.kv.pages import PagePool
from janus_server.kv.prefix import PrefixCache
from janus_server.orders import Busy
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.scarcity import Scarcity
from janus_server.sched.turn import Turn
from janus_server.types import Batch, Owner, PageKind, Promise, Request, Sampled

from .batching import Promised, Rules, check_length, longest_tokens, promised, room_pages
from .physics import Speed, page_tokens
from .records import Call, Emit, ModelSpec, NodeSpec

_SECRET = b"imaginary"
_TOKEN = Sampled(0)


class _Engine:
    """One model on the node. first holds the calls whose first token has not come."""

    __slots__ = ("batcher", "calls", "ended_s", "first", "speed", "weights")

    def __init__(self, batcher: Batcher, speed: Speed, weights: tuple[int, ...], now: float) -> None:
        self.batcher, self.speed, self.weights, self.ended_s = batcher, speed, weights, now
        self.calls: dict[str, int] = {}
        self.first: set[str] = set()


class Stepwise:
    """See `records.Device`. A step that has begun ends as it was planned; calls that come meanwhile join the next."""

    def __init__(self, node: NodeSpec, models: Sequence[ModelSpec], promises: Sequence[Promised], rules: Rules) -> None:
        self._node, self._promises, self._rules = node, promises, rules
        self._models = {spec.known.model: spec for spec in models}
        self._speeds = {name: Speed(spec, node.shape) for name, spec in self._models.items()}
        self._longest = {name: longest_tokens(spec, node, rules) for name, spec in self._models.items()}
        self._pool = PagePool(node.pool_pages)
        self._scarcity = Scarcity(self._pool)
        self._turn = Turn()
        self._engines: dict[str, _Engine] = {}
        self._used: dict[str, float] = {}
        self._factor = 1.0
        self._step: tuple[str, Batch, float, float] | None = None  # whose, what, when it began, when it ends
        self._ready_s = 0.0  # nothing has changed since, but for what ends the step

    def up(self, model: str, now: float) -> None:
        spec = self._models[model]
        require(model not in self._engines, f"{model} is up on {self._node.name} already")
        weights, owner = spec.known.weight_pages, Owner(model, PageKind.WEIGHTS)
        running = self._stepping()
        found = self._scarcity.clear(weights) and self._pool.reserve_low(weights, owner)
        require(bool(found), f"the weights of {model} find no {weights} pages on {self._node.name}")
        pages = found.commit() if found else ()
        batcher = self._batcher(spec)
        self._scarcity.join(batcher)
        self._turn.join(model, round(spec.shape.weight_bytes / spec.known.shards))
        self._engines[model] = _Engine(batcher, self._speeds[model], pages, now)
        if self._step is not None and self._stepping() < running:
            # Sequences of the step were preempted for the weights: a live node takes orders between steps.
            self._spend(self._step[0], now - self._step[2])
            self._step, self._ready_s = None, now

    def down(self, model: str, now: float) -> list[int]:
        engine = self._engines.pop(model)
        if self._step is not None and self._step[0] == model:
            self._spend(model, now - self._step[2])
            self._step = None
        lost = [engine.calls[id_] for id_ in engine.calls]
        engine.batcher.cancel_all()
        engine.batcher.prefix.clear()
        self._scarcity.leave(engine.batcher)
        self._turn.leave(model)
        self._pool.release(Owner(model, PageKind.WEIGHTS), engine.weights)
        self._ready_s = now
        return lost

    def begin(self, call: Call, model: str, now: float) -> None:
        check_length(call, model, self._longest[model], self._node.name)
        engine, promise, id_ = self._engines[model], promised(self._promises, call.app), str(call.id)
        prompt = self._rules.prompt(call) if self._rules.prompt is not None else (0,) * call.input_tokens
        request = Request(
            id=id_, model=model, prompt=prompt, max_tokens=call.output_tokens, priority=promise.priority,
            promise=Promise(promise.ttft_s, promise.tpot_s) if promise.paced else None,
        )  # fmt: skip
        engine.batcher.add(request, call.at_s)
        engine.calls[id_] = call.id
        engine.first.add(id_)
        self._ready_s = now

    def advance(self, now: float) -> list[Emit]:
        emits: list[Emit] = []
        while True:
            if self._step is None and (self._ready_s >= now or not self._start(self._ready_s)):
                return emits
            if self._step is None or self._step[3] > now:
                return emits
            emits += self._end()

    def next_s(self, now: float) -> float | None:
        if self._step is None:
            self._start(max(now, self._ready_s))
        return None if self._step is None else self._step[3]

    def slow(self, factor: float, now: float) -> None:
        require(factor > 0.0, "steps take a positive time")
        if self._step is not None:
            model, batch, began_s, ends_s = self._step
            self._step = model, batch, began_s, now + max(0.0, ends_s - now) * factor / self._factor
        self._factor = factor

    def busy(self, now: float) -> dict[str, Busy]:
        return {
            name: Busy(len(e.batcher.running), len(e.batcher.waiting), 0.0 if e.calls else now - e.ended_s)
            for name, e in self._engines.items()
        }

    def used(self) -> Mapping[str, float]:
        return self._used

    def check(self) -> None:
        """Raise Bug unless the pool's books are right and no call is left that nothing is done for."""
        self._pool.check()
        for name, engine in self._engines.items():
            require(engine.batcher.idle == (not engine.calls), f"{name}: calls and sequences differ")

    def _batcher(self, spec: ModelSpec) -> Batcher:
        size, rules = page_tokens(spec, self._node.page_bytes), self._rules
        longest = self._longest[spec.known.model]
        ceiling = room_pages(spec, self._node, rules) if rules.parts else None
        kv = KvPages(self._pool, spec.known.model, size, spec.known.floor_pages, ceiling)
        limits = BatcherLimits(
            context_tokens=longest + 1, capacity_pages=-(-longest // size), step_tokens=rules.step_tokens,
            sequences=rules.sequences, shared_prompts=rules.shared_prompts,
            one_prompt_at_a_time=rules.one_prompt_at_a_time, prefix_caching=rules.prompt is not None,
        )  # fmt: skip
        return Batcher(kv, PrefixCache(kv, _SECRET), self._scarcity, limits)

    def _start(self, now: float) -> bool:
        """Begin a step of whoever's turn it is; False when nothing can run."""
        at_work = [(name, engine.batcher) for name, engine in self._engines.items() if not engine.batcher.idle]
        for choice in self._turn.choices(now, at_work) if at_work else ():
            engine = self._engines[choice.model]
            batch = engine.batcher.plan(now, choice.prompt_tokens)
            if batch is not None:
                self._step = choice.model, batch, now, now + _seconds(engine.speed, batch) * self._factor
                return True
        require(not at_work, f"calls wait on {self._node.name} and nothing can run")
        return False

    def _end(self) -> list[Emit]:
        if self._step is None:
            return []
        (model, batch, began_s, ends_s), self._step = self._step, None
        self._ready_s = ends_s
        engine = self._engines[model]
        news = engine.batcher.commit(batch, [_TOKEN for c in batch.chunks if c.sample is not None], (), ends_s)
        self._turn.took(model, batch, ends_s - began_s)
        self._spend(model, ends_s - began_s)
        emits: list[Emit] = []
        for one in news:
            id_ = one.request_id
            if id_ in engine.first:
                engine.first.discard(id_)
                emits.append(Emit(engine.calls[id_], ends_s, False))
            if one.finish is not None:
                emits.append(Emit(engine.calls.pop(id_), ends_s, True))
                engine.ended_s = ends_s
        return emits

    def _stepping(self) -> int:
        """Sequences that run of the model whose step it is."""
        return 0 if self._step is None else len(self._engines[self._step[0]].batcher.running)

    def _spend(self, model: str, seconds: float) -> None:
        self._used[model] = self._used.get(model, 0.0) + seconds


def _seconds(speed: Speed, batch: Batch) -> float:
    tokens = pairs = read = 0
    for chunk in batch.chunks:
        n = len(chunk.tokens)
        end = chunk.start + n
        tokens += n
        pairs += n * (chunk.start + end + 1)
        read += end
    return speed.seconds(tokens, pairs / 2, read)
