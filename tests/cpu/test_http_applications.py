"""Applications over HTTP: one name resolution for every API, names echoed, keys that own one, metrics kept apart."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from fake_engine import FakeModel, settled
from http_server import HI, Server, is_error, served

from janus_server import types
from janus_server.admission import KeyLimits, QueueBounds
from janus_server.api.plan import Call, Label
from janus_server.api.plan import Kind as CallKind
from janus_server.applications import Application, Applications
from janus_server.attainment import Outcome
from janus_server.keys import Key, KeyRing
from janus_server.metrics import CallWatch, Metrics

FAST = types.Promise(60.0, 60.0)
NEVER = types.Promise(1e-6, 1e-6)  # what no answer can keep
SUPPORT = Application("support", "chat", FAST, priority=10)
BATCH = Application("batch", "chat", NEVER, priority=-10)
ALICES = Application("alices", "chat", types.Promise(60.0), priority=5, key="alice")
ALL = Applications((SUPPORT, BATCH, ALICES))


def key(name: str, *models: str, admin: bool = False) -> Key:
    digest = hashlib.sha256(f"{name}-0123456789".encode()).digest()
    return Key(name, digest, KeyLimits(models=frozenset(models) if models else None), admin)


def sent_by(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-0123456789"}


KEYS = KeyRing((key("alice"), key("bob"), key("carol", "support"), key("root", admin=True)))


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": HI, "seed": 0, "max_tokens": 4, **more}


async def listed(server: Server, **headers: str) -> dict[str, tuple[str, str | None]]:
    async with server.http.get("/v1/models", headers=headers) as response:
        return {one["id"]: (one["root"], one["parent"]) for one in (await response.json())["data"]}


async def test_an_application_is_a_name_of_its_model_that_answers_repeat() -> None:
    async with served(FakeModel("chat"), applications=ALL) as server:
        for name in ("support", "batch", "chat"):
            status, answer = await server.post("/v1/chat/completions", body(name))
            assert (status, answer["model"]) == (200, name)
        asked = [(one.model, one.application, one.promise, one.priority) for one in server.model.requests]
        assert asked == [
            ("chat", "support", FAST, 10), ("chat", "batch", NEVER, -10), ("chat", "chat", types.Promise(), 0)
        ]  # fmt: skip
        assert await listed(server) == {
            "chat": ("chat", None), "support": ("chat", "chat"), "batch": ("chat", "chat")
        }  # fmt: skip
        async with server.http.get("/v1/models/support") as response:
            assert (await response.json())["parent"] == "chat"


@pytest.mark.parametrize("name", ["alices", "nobody", "Support", ""])
async def test_what_is_not_served_to_a_client_does_not_exist(name: str) -> None:
    async with served(FakeModel("chat"), applications=ALL) as server:
        status, answer = await server.post("/v1/chat/completions", body(name))
        assert (status, is_error(answer)["code"]) in ((404, "model_not_found"), (400, "invalid_value"))
        async with server.http.get(f"/v1/models/{name or 'x'}") as response:
            assert response.status == 404
        assert not server.model.requests


async def test_the_requests_of_a_key_count_for_its_application() -> None:
    async with served(FakeModel("chat"), applications=ALL, keys=KEYS) as server:
        for client, name, expected in (
            ("alice", "chat", "alices"), ("alice", "alices", "alices"), ("alice", "support", "support"),
            ("bob", "chat", "chat"), ("bob", "alices", None), ("carol", "support", "support"), ("carol", "chat", None),
            ("root", "alices", "alices"),
        ):  # fmt: skip
            before = len(server.model.requests)
            status, answer = await server.post("/v1/chat/completions", body(name), **sent_by(client))
            if expected is None:
                assert (status, is_error(answer)["code"]) == (404, "model_not_found"), (client, name)
                assert len(server.model.requests) == before
            else:
                assert (status, answer["model"]) == (200, name)
                assert server.model.requests[-1].application == expected
        every = {"chat": ("chat", None), "support": ("chat", "chat"), "batch": ("chat", "chat")}
        assert await listed(server, **sent_by("bob")) == every
        assert await listed(server, **sent_by("alice")) == {**every, "alices": ("chat", "chat")}
        assert await listed(server, **sent_by("root")) == {**every, "alices": ("chat", "chat")}
        # A key that may use one application alone does not learn its model's name.
        assert await listed(server, **sent_by("carol")) == {"support": ("support", None)}


async def counted(server: Server, application: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in (await server.metrics()).items():
        head, _, rest = name.removeprefix("janus_application_").partition(",")
        labels = dict(label.split("=", 1) for label in rest.split(",") if label)
        if name.startswith("janus_application_") and labels.pop("application") == application and "le" not in labels:
            labels.pop("model", None)
            found[".".join([head.removesuffix("_total"), *labels.values()])] = value
    return found


async def test_what_is_attained_is_counted_for_each_application_apart() -> None:
    async with served(FakeModel("chat"), applications=ALL) as server:
        before = await counted(server, "support")
        assert (before["requests.ok"], before["attained.overall"], before["promise_seconds.ttft"]) == (0, 0, 60)
        for name in ("support", "support", "batch"):
            await server.post("/v1/chat/completions", body(name))
        events = await server.events("/v1/chat/completions", body("batch", max_tokens=6))
        assert events[-1] == "data: [DONE]"
        good, late = await counted(server, "support"), await counted(server, "batch")
        assert [good[f"promised.{kind}"] for kind in ("ttft", "tpot", "overall", "tokens")] == [2, 2, 2, 2]
        assert [good[f"attained.{kind}"] for kind in ("ttft", "tpot", "overall", "tokens")] == [2, 2, 2, 2]
        assert (good["requests.ok"], good["tokens"], good["goodput_tokens"], good["late_tokens"]) == (2, 8, 8, 0)
        assert [late[f"promised.{kind}"] for kind in ("ttft", "tpot", "overall", "tokens")] == [2, 2, 2, 2]
        assert [late[f"attained.{kind}"] for kind in ("ttft", "tpot", "overall", "tokens")] == [0, 0, 0, 0]
        assert (late["requests.ok"], late["tokens"], late["goodput_tokens"], late["late_tokens"]) == (2, 10, 0, 10)
        assert (late["ttft_seconds_count"], late["tpot_seconds_count"]) == (2, 2)
        assert await counted(server, "chat") == {}
        assert (await server.metrics())["vllm:e2e_request_latency_seconds_count,engine=0,model_name=chat"] == 4


async def test_failures_and_refusals_for_want_of_room_break_the_promise() -> None:
    async with served(FakeModel("chat"), applications=ALL, queue=QueueBounds(1, 10**6)) as server:
        server.model.fail_at = 2
        assert (await server.post("/v1/chat/completions", body("support")))[0] == 500
        server.model.fail_at = -1
        server.model.gate.clear()
        reader, writer = await server.raw("/v1/chat/completions", body("support"))
        assert await settled(lambda: server.model.live)
        assert (await server.post("/v1/chat/completions", body("support")))[0] == 429
        writer.close()
        assert await settled(lambda: not server.model.live)
        server.model.gate.set()
        assert (await server.post("/v1/chat/completions", body("support", n=2)))[0] == 400
        got = await counted(server, "support")
        assert {one.value: got[f"requests.{one.value}"] for one in Outcome} == {
            "ok": 0, "failed": 2, "refused": 1, "left": 1
        }  # fmt: skip
        # Who left within a minute without a token was promised nothing that could be judged.
        assert (got["promised.overall"], got["attained.overall"], got["promised.ttft"]) == (2, 0, 2)
        del reader


async def test_a_name_may_be_left_out_where_all_names_are_one_models() -> None:
    async with served(FakeModel("chat"), applications=ALL, keys=KEYS) as server:
        for client in ("bob", "carol"):
            status, answer = await server.post("/tokenize", {"prompt": "hi"}, **sent_by(client))
            assert (status, answer["count"]) == (200, 3)


# What a call tells of its requests


def watched(promise: types.Promise, prompts: int = 1, n: int = 1) -> tuple[CallWatch, Metrics]:
    """A call of an application that arrived at 100 s."""
    request = types.Request(id="r-0", model="chat", prompt=(1, 2, 3), max_tokens=100, n=n)
    call = Call(
        kind=CallKind.COMPLETION, label=Label("r", 0, 0), model="chat", requests=(request,) * prompts, n=n, stream=True,
        include_usage=False, continuous_usage=False, logprobs=False, echo=("",) * prompts,
    )  # fmt: skip
    metrics = Metrics()
    counts = metrics.application(Application("support", "chat", promise))
    return CallWatch(metrics.model("chat"), counts, call, arrived_s=100.0), metrics


def read(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"janus_application_{name}", {"application": "support", **labels})


def ended(index: int, finish: types.FinishReason = types.FinishReason.LENGTH) -> types.Delta:
    return types.Delta(index, finish=finish)


def test_each_token_has_its_own_time_and_may_catch_up() -> None:
    # Due at 101.0, 101.5, 102.0, 102.5, 103.0 …
    watch, metrics = watched(types.Promise(1.0, 0.5))
    for at_s in (101.0, 101.6, 101.7, 102.6, 102.8):
        watch.delta(0, types.Delta(0, "a", (1,)), at_s)
    watch.delta(0, ended(0), 103.0)
    watch.end(103.0)
    assert read(metrics, "late_tokens_total") == 2
    assert [read(metrics, "attained_total", kind=kind) for kind in ("ttft", "tpot", "overall", "tokens")] == [
        1,
        1,
        1,
        0,
    ]
    assert (read(metrics, "goodput_tokens_total"), read(metrics, "tokens_total")) == (5, 5)
    assert read(metrics, "tpot_seconds_sum") == pytest.approx(0.45)


def test_of_tokens_that_come_together_those_are_late_whose_time_is_over() -> None:
    watch, metrics = watched(types.Promise(1.0, 0.5))
    watch.delta(0, types.Delta(0, "abcdef", (1, 2, 3, 4, 5, 6)), 102.2)  # due by then: 101.0, 101.5 and 102.0
    watch.delta(0, types.Delta(0, "gh", (7, 8)), 110.0)
    watch.delta(0, ended(0), 110.0)
    watch.end(110.0)
    assert read(metrics, "late_tokens_total") == 5


def test_every_prompt_of_a_call_is_a_request_of_its_own() -> None:
    watch, metrics = watched(types.Promise(1.0, 0.5), prompts=3, n=2)
    for prompt, at_s in ((0, 100.5), (1, 101.5)):
        for index in (0, 1):
            for token in range(3):
                watch.delta(prompt, types.Delta(index, "a", (1,)), at_s + 0.25 * token)
            watch.delta(prompt, ended(index), at_s + 1.0)
    watch.end(103.0)  # the third one came to nothing
    assert [read(metrics, "requests_total", model="chat", outcome=one.value) for one in Outcome] == [2, 1, 0, 0]
    assert [read(metrics, "promised_total", kind=kind) for kind in ("ttft", "tpot", "overall", "tokens")] == [
        3,
        3,
        3,
        3,
    ]
    assert [read(metrics, "attained_total", kind=kind) for kind in ("ttft", "tpot", "overall", "tokens")] == [
        1,
        2,
        1,
        1,
    ]
    assert (read(metrics, "ttft_seconds_sum"), read(metrics, "tokens_total")) == (2.0, 12)


def test_without_both_promises_no_token_is_late() -> None:
    for promise in (types.Promise(), types.Promise(ttft_s=1e-9), types.Promise(tpot_s=1e-9)):
        watch, metrics = watched(promise)
        for at_s in (200.0, 300.0):
            watch.delta(0, types.Delta(0, "a", (1,)), at_s)
        watch.delta(0, ended(0), 300.0)
        watch.end(300.0)
        assert read(metrics, "late_tokens_total") is None
        assert read(metrics, "attained_total", kind="tokens") is None


def test_facts_name_the_application() -> None:
    watch, _ = watched(types.Promise())
    request = msgspec.structs.replace(watch.call.requests[0], application="support")
    watch.call = msgspec.structs.replace(watch.call, requests=(request,))
    facts = watch.facts(101.0)
    assert (facts.model, facts.application) == ("chat", "support")
