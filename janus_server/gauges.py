"""The half of /metrics that is read from the node when somebody scrapes: queues, memory, the models' own counters.

`metrics` renders it behind the counters that it keeps itself. Nothing here is remembered between two scrapes, and no
label holds anything but model names, fixed words and numbers of the configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from janus_server import types
from janus_server.orders import Stage

ENGINE = "0"
LABELS = ("model_name", "engine")

# What vLLM calls the stages of a model.
SLEEP_STATES = MappingProxyType(
    {Stage.ACTIVE: "awake", Stage.WARM: "weights_offloaded", Stage.COLD: "discard_all"}
)  # fmt: skip

# Names that vLLM gave up and older dashboards still ask for: the same series under both.
OLD_NAMES = (
    ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
)


class Gauged(Protocol):
    """The part of a node that gauges are read from: pages of the pool by owner, and each model's counters."""

    @property
    def pool_pages(self) -> int: ...

    @property
    def free_pages(self) -> int: ...

    @property
    def cards(self) -> Mapping[str, types.ModelCard]: ...

    def stages(self) -> Mapping[str, Stage]: ...

    def troubled(self) -> Collection[str]: ...

    def stats(self) -> Mapping[str, types.BatcherStats]: ...

    def memory(self) -> Mapping[types.Owner, int]: ...

    def loads(self) -> Mapping[str, types.Load]: ...

    def handed_over(self) -> types.HandedOver | None: ...


class Joined:
    """What `generate_latest` walks: the registry without its creation times, then what was read of the node."""

    def __init__(self, registry: CollectorRegistry, gauges: Sequence[Metric]) -> None:
        self._registry = registry
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        for metric in self._all():
            yield metric
            for name, old in OLD_NAMES:
                if metric.name == name:
                    yield _renamed(metric, old)

    def _all(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric
        yield from self._gauges


def read(node: Gauged) -> Iterator[Metric]:
    """The node's gauges as they stand. On the loop."""
    yield from _queue_families(node)
    yield from _model_families(node)
    yield from _batcher_families(node.stats())
    yield from _pool_families(node)
    if (handed := node.handed_over()) is not None:
        yield from _handed_families(handed)


def _renamed(metric: Metric, name: str) -> Metric:
    """The same samples under another name."""
    found = copy.copy(metric)
    found.name = name
    found.documentation = f"The old name of {metric.name}"
    found.samples = [s._replace(name=name + s.name.removeprefix(metric.name)) for s in metric.samples]
    return found


def _queue_families(node: Gauged) -> Iterable[Metric]:
    """Choices in the batch and before it. The loop counts what is open, so that a request is never in neither."""
    running = GaugeMetricFamily("vllm:num_requests_running", "Requests in the batch", labels=LABELS)
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait for the batch", labels=LABELS)
    reasons = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait: for room (capacity), or for their prompt's first choice (deferred)",
        labels=(*LABELS, "reason"),
    )
    oldest = GaugeMetricFamily(
        "janus_queue_oldest_seconds", "Age of the oldest request without a first token, 0 for none", labels=LABELS
    )
    loads = node.loads()
    for name, stats in node.stats().items():
        labels = (name, ENGINE)
        load = loads.get(name, types.Load())
        # What ended by a stop string is still in the batch until the device thread hears of it.
        queued = max(0, load.choices - stats.running)
        deferred = min(queued, stats.deferred)
        running.add_metric(labels, stats.running)
        waiting.add_metric(labels, queued)
        reasons.add_metric((*labels, "capacity"), queued - deferred)
        reasons.add_metric((*labels, "deferred"), deferred)
        oldest.add_metric(labels, load.oldest_s)
    return running, waiting, reasons, oldest


def _model_families(node: Gauged) -> Iterable[Metric]:
    """What is true of a model whatever runs: its share of memory, and how its cache is cut."""
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Used share of what KV can have, 0 to 1", labels=LABELS)
    healthy = GaugeMetricFamily("vllm:engine_healthy", "1, or 0 while the model cannot be brought back", labels=LABELS)
    sleep = GaugeMetricFamily("vllm:engine_sleep_state", "1 for the state it is in", labels=(*LABELS, "sleep_state"))
    config = ("block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_dtype", "enable_prefix_caching")
    cache = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is cut", labels=(*LABELS, *config))
    share = _kv_share(node)
    stages, troubled = node.stages(), node.troubled()
    for name, card in node.cards.items():
        labels = (name, ENGINE)
        usage.add_metric(labels, share)
        healthy.add_metric(labels, name not in troubled)
        for stage, state in SLEEP_STATES.items():
            sleep.add_metric((*labels, state), stages.get(name) is stage)
        blocks, cached = str(card.kv_pages), str(card.prefix_caching)
        cache.add_metric((*labels, str(card.kv_page_tokens), blocks, "0", card.kv_dtype, cached), 1)
    return usage, healthy, sleep, cache


def _kv_share(node: Gauged) -> float:
    """Used share of the pages that KV can have: all models draw on one pool, so it is one number for all of them."""
    used = sum(pages for owner, pages in node.memory().items() if owner.kind is types.PageKind.KV)
    return used / max(used + node.free_pages, 1)


def _batcher_families(stats: Mapping[str, types.BatcherStats]) -> Iterable[Metric]:
    preempted = CounterMetricFamily("vllm:num_preemptions", "Sequences put back to the queue", labels=LABELS)
    queries = CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens looked up", labels=LABELS)
    hits = CounterMetricFamily("vllm:prefix_cache_hits", "Prompt tokens found", labels=LABELS)
    computed = CounterMetricFamily("janus_computed_tokens", "Tokens computed by steps", labels=LABELS)
    sampled = CounterMetricFamily("janus_sampled_tokens", "Tokens sampled by steps", labels=LABELS)
    for name, s in stats.items():
        labels = (name, ENGINE)
        preempted.add_metric(labels, s.preemptions)
        queries.add_metric(labels, s.prefix_query_tokens)
        hits.add_metric(labels, s.prefix_hit_tokens)
        computed.add_metric(labels, s.computed_tokens)
        sampled.add_metric(labels, s.sampled_tokens)
    return preempted, queries, hits, computed, sampled


def _pool_families(node: Gauged) -> Iterable[Metric]:
    pages = GaugeMetricFamily("janus_pool_pages", "Physical pages held", labels=("model_name", "kind"))
    for owner, count in node.memory().items():
        pages.add_metric((owner.model, owner.kind.value), count)
    total = GaugeMetricFamily("janus_pool_total_pages", "Physical pages of the pool", value=node.pool_pages)
    free = GaugeMetricFamily("janus_pool_free_pages", "Physical pages that nobody holds", value=node.free_pages)
    return pages, total, free


def _handed_families(handed: types.HandedOver) -> Iterable[Metric]:
    """Of a node in a cluster: prompts that others were to compute for requests that run here."""
    prompts = CounterMetricFamily(
        "janus_prompts_elsewhere", "Prompts that another node was to compute, by what came of it", labels=("outcome",)
    )
    prompts.add_metric(("brought",), handed.brought)
    prompts.add_metric(("computed here",), handed.failed)
    pages = CounterMetricFamily("janus_kv_pages_brought", "KV pages copied from other nodes", value=handed.pages)
    seconds = CounterMetricFamily(
        "janus_prompts_brought_seconds", "Seconds until those prompts were here", value=handed.seconds
    )
    return prompts, pages, seconds
