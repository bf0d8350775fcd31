"""What /metrics shows: vLLM's names where it has them (dashboards and gateways read those), `janus_*` for the rest.

One `Metrics` a process, made by the shell and handed to whoever measures; nothing registers itself. Counters and
histograms are fed by `http` (through `CallWatch`) and by the engine (through `ModelMetrics`), on the loop's thread;
gauges are read from the node when somebody scrapes. Clocks are the caller's. Labels are model names and enums, never
anything a client wrote.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from janus_server import types
from janus_server.api.cluster import ApplicationView
from janus_server.api.plan import Call
from janus_server.applications import Application
from janus_server.attainment import Counts, Course, Families, Outcome, Told, Totals
from janus_server.gauges import ENGINE, LABELS, Joined

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Finer than vLLM's below 300 ms, where promises are made.
TTFT_S = (1e-3, 5e-3, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_S = (1e-3, 2e-3, 5e-3, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40)
CALL_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960, 1920)
STEP_S = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 4, 8)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """All counters and histograms of the process, in a registry of their own."""

    def __init__(self, told: Told = lambda *_: None) -> None:
        """`told` hears of every request that ends or is turned away."""
        self._told = told
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        self._models: dict[str, ModelMetrics] = {}
        self._families = Families(self.registry, TTFT_S, TOKEN_S)
        self._applications: dict[str, tuple[Application, Counts]] = {}
        counter, histogram = self._counter, self._histogram
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token")
        self.prompt_tokens_cached = counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache")
        self.prompt_tokens_by_source = counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens, by where their keys and values came from", ("source",)
        )
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self.success = counter("vllm:request_success", "Choices ended, by reason", ("finished_reason",))
        self.disconnects = counter("janus_client_disconnects", "Calls whose client left before the end")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token of a call", TTFT_S)
        self.itl = _Gaps("vllm:inter_token_latency_seconds", "Gap between the deltas of a choice", TOKEN_S)
        self.registry.register(self.itl)
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first", TOKEN_S
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token of a call", CALL_S)
        self.queue = histogram("vllm:request_queue_time_seconds", "Arrival to first step", CALL_S)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "First step to first token", CALL_S)
        self.decode = histogram("vllm:request_decode_time_seconds", "First to last token of a call", CALL_S)
        self.inference = histogram("vllm:request_inference_time_seconds", "First step to last token of a call", CALL_S)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.request_output = histogram("vllm:request_generation_tokens", "Tokens of a choice", TOKENS)
        self.request_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached", TOKENS
        )
        self.request_longest = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a request", TOKENS
        )
        self.params_n = histogram("vllm:request_params_n", "n asked for", (1, 2, 5, 10, 20, 50, 128))
        self.params_max = histogram("vllm:request_params_max_tokens", "max_tokens of a request", TOKENS)
        self.step_tokens = histogram("vllm:iteration_tokens_total", "Tokens of a step", STEP_TOKENS)
        self.step_s = histogram("janus_step_seconds", "Time of a step on the device thread", STEP_S)
        self.device_s = counter("janus_step_device_seconds", "Part of the steps' time spent in the forward pass")
        self.http = Counter(
            "janus_http_requests", "HTTP requests answered", ("route", "status"), registry=self.registry
        )
        self.refused = Counter(
            "janus_refused_requests", "Requests refused at the gate or at admission", ("code",), registry=self.registry
        )
        self.ignored = Counter(
            "janus_ignored_fields", "Fields of bodies that nothing here reads", ("route",), registry=self.registry
        )

    def model(self, name: str) -> ModelMetrics:
        """The metrics of a served model; its series exist from the first time it is named."""
        if name not in self._models:
            self._models[name] = ModelMetrics(self, name)
        return self._models[name]

    def application(self, application: Application) -> Counts:
        """The counts of a served application; its series exist from the first time it is named."""
        if application.name not in self._applications:
            self._applications[application.name] = application, Counts(self._families, application, self._told)
        return self._applications[application.name][1]

    def views(self, listed: Sequence[Application]) -> list[ApplicationView]:
        """What was counted of every application that is listed or had a request."""
        known = {application.name: (application, counts.totals) for application, counts in self._applications.values()}
        for application in listed:
            known.setdefault(application.name, (application, Totals(TTFT_S, TOKEN_S)))
        return [totals.view(application) for _, (application, totals) in sorted(known.items())]

    def render(self, gauges: Sequence[Metric], active: Sequence[str]) -> bytes:
        """The text of /metrics, with what `gauges.read` found. Any thread.

        The series of a model exist once it is Active; a cold one of a hundred has nothing to tell.
        """
        for name in active:
            self.model(name)
        return generate_latest(Joined(self.registry, gauges))

    def _counter(self, name: str, text: str, more: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, (*LABELS, *more), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)


class ModelMetrics:
    """One model's series with their labels resolved, because resolving costs more than counting."""

    def __init__(self, all_metrics: Metrics, model: str) -> None:
        labels = (model, ENGINE)
        m = all_metrics
        self.prompt_tokens = m.prompt_tokens.labels(*labels)
        self.prompt_tokens_cached = m.prompt_tokens_cached.labels(*labels)
        self.from_compute = m.prompt_tokens_by_source.labels(*labels, "local_compute")
        self.from_cache = m.prompt_tokens_by_source.labels(*labels, "local_cache_hit")
        self.generation_tokens = m.generation_tokens.labels(*labels)
        self.success = {reason: m.success.labels(*labels, reason.value) for reason in types.FinishReason}
        self.disconnects = m.disconnects.labels(*labels)
        self.ttft, self.itl, self.tpot = m.ttft.labels(*labels), m.itl.of(model), m.tpot.labels(*labels)
        self.e2e, self.queue = m.e2e.labels(*labels), m.queue.labels(*labels)
        self.prefill, self.decode = m.prefill.labels(*labels), m.decode.labels(*labels)
        self.inference = m.inference.labels(*labels)
        self.request_computed = m.request_computed.labels(*labels)
        self.request_longest = m.request_longest.labels(*labels)
        self.request_prompt, self.request_output = m.request_prompt.labels(*labels), m.request_output.labels(*labels)
        self.params_n, self.params_max = m.params_n.labels(*labels), m.params_max.labels(*labels)
        self._step_tokens, self._step_s = m.step_tokens.labels(*labels), m.step_s.labels(*labels)
        self._device_s = m.device_s.labels(*labels)

    def step(self, total_s: float, device_s: float, tokens: int) -> None:
        """The engine ran one step of `tokens` tokens; `device_s` of its time was the forward pass."""
        self._step_s.observe(total_s)
        self._device_s.inc(device_s)
        self._step_tokens.observe(tokens)


class _Gaps:
    """A histogram that is observed once a token, so that counting must cost less than the client library's does."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, buckets
        self._models: dict[str, _ModelGaps] = {}

    def of(self, model: str) -> _ModelGaps:
        return self._models.setdefault(model, _ModelGaps(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for model, gaps in self._models.items():
            counts = itertools.accumulate(gaps.counts)
            family.add_metric((model, ENGINE), list(zip(bounds, counts, strict=True)), gaps.sum_s)
        yield family


class _ModelGaps:
    """One model's counts, by the first bound that a gap does not exceed; the last is for those beyond all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, gap_s: float) -> None:
        self.counts[bisect.bisect_left(self._bounds, gap_s)] += 1
        self.sum_s += gap_s


class CallWatch:
    """Turns one call's deltas into observations. `now` is monotonic seconds; `end` is called exactly once.

    unended is what becomes of requests that have not ended by then: whoever knows better than FAILED says so first.
    """

    def __init__(self, metrics: ModelMetrics, counts: Counts, call: Call, arrived_s: float) -> None:
        self.call = call
        self.unended = Outcome.FAILED
        self._metrics = metrics
        self._counts = counts
        self.arrived_s = arrived_s
        choices = call.n * len(call.requests)
        self._queued_s: float | None = None
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._seen_s: list[float | None] = [None] * choices
        self._tokens = [0] * choices
        self._ended: list[types.FinishReason | None] = [None] * choices
        self._cached = [0] * len(call.requests)
        self._read = [False] * len(call.requests)
        self._first_of: list[float | None] = [None] * len(call.requests)
        self._late = [0] * len(call.requests)
        promise = counts.promise
        self._tpot_s = promise.tpot_s or 0.0
        # When a choice's first token is due, where both are promised; token i is i·TPOT later.
        both = promise.ttft_s is not None and promise.tpot_s is not None
        self._due_s = arrived_s + (promise.ttft_s or 0.0) if both else math.inf

    def delta(self, prompt: int, delta: types.Delta, now: float) -> None:
        index = prompt * self.call.n + delta.index
        if delta.queued_s is not None:
            self._queued_s = delta.queued_s if self._queued_s is None else min(self._queued_s, delta.queued_s)
            self._metrics.queue.observe(delta.queued_s)
            self._metrics.prefill.observe(max(0.0, now - self.arrived_s - delta.queued_s))
        if delta.tokens:
            seen = self._seen_s[index]
            if self._first_s is None:
                self._first_s = now
                self._metrics.ttft.observe(now - self.arrived_s)
            if seen is not None:
                self._metrics.itl.observe(now - seen)
            elif self._first_of[prompt] is None:
                self._first_of[prompt] = now
            before = self._tokens[index]
            if now > self._due_s + before * self._tpot_s:
                due_by_now = math.ceil((now - self._due_s) / self._tpot_s)
                self._late[prompt] += min(len(delta.tokens), max(due_by_now - before, 1))
            self._seen_s[index] = self._last_s = now
            self._tokens[index] = before + len(delta.tokens)
        if delta.cached_tokens > self._cached[prompt]:
            self._cached[prompt] = delta.cached_tokens
        if delta.finish is not None:
            self._ended[index] = delta.finish
            self._metrics.success[delta.finish].inc()
        # An embedding ends without a token, but not before its prompt was read.
        if delta.tokens or delta.finish in (types.FinishReason.STOP, types.FinishReason.LENGTH):
            self._read[prompt] = True

    def end(self, now: float) -> None:
        """The call is over, whatever the reason; a choice without an end counts as aborted."""
        m = self._metrics
        for index, reason in enumerate(self._ended):
            m.request_output.observe(self._tokens[index])
            if reason is None:
                m.success[types.FinishReason.ABORT].inc()
        m.generation_tokens.inc(sum(self._tokens))
        m.params_n.observe(self.call.n)
        for prompt, request in enumerate(self.call.requests):
            self._end_request(prompt, request)
            self._counts.ended(request, self._course(prompt, now))
        if not any(self._read):
            return
        m.e2e.observe(now - self.arrived_s)
        if self._queued_s is not None:
            m.inference.observe(max(0.0, self._last_s - self.arrived_s - self._queued_s))
        if self._first_s is None:
            return
        m.decode.observe(self._last_s - self._first_s)
        later = max(self._tokens) - 1
        if later > 0:
            m.tpot.observe((self._last_s - self._first_s) / later)

    def facts(self, now: float) -> types.CallFacts:
        """What a log or a trace may say of the call so far."""
        first_s, queued_s = self._first_s, self._queued_s
        ends = dict.fromkeys(reason.value for reason in self._ended if reason is not None)
        return types.CallFacts(
            model=self.call.requests[0].model,
            application=self.call.requests[0].application,
            prompt_tokens=self.call.prompt_tokens,
            completion_tokens=sum(self._tokens),
            cached_tokens=sum(self._cached),
            queue_s=queued_s,
            ttft_s=None if first_s is None else first_s - self.arrived_s,
            last_s=None if first_s is None else self._last_s - self.arrived_s,
            total_s=now - self.arrived_s,
            ends=tuple(ends),
        )

    def _course(self, prompt: int, now: float) -> Course:
        """How one request went, for its application."""
        choices = slice(prompt * self.call.n, (prompt + 1) * self.call.n)
        tokens, first_s = self._tokens[choices], self._first_of[prompt]
        whole = all(reason in (types.FinishReason.STOP, types.FinishReason.LENGTH) for reason in self._ended[choices])
        later = max(tokens) - 1
        last_s = max((seen_s for seen_s in self._seen_s[choices] if seen_s is not None), default=self.arrived_s)
        return Course(
            outcome=Outcome.OK if whole else self.unended,
            open_s=now - self.arrived_s,
            ttft_s=None if first_s is None else first_s - self.arrived_s,
            tpot_s=(last_s - first_s) / later if first_s is not None and later > 0 else None,
            tokens=sum(tokens),
            late_tokens=self._late[prompt],
        )

    def _end_request(self, prompt: int, request: types.Request) -> None:
        m, n, cached = self._metrics, self.call.n, self._cached[prompt]
        m.request_prompt.observe(len(request.prompt))
        m.params_max.observe(request.max_tokens)
        m.request_longest.observe(max(self._tokens[prompt * n : (prompt + 1) * n]))
        if not self._read[prompt]:
            return
        computed = max(0, len(request.prompt) - cached)  # whatever is reported: a metric must never end a request
        m.request_computed.observe(computed)
        m.prompt_tokens.inc(len(request.prompt))
        m.prompt_tokens_cached.inc(cached)
        m.from_compute.inc(computed)
        m.from_cache.inc(cached)
