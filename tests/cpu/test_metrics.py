"""/metrics as dashboards, gateways and autoscalers read it: vLLM's names, types and labels, and true numbers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from fake_engine import FakeModel, FakeNode, settled
from http_server import CHAT, HI, PROMPT_TOKENS, Server, served
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from janus_server import types
from janus_server.api.plan import Call, Kind, Label
from janus_server.applications import Application
from janus_server.gauges import OLD_NAMES, read
from janus_server.metrics import CallWatch, Metrics

LABELS = {"model_name", "engine"}

# Name without its suffix: type, and labels beyond model_name and engine.
VLLM: dict[str, tuple[str, set[str]]] = {
    "vllm:num_requests_running": ("gauge", set()),
    "vllm:num_requests_waiting": ("gauge", set()),
    "vllm:num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "vllm:kv_cache_usage_perc": ("gauge", set()),
    "vllm:gpu_cache_usage_perc": ("gauge", set()),
    "vllm:engine_healthy": ("gauge", set()),
    "vllm:engine_sleep_state": ("gauge", {"sleep_state"}),
    "vllm:cache_config_info": (
        "gauge",
        {"block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_dtype", "enable_prefix_caching"},
    ),
    "vllm:prompt_tokens": ("counter", set()),
    "vllm:prompt_tokens_by_source": ("counter", {"source"}),
    "vllm:prompt_tokens_cached": ("counter", set()),
    "vllm:generation_tokens": ("counter", set()),
    "vllm:prefix_cache_queries": ("counter", set()),
    "vllm:prefix_cache_hits": ("counter", set()),
    "vllm:num_preemptions": ("counter", set()),
    "vllm:request_success": ("counter", {"finished_reason"}),
    "vllm:time_to_first_token_seconds": ("histogram", set()),
    "vllm:inter_token_latency_seconds": ("histogram", set()),
    "vllm:time_per_output_token_seconds": ("histogram", set()),
    "vllm:request_time_per_output_token_seconds": ("histogram", set()),
    "vllm:e2e_request_latency_seconds": ("histogram", set()),
    "vllm:request_queue_time_seconds": ("histogram", set()),
    "vllm:request_inference_time_seconds": ("histogram", set()),
    "vllm:request_prefill_time_seconds": ("histogram", set()),
    "vllm:request_decode_time_seconds": ("histogram", set()),
    "vllm:request_prompt_tokens": ("histogram", set()),
    "vllm:request_generation_tokens": ("histogram", set()),
    "vllm:request_prefill_kv_computed_tokens": ("histogram", set()),
    "vllm:request_max_num_generation_tokens": ("histogram", set()),
    "vllm:request_params_n": ("histogram", set()),
    "vllm:request_params_max_tokens": ("histogram", set()),
    "vllm:iteration_tokens_total": ("histogram", set()),
}

# Series that published dashboards and the gateways' adapters ask for, as they write them.
ASKED_FOR = """
vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count vllm:e2e_request_latency_seconds_bucket
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:time_per_output_token_seconds_bucket
vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_sum vllm:num_requests_running
vllm:num_requests_waiting vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
vllm:gpu_cache_usage_perc vllm:kv_cache_usage_perc vllm:request_prompt_tokens_bucket vllm:num_preemptions_total
vllm:request_generation_tokens_bucket vllm:request_success_total vllm:request_queue_time_seconds_sum
vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum vllm:prefix_cache_hits_total
vllm:prefix_cache_queries_total vllm:request_max_num_generation_tokens_sum vllm:cache_config_info
vllm:request_inference_time_seconds_sum vllm:iteration_tokens_total_sum vllm:prompt_tokens_by_source_total
process_resident_memory_bytes process_cpu_seconds_total process_start_time_seconds
""".split()


def families(text: str) -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for family in text_string_to_metric_families(text):
        assert family.name not in found, f"{family.name} twice"
        found[family.name] = family
    return found


@pytest.fixture
def text() -> str:
    metrics, node = Metrics(), FakeNode(FakeModel("one"), FakeModel("two"))
    return metrics.render(list(read(node)), ["one", "two"]).decode()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with served() as server:
        yield server


def test_names_types_and_labels_are_vllms(text: str) -> None:
    found = families(text)
    for name, (kind, more) in VLLM.items():
        family = found[name]
        assert family.type == kind, name
        assert family.documentation
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == LABELS | more, sample
        assert {s.labels["model_name"] for s in family.samples} == {"one", "two"}, name
    assert {name for name in found if name.startswith("vllm:")} == set(VLLM)


def test_every_series_that_dashboards_ask_for_exists_before_the_first_request(text: str) -> None:
    there = {sample.name for family in families(text).values() for sample in family.samples}
    assert [name for name in ASKED_FOR if name not in there] == []


def test_nothing_is_declared_twice_and_nothing_has_a_creation_time(text: str) -> None:
    declared = re.findall(r"(?m)^# TYPE (\S+) ", text)
    assert len(declared) == len(set(declared))
    assert "_created" not in text
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))


def test_labels_of_fixed_words(text: str) -> None:
    found = families(text)
    words = {
        "vllm:request_success": ("finished_reason", {"stop", "length", "abort", "error"}),
        "vllm:num_requests_waiting_by_reason": ("reason", {"capacity", "deferred"}),
        "vllm:prompt_tokens_by_source": ("source", {"local_compute", "local_cache_hit"}),
    }
    for name, (label, allowed) in words.items():
        assert {sample.labels[label] for sample in found[name].samples} == allowed, name


async def test_the_old_names_say_the_same(server: Server) -> None:
    await server.openai.chat.completions.create(model="fake", messages=HI, max_tokens=4)
    got = await server.metrics()
    for name, old in OLD_NAMES:
        new_values = {key.removeprefix(name): value for key, value in got.items() if key.startswith(name)}
        old_values = {key.removeprefix(old): value for key, value in got.items() if key.startswith(old)}
        assert new_values == old_values != {}


async def test_a_request_is_counted_by_source_and_length(server: Server) -> None:
    await server.openai.chat.completions.create(model="fake", messages=HI, max_tokens=4, n=2)
    got = await server.metrics()
    label = ",engine=0,model_name=fake"
    expected = {
        f"vllm:prompt_tokens_by_source_total{label},source=local_cache_hit": 3,
        f"vllm:prompt_tokens_by_source_total{label},source=local_compute": PROMPT_TOKENS - 3,
        f"vllm:request_prefill_kv_computed_tokens_sum{label}": PROMPT_TOKENS - 3,
        f"vllm:request_max_num_generation_tokens_sum{label}": 4,
        f"vllm:request_max_num_generation_tokens_count{label}": 1,
        f"vllm:request_generation_tokens_count{label}": 2,
        f"vllm:engine_healthy{label}": 1,
        f"janus_queue_oldest_seconds{label}": 1.5,
    }
    assert {name: got.get(name) for name in expected} == expected
    server.node.trouble.add("fake")
    assert (await server.metrics())[f"vllm:engine_healthy{label}"] == 0


SPELLED = "wr1tten-by-a-client"


async def test_nothing_that_a_client_wrote_becomes_a_label(server: Server) -> None:
    calls = [
        ("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 1, SPELLED: 1, "user": SPELLED}),
        ("POST", "/v1/chat/completions", {**CHAT, "model": SPELLED}),
        ("POST", "/v1/completions", {"model": "fake", "prompt": SPELLED, "stop": SPELLED, "max_tokens": 1}),
        ("POST", "/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": SPELLED}),
        ("GET", f"/v1/models/{SPELLED}", None),
        ("GET", f"/{SPELLED}?{SPELLED}={SPELLED}", None),
        ("POST", f"/v1/responses/{SPELLED}", {}),
        (SPELLED.upper(), "/health", None),
    ]
    for method, path, body in calls:
        async with server.http.request(method, path, json=body, headers={"X-Request-Id": SPELLED}) as response:
            await response.read()
    async with server.http.get("/metrics") as response:
        assert SPELLED not in (await response.text()).lower()


# What a call tells when it ends


def watched(n: int = 1, max_tokens: int = 4) -> CallWatch:
    request = types.Request(id="r-0", model="m", prompt=(1, 2, 3), max_tokens=max_tokens, n=n)
    call = Call(
        kind=Kind.CHAT, label=Label("r", 0, 0), model="m", requests=(request,), n=n, stream=True, include_usage=False,
        continuous_usage=False, logprobs=False, echo=("",),
    )  # fmt: skip
    metrics = Metrics()
    return CallWatch(metrics.model("m"), metrics.application(Application("m", "m")), call, arrived_s=100.0)


def test_the_facts_of_a_call_are_its_times_and_counts() -> None:
    watch = watched(n=2)
    watch.delta(0, types.Delta(0, "a", (1,), cached_tokens=2, queued_s=0.5), 101.0)
    watch.delta(0, types.Delta(1, "b", (1,)), 101.5)
    watch.delta(0, types.Delta(0, "a", (1,), finish=types.FinishReason.STOP), 102.0)
    watch.delta(0, types.Delta(1, "", (), finish=types.FinishReason.LENGTH), 102.5)
    assert watch.facts(103.0) == types.CallFacts(
        model="m", prompt_tokens=3, completion_tokens=3, cached_tokens=2, queue_s=0.5, ttft_s=1.0, last_s=2.0,
        total_s=3.0, ends=("stop", "length"),
    )  # fmt: skip
    watch.end(103.0)


def test_a_call_that_came_to_nothing_has_no_times() -> None:
    watch = watched()
    facts = watch.facts(101.0)
    assert (facts.queue_s, facts.ttft_s, facts.last_s, facts.ends) == (None, None, None, ())
    watch.end(101.0)


# A real server: queues while idle and busy


def queues(metrics: dict[str, float]) -> tuple[float, ...]:
    label = "engine=0,model_name=fake"
    names = (
        f"vllm:num_requests_running,{label}",
        f"vllm:num_requests_waiting,{label}",
        f"vllm:num_requests_waiting_by_reason,{label},reason=capacity",
        f"vllm:num_requests_waiting_by_reason,{label},reason=deferred",
    )
    return tuple(metrics[name] for name in names)


class Busy(FakeNode):
    """A node whose numbers a test sets."""

    running, open_choices, deferred = 0, 0, 0

    def stats(self) -> dict[str, types.BatcherStats]:
        return {
            name: types.BatcherStats(self.running, 7, 0, 0, 0, 0, 0, deferred=self.deferred) for name in self.models
        }

    def loads(self) -> dict[str, types.Load]:
        return {name: types.Load(self.open_choices, 2.0) for name in self.models} if self.open_choices else {}


@pytest.fixture
def busy() -> Iterator[Busy]:
    yield Busy(FakeModel())


@pytest.mark.parametrize(
    ("running", "open_choices", "deferred", "expected"),
    [
        (0, 0, 0, (0, 0, 0, 0)),
        (2, 5, 0, (2, 3, 3, 0)),
        (2, 5, 1, (2, 3, 2, 1)),
        (1, 4, 3, (1, 3, 0, 3)),
        # One ended by a stop string is still in the batch until its cancel is heard.
        (2, 1, 0, (2, 0, 0, 0)),
    ],
)
def test_what_is_open_and_does_not_run_waits(
    busy: Busy, running: int, open_choices: int, deferred: int, expected: tuple[int, ...]
) -> None:
    busy.running, busy.open_choices, busy.deferred = running, open_choices, deferred
    samples = [s for f in families(Metrics().render(list(read(busy)), []).decode()).values() for s in f.samples]
    got = {s.name + "".join(f",{k}={v}" for k, v in sorted(s.labels.items())): s.value for s in samples}
    assert queues(got) == expected


async def test_a_client_that_leaves_is_counted_once(server: Server) -> None:
    server.model.gate.clear()
    _, writer = await server.raw("/v1/chat/completions", {**CHAT, "max_tokens": 4})
    assert await settled(lambda: server.model.live)
    writer.close()
    assert await settled(lambda: not server.model.live)
    await asyncio.sleep(0)
    got = await server.metrics()
    label = "engine=0,model_name=fake"
    assert got[f"janus_client_disconnects_total,{label}"] == 1
    assert got["vllm:request_success_total,engine=0,finished_reason=abort,model_name=fake"] == 1
    assert got[f"vllm:e2e_request_latency_seconds_count,{label}"] == 0
