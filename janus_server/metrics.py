"""What /metrics shows: vLLM's names where it has them (dashboards and gateways read those), `janus_*` for the rest.

One `Metrics` a process, made by the shell and handed to whoever measures; nothing registers itself. Counters and
histograms are fed by `http` (through `CallWatch`) and by the engine (through `ModelMetrics`), on the loop's thread;
gauges are read from the node when somebody scrapes. Clocks are the caller's. Labels are model names and enums, never
anything a client wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from janus_server import types
from janus_server.api.plan import Call

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE = "0"
LABELS = ("model_name", "engine")

# Finer than vLLM's below 300 ms, where promises are made.
TTFT_S = (1e-3, 5e-3, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_S = (1e-3, 2e-3, 5e-3, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40)
CALL_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960, 1920)
STEP_S = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 4, 8)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Gauged(Protocol):
    """The part of a node that gauges are read from: pages of the pool by owner, and each model's counters."""

    @property
    def pool_pages(self) -> int: ...

    @property
    def free_pages(self) -> int: ...

    def stats(self) -> Mapping[str, types.BatcherStats]: ...

    def memory(self) -> Mapping[types.Owner, int]: ...


class Metrics:
    """All counters and histograms of the process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._models: dict[str, ModelMetrics] = {}
        counter, histogram = self._counter, self._histogram
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token")
        self.prompt_tokens_cached = counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self.success = counter("vllm:request_success", "Choices ended, by reason", ("finished_reason",))
        self.disconnects = counter("janus_client_disconnects", "Calls whose client left before the end")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token of a call", TTFT_S)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Gap between the deltas of a choice", TOKEN_S)
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first", TOKEN_S
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token of a call", CALL_S)
        self.queue = histogram("vllm:request_queue_time_seconds", "Arrival to first step", CALL_S)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "First step to first token", CALL_S)
        self.decode = histogram("vllm:request_decode_time_seconds", "First to last token of a call", CALL_S)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.request_output = histogram("vllm:request_generation_tokens", "Tokens of a choice", TOKENS)
        self.params_n = histogram("vllm:request_params_n", "n asked for", (1, 2, 5, 10, 20, 50, 128))
        self.params_max = histogram("vllm:request_params_max_tokens", "max_tokens of a request", TOKENS)
        self.step_tokens = histogram("vllm:iteration_tokens_total", "Tokens of a step", STEP_TOKENS)
        self.step_s = histogram("janus_step_seconds", "Time of a step on the device thread", STEP_S)
        self.device_s = counter("janus_step_device_seconds", "Part of the steps' time spent in the forward pass")
        self.http = Counter(
            "janus_http_requests", "HTTP requests answered", ("route", "status"), registry=self.registry
        )
        self.ignored = Counter(
            "janus_ignored_fields", "Fields of bodies that nothing here reads", ("route",), registry=self.registry
        )

    def model(self, name: str) -> ModelMetrics:
        """The metrics of a served model; its series exist from the first time it is named."""
        if name not in self._models:
            self._models[name] = ModelMetrics(self, name)
        return self._models[name]

    def render(self, node: Gauged) -> bytes:
        """The text of /metrics."""
        for name in node.stats():
            self.model(name)
        return generate_latest(_Joined(self.registry, node))  # type: ignore[arg-type]

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
        self.generation_tokens = m.generation_tokens.labels(*labels)
        self.success = {reason: m.success.labels(*labels, reason.value) for reason in types.FinishReason}
        self.disconnects = m.disconnects.labels(*labels)
        self.ttft, self.itl, self.tpot = m.ttft.labels(*labels), m.itl.labels(*labels), m.tpot.labels(*labels)
        self.e2e, self.queue = m.e2e.labels(*labels), m.queue.labels(*labels)
        self.prefill, self.decode = m.prefill.labels(*labels), m.decode.labels(*labels)
        self.request_prompt, self.request_output = m.request_prompt.labels(*labels), m.request_output.labels(*labels)
        self.params_n, self.params_max = m.params_n.labels(*labels), m.params_max.labels(*labels)
        self._step_tokens, self._step_s = m.step_tokens.labels(*labels), m.step_s.labels(*labels)
        self._device_s = m.device_s.labels(*labels)

    def step(self, total_s: float, device_s: float, tokens: int) -> None:
        """The engine ran one step of `tokens` tokens; `device_s` of its time was the forward pass."""
        self._step_s.observe(total_s)
        self._device_s.inc(device_s)
        self._step_tokens.observe(tokens)


class CallWatch:
    """Turns one call's deltas into observations. `now` is monotonic seconds; `end` is called exactly once."""

    def __init__(self, metrics: ModelMetrics, call: Call, arrived_s: float) -> None:
        self._metrics = metrics
        self._call = call
        self._arrived_s = arrived_s
        choices = call.n * len(call.requests)
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._seen_s: list[float | None] = [None] * choices
        self._tokens = [0] * choices
        self._ended = [False] * choices
        self._cached = [0] * len(call.requests)

    def delta(self, prompt: int, delta: types.Delta, now: float) -> None:
        index = prompt * self._call.n + delta.index
        if delta.tokens:
            seen = self._seen_s[index]
            if self._first_s is None:
                self._first_s = now
                self._metrics.ttft.observe(now - self._arrived_s)
            if delta.queued_s is not None:
                self._metrics.queue.observe(delta.queued_s)
                self._metrics.prefill.observe(max(0.0, now - self._arrived_s - delta.queued_s))
            if seen is not None:
                self._metrics.itl.observe(now - seen)
            self._seen_s[index] = self._last_s = now
            self._tokens[index] += len(delta.tokens)
        if delta.cached_tokens > self._cached[prompt]:
            self._cached[prompt] = delta.cached_tokens
        if delta.finish is not None:
            self._ended[index] = True
            self._metrics.success[delta.finish].inc()

    def end(self, now: float) -> None:
        """The call is over, whatever the reason; a choice without an end counts as aborted."""
        m = self._metrics
        for index, ended in enumerate(self._ended):
            m.request_output.observe(self._tokens[index])
            if not ended:
                m.success[types.FinishReason.ABORT].inc()
        m.generation_tokens.inc(sum(self._tokens))
        m.params_n.observe(self._call.n)
        for request in self._call.requests:
            m.request_prompt.observe(len(request.prompt))
            m.params_max.observe(request.max_tokens)
        if self._first_s is None:
            return
        m.prompt_tokens.inc(self._call.prompt_tokens)
        m.prompt_tokens_cached.inc(sum(self._cached))
        m.e2e.observe(now - self._arrived_s)
        m.decode.observe(self._last_s - self._first_s)
        later = max(self._tokens) - 1
        if later > 0:
            m.tpot.observe((self._last_s - self._first_s) / later)


class _Joined:
    """What `generate_latest` walks: the registry without its creation times, then the node's gauges."""

    def __init__(self, registry: CollectorRegistry, node: Gauged) -> None:
        self._registry = registry
        self._node = node

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric
        yield from _model_families(self._node.stats(), _kv_share(self._node))
        yield from _pool_families(self._node)


def _kv_share(node: Gauged) -> float:
    """Used share of the pages that KV can have: all models draw on one pool, so it is one number for all of them."""
    used = sum(pages for owner, pages in node.memory().items() if owner.kind is types.PageKind.KV)
    return used / max(used + node.free_pages, 1)


def _model_families(stats: Mapping[str, types.BatcherStats], kv_share: float) -> Iterable[Metric]:
    running = GaugeMetricFamily("vllm:num_requests_running", "Requests in the batch", labels=LABELS)
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests in the queue", labels=LABELS)
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Used share of what KV can have, 0 to 1", labels=LABELS)
    preempted = CounterMetricFamily("vllm:num_preemptions", "Sequences put back to the queue", labels=LABELS)
    queries = CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens looked up", labels=LABELS)
    hits = CounterMetricFamily("vllm:prefix_cache_hits", "Prompt tokens found", labels=LABELS)
    computed = CounterMetricFamily("janus_computed_tokens", "Tokens computed by steps", labels=LABELS)
    sampled = CounterMetricFamily("janus_sampled_tokens", "Tokens sampled by steps", labels=LABELS)
    for name, s in stats.items():
        labels = (name, ENGINE)
        running.add_metric(labels, s.running)
        waiting.add_metric(labels, s.waiting)
        usage.add_metric(labels, kv_share)
        preempted.add_metric(labels, s.preemptions)
        queries.add_metric(labels, s.prefix_query_tokens)
        hits.add_metric(labels, s.prefix_hit_tokens)
        computed.add_metric(labels, s.computed_tokens)
        sampled.add_metric(labels, s.sampled_tokens)
    return running, waiting, usage, preempted, queries, hits, computed, sampled


def _pool_families(node: Gauged) -> Iterable[Metric]:
    pages = GaugeMetricFamily("janus_pool_pages", "Physical pages held", labels=("model_name", "kind"))
    for owner, count in node.memory().items():
        pages.add_metric((owner.model, owner.kind.value), count)
    total = GaugeMetricFamily("janus_pool_total_pages", "Physical pages of the pool", value=node.pool_pages)
    free = GaugeMetricFamily("janus_pool_free_pages", "Physical pages that nobody holds", value=node.free_pages)
    return pages, total, free
