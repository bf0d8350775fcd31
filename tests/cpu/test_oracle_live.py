"""The oracle on a real server's own telemetry: a little load, a fit by the real process, what operators are shown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from server_process import tiny_model

from janus_server import fitting, journal, keys
from janus_server import node as node_module
from janus_server.config import ServeConfig, serve_config
from janus_server.http.listen import Listener
from janus_server.keys import KeyRing
from janus_server.network import bind
from janus_server.node import Node
from janus_server.orders import Observed, Refit
from janus_server.sched.oracle import Oracle, OracleSettings
from janus_server.sched.oracle_records import Features, FitRequest, Fitted, Observation, Promise, Subject
from janus_server.sched.roofline import ASCEND_910C
from janus_server.sched.shapes import ModelShape
from janus_server.sched.state import BrainSettings

ADMIN = "admin-key-0123456789"
# A period is long enough for a dozen requests.
HASTY = BrainSettings(refit_every_s=1.0, oracle=OracleSettings(window_s=0.25, first_points=30))
CONFIG = """
memory = "32MiB"
page-size = "64KiB"
threads = 1
journal = "{folder}/journal"
[models.chat]
path = "{folder}/chat"
[models.plain]
path = "{folder}/plain"
[applications.support]
model = "chat"
ttft = "5s"
tpot = "1s"
[applications.fast]
model = "chat"
ttft = "8s"
attain = 0.9
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    for seed, name in enumerate(("chat", "plain")):
        tiny_model(folder / name, seed=seed)
    (folder / "janus.toml").write_text(CONFIG.format(folder=folder))
    return folder


class Live:
    """A node behind its HTTP application, in this process."""

    def __init__(self, http: aiohttp.ClientSession, node: Node) -> None:
        self.http = http
        self.node = node
        self.answered = 0

    async def ask(self, model: str, number: int) -> None:
        body = {"model": model, "prompt": "the quick brown fox " * (1 + number % 5), "max_tokens": 4 + number % 7,
                "ignore_eos": True, "temperature": 0}  # fmt: skip
        async with self.http.post("/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
        self.answered += 1

    async def models(self) -> dict[str, dict[str, Any]]:
        async with self.http.get("/admin/models") as reply:
            assert reply.status == 200
            return {one["model"]: one for one in (await reply.json())["data"]}

    async def until(self, check: Any, limit_s: float) -> dict[str, Any]:
        """Send requests, three at a time and some to a model without a promise, until check(chat's prediction)."""
        end_s, number = time.monotonic() + limit_s, 0
        while time.monotonic() < end_s:
            names = ("support", "fast", "plain" if number % 40 == 0 else "support")
            await asyncio.gather(*(self.ask(name, number + i) for i, name in enumerate(names)))
            number += 3
            await asyncio.sleep(0.02 if number // 120 % 2 else 0.06)  # more traffic, and less
            if number % 15 == 0:
                found: dict[str, Any] | None = (await self.models())["chat"]["prediction"]
                if found is not None and check(found):
                    return found
        raise AssertionError(f"it never held; the last prediction: {found}")


@contextlib.asynccontextmanager
async def live(config: ServeConfig) -> AsyncIterator[Live]:
    node = Node(config)
    ring = KeyRing([keys.from_environment(keys.ADMIN_VARIABLE, ADMIN)])
    with bind(config.host, 0) as listening:
        listener = await Listener.open(config, ring, node, listening, None)
        try:
            await node.open(lambda model, done, total: None)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {ADMIN}"}) as http:
                yield Live(http, node)
        finally:
            await listener.close()
            await node.close()


def children(program: str) -> list[int]:
    """Processes of this one that run the program."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and program in (entry / "cmdline").read_text():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == os.getpid():
                    found.append(int(entry.name))
    return found


def a_request() -> FitRequest:
    shape = ModelShape(name="m", parameters=1e9, layers=16, hidden=2048, kv_bytes=65_536.0, pair_flops=131_072.0)
    oracle = Oracle()
    oracle.know("m", Subject(model=shape, device=ASCEND_910C, promise=Promise(1.0, 0.1)))
    features = Features(60.0, 1.0, 50.0, 9.0, 10.0, 4.0)
    oracle.observe("m", Observation(at_s=0.0, features=features, replicas=1, requests=9, on_time=8))
    request = oracle.next_fit(1.0)
    assert request is not None
    return request


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "BrainSettings", lambda **given: msgspec.structs.replace(HASTY, **given))


@pytest.mark.skipif(not fitting.possible(), reason="gpytorch is not installed")
async def test_periods_are_observed_a_fit_comes_back_and_operators_see_the_prediction(
    folder: Path, hasty: None, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live(serve_config(file=folder / "janus.toml")) as server:
        first = await server.until(lambda one: True, 60.0)
        assert not first["fitted"] and first["periods"] < 30
        assert children("oracle_fit.py") == []
        fitted = await server.until(lambda one: one["fitted"], 120.0)
        (pid,) = children("oracle_fit.py")
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        shown = await server.models()
    assert children("oracle_fit.py") == []
    assert fitted["periods"] >= 30
    assert fitted["target"] == 0.99  # of the two applications, the stricter
    assert fitted["attained"] == 1.0 and fitted["predicted"] > 0.9
    assert 0.0 < fitted["predicted_least"] <= fitted["predicted"]
    assert 5.0 < fitted["requests_per_s"] < 500.0
    assert 0.0 < fitted["needs"] <= fitted["needs_most"] and 0.0 < fitted["busy_share"] < 1.0
    assert fitted["says"].startswith("predicted ") and " of requests in time; needs " in fitted["says"]
    assert shown["plain"]["prediction"] is None
    with capsys.disabled():
        print(f"\n  {fitted}")
    entries = [one for one in journal.read(folder / "journal") if isinstance(one, journal.Entry)]
    assert [type(one.event) for one in entries].count(Fitted) >= 1
    assert sum(isinstance(action, Refit) for one in entries for action in one.actions) >= 1
    told = [one.event for one in entries if isinstance(one.event, Observed)]
    assert any("plain" in one.models for one in told)
    assert sum(len(one.subjects) for one in told) == 1
    requests = sum(round(one.features.request_rate * 0.25) for event in told for one in event.models.values())
    assert requests > 0.8 * server.answered
    start_s = time.perf_counter()
    replayed = journal.replay(folder / "journal")
    with capsys.disabled():
        pace = replayed.span_s / (time.perf_counter() - start_s)
        print(f"  {replayed.entries} events over {replayed.span_s:.1f} s replay {pace:,.0f} times as fast")
    assert replayed.difference is None


async def test_switched_off_nothing_is_predicted_and_no_process_starts(folder: Path, hasty: None) -> None:
    async with live(serve_config(file=folder / "janus.toml", flags={"oracle": "off"})) as server:
        end_s = time.monotonic() + 2.0
        number = 0
        while time.monotonic() < end_s:
            await asyncio.gather(*(server.ask("support", number + i) for i in range(3)))
            number += 3
        shown = await server.models()
        assert children("oracle_fit.py") == []
    assert shown["chat"]["prediction"] is None
    told = [one.event for one in journal.read(folder / "journal") if isinstance(one, journal.Entry)]
    assert any(isinstance(event, Observed) and event.models for event in told)


async def test_without_gpytorch_the_shape_and_the_steps_are_what_there_is(
    folder: Path, hasty: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_module, "possible", lambda: False)
    with caplog.at_level("INFO", "janus.node"):
        async with live(serve_config(file=folder / "janus.toml")) as server:
            found = await server.until(lambda one: one["periods"] >= 2, 60.0)
    assert not found["fitted"] and found["predicted"] > 0.5
    assert [one.message for one in caplog.records if "gpytorch is not installed" in one.message]


async def test_a_process_that_cannot_start_costs_one_line_and_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fitting.oracle_records, "__file__", str(tmp_path / "oracle_records.py"))
    fitter = fitting.Fitter()
    try:
        assert await fitter.fit(a_request()) is None
        assert await fitter.fit(a_request()) is None
    finally:
        fitter.close()
    assert len([one for one in caplog.records if "nothing is fitted any more" in one.message]) == 1


async def test_closing_does_not_wait_for_a_fit_that_runs() -> None:
    fitter = fitting.Fitter()
    waiting = asyncio.create_task(fitter.fit(a_request()))
    while not children("oracle_fit.py"):
        await asyncio.sleep(0.01)
    await asyncio.to_thread(fitter.close)
    assert children("oracle_fit.py") == []
    assert await waiting is None
