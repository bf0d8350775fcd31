"""The device thread: owns the pool and every batcher, runs step after step, hands each step's news to the loop.

Nothing else touches a batcher or the pool once the thread runs, so neither needs a lock. Orders come in as frozen
commands and are applied between steps; results leave once a step. The thread decides nothing: `turn` picks whose step
is next, the batcher what is in it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from janus_server.errors import Bug, require
from janus_server.kv.pages import PagePool
from janus_server.model.runner import Runner
from janus_server.observe.log import facts
from janus_server.sched.batcher import Batcher
from janus_server.sched.scarcity import IDLE_PERIODS, Scarcity
from janus_server.sched.sequence import Begun
from janus_server.sched.turn import Choice, Turn
from janus_server.types import BatcherStats, Emit, FinishReason, Owner, Reading, Request, Sampled

log = logging.getLogger("janus.executor")

T = TypeVar("T")

_LONGEST_REST_S = 3600.0  # a queue cannot wait for longer than some centuries; waking up for nothing costs nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """The device side of one model instance. weight_bytes is for a first guess at what a step takes."""

    model: str
    batcher: Batcher
    runner: Runner
    weight_bytes: int = 0

    @property
    def kv_owner(self) -> Owner:
        return self.batcher.kv.owner


class Ask(msgspec.Struct, frozen=True):
    """Run `work` between two steps; `answer` gets what it returns or raises."""

    work: Callable[[], Any]
    answer: concurrent.futures.Future[Any]


class Submit(msgspec.Struct, frozen=True):
    """arrived_s (monotonic) is when it came in: age orders the queue. matcher is its grammar at its start, the device
    thread's from now on. begun: its choices that are not over, where it ran elsewhere; cached: see `Batcher.add`."""

    model: str
    request: Request
    arrived_s: float
    matcher: Any = None
    begun: tuple[Begun, ...] | None = None
    cached: int | None = None


class Cancel(msgspec.Struct, frozen=True):
    model: str
    request_id: str
    index: int | None = None


class EndAll(msgspec.Struct, frozen=True):
    """End every request with an error event (the server stops)."""


class Stop(msgspec.Struct, frozen=True):
    pass


Command = Ask | Submit | Cancel | EndAll | Stop


class StepTime(msgspec.Struct, frozen=True):
    """When the parts of a step began and ended, perf_counter seconds: plan and stage, forward, draw and commit."""

    tokens: int
    start_s: float
    staged_s: float
    computed_s: float
    end_s: float

    @property
    def total_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def device_s(self) -> float:
        """The forward pass alone; the rest is the host's overhead."""
        return self.computed_s - self.staged_s


class StepReport(msgspec.Struct, frozen=True):
    """What the loop learns once a step, or after a change without one (then `step` is None).

    An empty model name means that only the pool changed.
    """

    model: str
    emits: list[Emit]
    pages: dict[Owner, int]
    free_pages: int
    stats: BatcherStats | None = None
    step: StepTime | None = None
    failed: bool = False


class DeviceThread:
    """One per node. `deliver`, `touch` and `release` are called on the device thread; deliver must only hand over.

    touch(page) says that pages from `page` up are in use; release(model) gives the weights of a dead instance back.
    """

    def __init__(
        self,
        pool: PagePool,
        scarcity: Scarcity,
        deliver: Callable[[StepReport], None],
        touch: Callable[[int], None],
        release: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._scarcity = scarcity
        self._deliver = deliver
        self._touch = touch
        self._release = release
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._engines: dict[str, Engine] = {}
        self._turn = Turn()
        self._stopping = False
        self._checked = True
        self._changed: dict[str, None] = {}  # models with news for the loop that no step has told yet
        # Plain values that the device thread writes and the loop reads: when it last finished something, and whether
        # it sleeps for want of work.
        self._moved_s = 0.0
        self._resting = False
        self._thread = threading.Thread(target=self._run, name="janus-device", daemon=True)

    def start(self) -> None:
        self._moved_s = time.monotonic()
        self._thread.start()

    def post(self, command: Command) -> None:
        """Hand over an order; it is applied before the next step. Any thread."""
        if self._resting and self._inbox.empty():
            self._moved_s = time.monotonic()  # until now there was nothing to move
        self._inbox.put(command)

    def ask(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Have `work` run on the device thread between two steps: where the pool may be used. Any thread."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.post(Ask(work, answer))
        return answer

    def attach(self, engine: Engine) -> None:
        """Let a model take its turns. On the device thread, within `ask`."""
        self._scarcity.join(engine.batcher)
        self._turn.join(engine.model, engine.weight_bytes)
        self._engines[engine.model] = engine

    def detach(self, model: str) -> bool:
        """Take a model out of the turns and its KV pages back to the pool; False when it has requests, and stays.

        On the device thread, within `ask`: once this returns True, nothing uses the model's weights. False too when it
        was torn down a moment ago: the loop has not heard of it yet, and what is left is that report's affair.
        """
        engine = self._engines.get(model)
        if engine is None or not engine.batcher.idle or self._scarcity.awaits(model):
            return False
        self._scarcity.loans.recall(engine.batcher)
        engine.batcher.prefix.clear()
        require(engine.batcher.kv.held == 0, f"{model} is idle and still holds KV pages")
        del self._engines[model]
        self._turn.leave(model)
        self._scarcity.leave(engine.batcher)
        return True

    def stalled_s(self, now: float) -> float:
        """For how long no step or order has ended although work waits; monotonic seconds. Any thread."""
        if self._resting and self._inbox.empty():
            return 0.0
        return max(0.0, now - self._moved_s)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            self._take_orders()
            self._moved_s = time.monotonic()
            self._age_prefixes(self._moved_s)
            if not self._stopping and not self._step():
                self._rest()
            self._moved_s = time.monotonic()

    def _take_orders(self) -> None:
        """Apply all that came, then tell once a model what it changed: a client that leaves may cancel a thousand."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                break
            self._apply(command)
        changed, self._changed = self._changed, {}
        for model in changed:
            engine = self._engines.get(model)
            if engine is not None:
                with self._guard(engine):
                    self._report(engine, [])

    def _rest(self) -> None:
        """Nothing can run: check the books once, then sleep until an order comes."""
        if not self._checked:
            self._checked = True
            self._check_books()
        due_s = self._scarcity.next_period()
        timeout_s = None if due_s is None else min(max(0.0, due_s - time.monotonic()), _LONGEST_REST_S)
        self._resting = True
        try:
            command = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            command = None  # a period of unused prefixes is over
        self._resting = False
        if command is not None:
            self._apply(command)

    def _age_prefixes(self, now: float) -> None:
        """Cached prefixes that nobody used for long go back to the pool, of busy and idle models alike."""
        if not self._scarcity.period_over(now):
            return
        given = 0
        for engine in tuple(self._engines.values()):
            with self._guard(engine):
                given += engine.batcher.prefix.age(IDLE_PERIODS)
        if given:
            self._deliver(StepReport("", [], self._pool.held(), self._pool.free_pages))

    def _check_books(self) -> None:
        """A model whose requests wait for nothing is alone at fault. The pool is everybody's.

        Where its books are wrong, two models may write one page, and nobody can tell which: none is trusted to go on,
        so all end at once, with a line in the log that lays it on none of them.
        """
        for engine in tuple(self._engines.values()):
            with self._guard(engine):
                require(engine.batcher.idle or self._scarcity.passing, "requests wait and nothing can run")
        try:
            self._pool.check()
        except Bug as error:
            log.error("the page pool's books are wrong, so every model on it ends: %s", error)
            for engine in tuple(self._engines.values()):
                self._fail(engine, error)

    def _apply(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Cancel(model, request_id, index):
                engine = self._engines.get(model)
                if engine is not None:
                    with self._guard(engine):
                        engine.batcher.cancel(request_id, index)
                        self._changed[model] = None
            case Ask(work, answer):
                self._answer(work, answer)
            case EndAll():
                for engine in tuple(self._engines.values()):
                    with self._guard(engine):
                        self._report(engine, engine.batcher.cancel_all())
            case Stop():
                self._stopping = True

    def _answer(self, work: Callable[[], Any], answer: concurrent.futures.Future[Any]) -> None:
        """What the work raises is its asker's affair: it ends no instance."""
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(work())
        except Exception as error:  # noqa: BLE001 - handed over whole: the asker raises it
            answer.set_exception(error)
        self._checked = False
        self._deliver(StepReport("", [], self._pool.held(), self._pool.free_pages))

    def _submit(self, order: Submit) -> None:
        model, request = order.model, order.request
        engine = self._engines.get(model)
        if engine is not None:
            with self._guard(engine):
                if order.begun is None:
                    engine.batcher.add(request, order.arrived_s, order.matcher, order.cached)
                else:
                    engine.batcher.resume(request, order.arrived_s, order.begun)
        self._checked = False
        if model not in self._engines:  # torn down while the request was on its way, or by the request
            emits = [Emit(request.id, index, finish=FinishReason.ERROR) for index in range(request.n)]
            self._deliver(StepReport(model, emits, self._pool.held(), self._pool.free_pages))

    def _step(self) -> bool:
        """Run one step of one model; False when no model has anything to run."""
        now = time.monotonic()
        at_work = [(model, engine.batcher) for model, engine in self._engines.items() if not engine.batcher.idle]
        if not at_work:
            return False
        try:
            return self._step_first(self._turn.choices(now, at_work), now)
        except Exception as error:  # noqa: BLE001 - as in _guard, but whose turn it is is everybody's
            log.error("whose turn it is cannot be told, so every model at work ends: %s", error)
            for model, _ in at_work:
                if model in self._engines:
                    self._fail(self._engines[model], error)
            return True

    def _step_first(self, choices: Iterator[Choice], now: float) -> bool:
        """Run a step of the first of these that has one to run."""
        for choice in choices:
            engine = self._engines.get(choice.model)
            if engine is None:  # torn down a moment ago
                continue
            ran = True  # a step that fails was one too
            with self._guard(engine):
                ran = self._step_of(engine, choice.prompt_tokens, now)
            if ran:
                return True
        return False

    def _step_of(self, engine: Engine, prompt_tokens: int | None, now: float) -> bool:
        start_s = time.perf_counter()
        running = len(engine.batcher.running)
        batch = engine.batcher.plan(now, prompt_tokens)
        if batch is None:
            return False
        if len(engine.batcher.running) != running:
            self._report(engine, [])  # a long step must not show as a queue until it ends
        arrays = engine.runner.stage(batch)
        staged_s = time.perf_counter()
        logits = engine.runner.forward(arrays)
        readings = engine.runner.read(batch)
        computed_s = time.perf_counter()
        sampled = engine.runner.draw(batch, logits)
        emits = engine.batcher.commit(batch, sampled, readings, time.monotonic())
        _log_faults(engine.model, sampled, readings)
        self._touch(self._pool.high_mark)
        step = StepTime(batch.tokens, start_s, staged_s, computed_s, time.perf_counter())
        self._turn.took(engine.model, batch, step.total_s)
        self._report(engine, emits, step)
        return True

    def _report(self, engine: Engine, emits: list[Emit], step: StepTime | None = None, failed: bool = False) -> None:
        pool = self._pool
        self._deliver(
            StepReport(engine.model, emits, pool.held(), pool.free_pages, engine.batcher.stats(), step, failed)
        )

    @contextlib.contextmanager
    def _guard(self, engine: Engine) -> Iterator[None]:
        """One of the named boundaries: whatever work for an instance raises ends that instance, never the process."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one of the three: a step runs code of every kind
            self._fail(engine, error)

    def _fail(self, engine: Engine, error: Exception) -> None:
        """Tear one instance down: its requests end with an error event, its pages go back by owner."""
        log.error(
            "%s: instance torn down after %s", engine.model, type(error).__name__, exc_info=error,
            extra=facts(kind="teardown", model=engine.model, error=type(error).__name__),
        )  # fmt: skip
        del self._engines[engine.model]
        self._turn.leave(engine.model)
        self._scarcity.leave(engine.batcher)
        emits = engine.batcher.abandon()
        self._pool.reclaim(engine.kv_owner)
        self._release(engine.model)
        self._report(engine, emits, failed=True)


def _log_faults(model: str, *answers: Sequence[Sampled | Reading]) -> None:
    """One line a step about choices that end in an error while the others go on."""
    faults = [one.fault for group in answers for one in group if one.fault is not None]
    if faults:
        log.warning("%s: %d choices end in an error: %s", model, len(faults), faults[0].value)
