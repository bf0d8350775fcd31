"""What this node measures of its models, period by period, for the Brain: traffic, promises kept, use of the device.

`node` owns one and feeds it on the loop: requests that come, requests that end, steps; each costs a few additions. Once
a period `take` makes an `Observed` of it. It decides nothing and predicts nothing. Times are monotonic seconds.

Traffic counts requests by when they come, their outputs by when they end. FLOPs and bytes are not metered: the roofline
computes how they are to each other from what ran (steps, tokens, rows) and what this device reaches (`calibrate`), and
the time that the steps took says how much both are.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from janus_server.applications import Application, Applications
from janus_server.calibrate import Calibration
from janus_server.executor import StepReport
from janus_server.orders import Action, Counts, Event, Lost, Observed, Order, Verb
from janus_server.sched.oracle_records import Features, Observation, Promise, Subject
from janus_server.sched.roofline import Physics, physics_of
from janus_server.sched.shapes import ModelShape
from janus_server.types import Owner, PageKind, Request

if TYPE_CHECKING:
    from janus_server.catalogue import OpenedModel

log = logging.getLogger("janus.telemetry")

# Where only one of the two is promised, the other is so long that it is always kept.
_ANY_S: Final = 3600.0


class Pool(msgspec.Struct, frozen=True):
    """What models may have of the device."""

    pages: int
    page_bytes: int


class Measured(msgspec.Struct, frozen=True):
    """A model that there is a promise for, in numbers: to be kept for the share `attain`. A page of its KV holds
    page_tokens."""

    shape: ModelShape
    promise: Promise
    attain: float
    page_tokens: int


def measured(catalogue: Sequence[OpenedModel], applications: Applications) -> dict[str, Measured]:
    """The models of the catalogue that there is a promise for."""
    found = {}
    for one in catalogue:
        listed = applications.of_model(one.name)
        promise = strictest(listed)
        if promise is not None:
            found[one.name] = Measured(_shape_of(one), promise, _target(listed), one.kv.page_tokens)
    return found


def _shape_of(opened: OpenedModel) -> ModelShape:
    spec, size_bytes = opened.spec, opened.placed.total_bytes
    parameters = sum(slot.n * slot.k for slot in opened.placed.entries)
    return ModelShape(
        name=opened.name, parameters=float(parameters), layers=spec.n_layers, hidden=spec.hidden,
        kv_bytes=float(opened.kv.token_bytes), pair_flops=4.0 * spec.n_layers * spec.heads * spec.head_dim,
        parameter_bytes=size_bytes / max(parameters, 1),
    )  # fmt: skip


def strictest(applications: Sequence[Application]) -> Promise | None:
    """What the oracle counts with for a model, of all that is promised under its applications' names."""
    ttft_s = min((one.promise.ttft_s for one in applications if one.promise.ttft_s is not None), default=None)
    tpot_s = min((one.promise.tpot_s for one in applications if one.promise.tpot_s is not None), default=None)
    return None if ttft_s is None and tpot_s is None else Promise(ttft_s or _ANY_S, tpot_s or _ANY_S)


def _target(applications: Sequence[Application]) -> float:
    """The share that is to be on time, where several promise: the largest."""
    return max(one.promise.attain for one in applications if one.promise.ttft_s or one.promise.tpot_s)


class Telemetry:
    """The models of one node. measured are those whose use of the device is of interest; set before the first step."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._pool = Pool(1, 1)
        self._models: dict[str, _Model] = {}
        self._since_s = time.monotonic()
        self._moved: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def measure(self, models: Mapping[str, Measured], pool: Pool) -> None:
        """Watch how these use the device from now on."""
        self._pool = pool
        for name, measured in models.items():
            self._model(name).watch(measured)

    def arrived(self, request: Request) -> None:
        """A request came, and was let in."""
        model = self._model(request.model)
        model.inputs.add(len(request.prompt))
        model.came += 1
        model.input_tokens += len(request.prompt)

    def ended(self, request: Request, output_tokens: int, on_time: bool | None) -> None:
        """A request is over; on_time None where nothing was promised, or it cannot be judged."""
        model = self._model(request.model)
        model.outputs.add(output_tokens)
        if on_time is not None:
            model.judged += 1
            model.on_time += on_time
            model.all_judged += 1
            model.all_late += not on_time

    def step(self, report: StepReport) -> None:
        """A report of the device thread, with a step or without one."""
        if report.step is not None:
            self._model(report.model).step(report)

    def see(self, news: Event | Action) -> None:
        """The leader heard or decided something: a period in which a model was moved says nothing of how it runs."""
        if isinstance(news, Lost) or (isinstance(news, Order) and news.verb is not Verb.EVICT):
            self._moved.add(news.model)

    def take(self, now: float, active: Collection[str]) -> Observed | None:
        """What happened since the last time, of the models that had requests; None where nothing did.

        active are the models that are Active now.
        """
        period_s, self._since_s = max(now - self._since_s, 1e-3), now
        found: dict[str, Observation] = {}
        subjects: dict[str, Subject] = {}
        for name, model in self._models.items():
            if (subject := model.calibrated(self._pool)) is not None:
                subjects[name] = subject
            if model.inputs.count:
                steady = name in active and name not in self._moved
                found[name] = model.observation(now, period_s, 1 if steady else 0, self._pool)
            model.clear(period_s)
        self._moved = {name for name in self._moved if name not in active}
        return Observed(found, subjects) if found or subjects else None

    def counts(self) -> dict[str, Counts]:
        """Totals since the start: of requests where they came, of tokens drawn where that was."""
        return {
            name: Counts(one.input_tokens, one.output_tokens, one.all_judged, one.all_late, one.came)
            for name, one in self._models.items()
        }

    def target(self, model: str) -> float | None:
        """The share of its requests that are to be on time; None where that is not measured."""
        measured = self._models[model].measured if model in self._models else None
        return None if measured is None else measured.attain

    def busy_share(self, model: str) -> float | None:
        """The share of the last whole period that the device spent on a model's steps; None before the first one."""
        return self._models[model].busy_share if model in self._models else None

    def start(self, active: Callable[[], Collection[str]], tell: Callable[[Observed], object]) -> None:
        """Tell what happened, period after period, until closed."""
        self._since_s = time.monotonic()
        self._task = asyncio.create_task(self._run(active, tell))
        self._task.add_done_callback(_say_why)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, active: Callable[[], Collection[str]], tell: Callable[[Observed], object]) -> None:
        while True:
            await asyncio.sleep(self.period_s)
            if (observed := self.take(time.monotonic(), active())) is not None:
                tell(observed)

    def _model(self, name: str) -> _Model:
        if name not in self._models:
            self._models[name] = _Model(name)
        return self._models[name]


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("nothing more is measured", exc_info=error)


class _Lengths:
    """Numbers of tokens as they come."""

    __slots__ = ("count", "squares", "total")

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, 0, 0

    def add(self, tokens: int) -> None:
        self.count += 1
        self.total += tokens
        self.squares += tokens * tokens

    def mean_and_variance(self) -> tuple[float, float]:
        mean = self.total / self.count
        return mean, max(0.0, self.squares / self.count - mean * mean)


class _Use:
    """Of the device: rows are sequences that drew a token in a step, prompt_tokens what was computed beside them."""

    __slots__ = ("busy_s", "most_pages", "most_rows", "prompt_tokens", "rows", "steps")

    def __init__(self) -> None:
        self.steps = self.rows = self.prompt_tokens = self.most_rows = self.most_pages = 0
        self.busy_s = 0.0


class _Model:
    """One model: what came and ended, and how it used the device, in the period that runs."""

    def __init__(self, name: str) -> None:
        self.busy_share: float | None = None
        self.judged = self.on_time = 0
        self.came = self.input_tokens = self.output_tokens = self.all_judged = self.all_late = 0
        self._weights, self._kv = Owner(name, PageKind.WEIGHTS), Owner(name, PageKind.KV)
        self.measured: Measured | None = None
        self._calibration: Calibration | None = None
        self._physics: Physics | None = None
        self._sampled = 0
        self._weight_pages = 0
        self._last_outputs = (0.0, 0.0)
        self.inputs, self.outputs, self._use = _Lengths(), _Lengths(), _Use()

    def watch(self, measured: Measured) -> None:
        self.measured = measured
        self._calibration = Calibration(measured.shape)

    def step(self, report: StepReport) -> None:
        step, stats = report.step, report.stats
        if step is None or stats is None:
            return
        # A batcher that was made anew counts from 0.
        drawn = max(0, stats.sampled_tokens - self._sampled)
        self._sampled = stats.sampled_tokens
        self.output_tokens += drawn
        rows, use = min(drawn, step.tokens), self._use
        use.steps += 1
        use.busy_s += step.total_s
        use.rows += rows
        use.prompt_tokens += step.tokens - rows
        use.most_rows = max(use.most_rows, stats.running, rows)
        use.most_pages = max(use.most_pages, report.pages.get(self._kv, 0))
        self._weight_pages = report.pages.get(self._weights, 0)
        if self._calibration is not None:
            self._calibration.step(rows, step.tokens - rows, step.total_s)

    def calibrated(self, pool: Pool) -> Subject | None:
        """How the model runs here, at the first time that it is known."""
        if self.measured is None or self._calibration is None:
            return None
        device = self._calibration.device(float(pool.pages * pool.page_bytes))
        if device is None:
            return None
        self._calibration = None
        self._physics = physics_of(self.measured.shape, device, 1)
        return Subject(model=self.measured.shape, device=device, promise=self.measured.promise)

    def observation(self, now: float, period_s: float, replicas: int, pool: Pool) -> Observation:
        input_mean, input_variance = self.inputs.mean_and_variance()
        known = self.outputs.count > 0
        if known:
            self._last_outputs = self.outputs.mean_and_variance()
        rate, (output_mean, output_variance) = self.inputs.count / period_s, self._last_outputs
        features = Features(
            rate * (input_mean + output_mean), rate, input_mean, input_variance, output_mean, output_variance
        )
        if not known and not output_mean:
            replicas = 0  # nobody knows yet how long its answers are
        hbm = compute = bandwidth = None
        if replicas and self._physics is not None and self.measured is not None:
            hbm = self._hbm(features, self.measured.page_tokens, pool)
            compute, bandwidth = self._work(features, self._physics, period_s)
        seen = Observation(
            at_s=now, features=features, replicas=replicas, requests=self.judged, on_time=self.on_time, hbm=hbm,
            compute=compute, bandwidth=bandwidth,
        )  # fmt: skip
        self.outputs = _Lengths()
        self.judged = self.on_time = 0
        return seen

    def clear(self, period_s: float) -> None:
        """A new period begins. What ended without anything coming is told with the next period in which something
        comes: for the oracle a window without traffic says nothing."""
        self.busy_share = self._use.busy_s / period_s
        self.inputs, self._use = _Lengths(), _Use()

    def _hbm(self, features: Features, page_tokens: int, pool: Pool) -> float:
        """The most that weights and KV took. What the prefix cache alone holds is given up on demand, so KV pages count
        as far as the sequences that ran at once would fill them."""
        tokens = features.input_mean + features.output_mean
        filled = self._use.most_rows * math.ceil(max(tokens, 1.0) / page_tokens)
        return (self._weight_pages + min(self._use.most_pages, filled)) / pool.pages

    def _work(self, features: Features, physics: Physics, period_s: float) -> tuple[float, float]:
        """Shares of what the device reaches: FLOPs, and bytes that were read. The larger is the share of the time that
        steps took: what they were short of was in use all that time, and the other in proportion.

        A prompt's token looks at half of its prompt on average (longer prompts have more tokens, hence the mean
        square), a drawn one at the prompt and half of the answer; the weights are read once a step.
        """
        use = self._use
        square = features.input_variance + features.input_mean**2
        context = features.input_mean + features.output_mean / 2.0
        pairs = use.prompt_tokens * square / (2.0 * max(features.input_mean, 1.0)) + use.rows * context
        flops = (use.prompt_tokens + use.rows) * physics.token_flops + pairs * physics.pair_flops
        read = use.steps * physics.dense_bytes + (use.prompt_tokens + use.rows * context) * physics.kv_bytes
        compute, bandwidth = float(flops / physics.flops_s), float(read / physics.bytes_s)
        busy_share = use.busy_s / period_s / max(compute, bandwidth, 1e-9)
        return compute * busy_share, bandwidth * busy_share
