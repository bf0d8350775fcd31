"""The dashboard in a real browser: it shows what /admin/cluster says, fetches nothing else, and runs nobody's markup.

Skipped where no Chromium is installed.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from aiohttp import web
from browser import Browser
from real_cluster import REPO, SMALL, Cluster, Load, complete
from server_process import Server

from janus_server import localkey
from janus_server.api.admin import Prediction, UnderWay
from janus_server.api.cluster import (
    ApplicationView,
    ClusterView,
    Come,
    Decision,
    LeaderView,
    ModelView,
    NodeView,
    Spread,
    Stretch,
)
from janus_server.http.dashboard import FOLDER, SCRIPTS, read_dashboard
from janus_server.http.docs import shown

KEY = "the-admin-key"
HOSTILE = "<img src=x onerror=window.broken=1><script>window.broken=1</script>"
PROMISED = """
[applications.kept]
model = "a"
ttft = "5min"
tpot = "5min"
attain = 0.9
[applications.impossible]
model = "b"
ttft = "1us"
tpot = "1us"
attain = 0.9
"""


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with Browser(tmp_path / "profile") as browser:
        yield browser


def key_of(url: str, runtime: Path) -> str:
    """The one that a server left for its user."""
    found = localkey.find([runtime / "janus"], urlsplit(url).port or 0)
    assert found is not None
    return found.key


def asked(url: str, key: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/admin/cluster", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.loads(reply.read())


async def unlocked(browser: Browser, url: str, key: str) -> None:
    await browser.open(f"{url}/dashboard")
    await browser.type("#key", key)
    await browser.click("#unlock button")


async def live(browser: Browser, url: str, key: str = KEY) -> None:
    await unlocked(browser, url, key)
    await browser.until("document.body.dataset.state === 'live'")


def calm(browser: Browser, url: str) -> None:
    """No error, no word on the console, nothing that the policy stopped, nothing fetched from elsewhere. That an answer
    was no success is Chromium's own remark."""
    assert [one for one in browser.complaints if not one.startswith("network:")] == []
    assert browser.elsewhere(url) == []


# A page that is fed.


class Fed:
    """The real page over views that a test makes; it keeps what the page asked for."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self.asked: list[tuple[str, bytes]] = []
        self.answer: tuple[int, dict[str, Any]] = (200, {"model": "m", "why": "it is so"})
        self.answering = asyncio.Event()
        self.answering.set()

    async def page(self, request: web.Request) -> web.Response:
        return shown(read_dashboard())

    async def cluster(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "the API key is not valid"}}, status=401)
        return web.Response(body=msgspec.json.encode(self.view), content_type="application/json")

    async def wish(self, request: web.Request) -> web.Response:
        self.asked.append((request.raw_path, await request.read()))
        await self.answering.wait()
        return web.json_response(self.answer[1], status=self.answer[0])


@contextlib.asynccontextmanager
async def feeding(view: ClusterView) -> AsyncIterator[tuple[Fed, str]]:
    fed = Fed(view)
    app = web.Application()
    app.router.add_get("/dashboard", fed.page)
    app.router.add_get("/admin/cluster", fed.cluster)
    app.router.add_post("/admin/{what:.*}", fed.wish)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield fed, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def application(name: str, model: str, **facts: Any) -> ApplicationView:
    nothing = Spread(bounds_s=[0.1, 1.0], counts=[0, 0, 0])
    return ApplicationView(application=name, model=model, **{"ttft": nothing, "tpot": nothing, **facts})


def told(name: str = "m", word: str = "") -> ClusterView:
    """A cluster of one model; `word` stands wherever a text may."""
    expected = Prediction(
        says=word or "98 of 100 are expected", age_s=1.0, requests_per_s=2.0, tokens_per_s=9.0, target=0.95,
        attained=None, predicted=0.9, predicted_least=0.8, needs=0.1, needs_most=0.2, hbm=0.1, compute=0.1,
        bandwidth=0.1, busy_share=None, periods=1, fitted=True,
    )  # fmt: skip
    decision = Decision(
        time=1e9, term=7, kind="order", model=name, node=word or "n0", verb=word or "fork", why=word or "why"
    )
    moving = UnderWay(order=1, verb="fork", why=word or "copied", for_s=1.0, done_bytes=2**20, total_bytes=2**22)
    leads = LeaderView(
        served={name: ["n0"]}, predictions={name: expected}, decisions=[decision], draining=["n1"], waiting={name: 4}
    )
    first = NodeView(
        node="n0", url="http://127.0.0.1:1", host=word or "h0", version=word or "1.0", up_s=100.0, term=7,
        page_bytes=2**20, pool_pages=100, free_pages=35, scratch_pages=5, host_budget_bytes=2**30, leads=leads,
        models=[ModelView(model=name, stage="active", running=3, held=1, weight_pages=40, kv_pages=20, pinned=True)],
        applications=[application(name, name)],
    )  # fmt: skip
    second = NodeView(
        node="n1", host=word or "h1", up_s=100.0, term=7, page_bytes=2**20, pool_pages=100, free_pages=100,
        models=[ModelView(model=name, stage="warm", under_way=moving, host_copy_bytes=2**20, trouble=word or None)],
        applications=[application(word or name, name)],
    )  # fmt: skip
    third = NodeView(node=word or "n2", trouble=word or "it does not answer")
    return ClusterView(asked="n0", leader="n0", term=7, time=1e9, nodes=[first, second, third])


async def test_what_is_said_of_a_cluster_is_shown(browser: Browser) -> None:
    async with feeding(told()) as (_, url):
        await live(browser, url)
        facts = {
            one: await browser.text(f"#fact-{one}") for one in ("leader", "term", "nodes", "of", "running", "waiting")
        }
        assert facts == {
            "leader": "n0", "term": "term 7", "nodes": "2", "of": "of 3 up", "running": "3", "waiting": "4 waiting",
        }  # fmt: skip
        assert await browser.text("#alarm") == "n2 does not answer."
        cards = await browser.texts(".card")
        assert "leads" in cards[0] and "65 % of 100 MiB in use" in cards[0] and "KV 20 MiB" in cards[0]
        assert "draining" in cards[1] and "fork, 25 % of 4 MiB: copied" in cards[1] and "it does not answer" in cards[2]
        titles = await browser.run("[...document.querySelectorAll('.card')][0].querySelector('.device').ariaLabel")
        assert titles == "m: weights 40 MiB, KV cache 20 MiB; scratch 5 MiB; free 35 MiB"
        widths = await browser.run("[...document.querySelectorAll('.area-box')].slice(0, 3).map((n) => n.offsetWidth)")
        assert widths[0] / widths[2] == pytest.approx(60 / 35, rel=0.05) and widths[1] < widths[2] / 5
        assert await browser.texts(".group") == ["h0", "h1", "host unknown"]
        assert await browser.texts(".place") == ["n0", "n1"]
        assert [await browser.run(f"document.querySelectorAll('.place')[{i}].className") for i in (0, 1)] == [
            "place active served", "place warm moving",
        ]  # fmt: skip
        assert await browser.text(".forecast") == "90.0 % expected95 % wanted, at 2 requests/s"
        assert await browser.texts("#decisions li p") == ["why"]
        calm(browser, url)


async def test_names_and_sentences_are_text(browser: Browser) -> None:
    async with feeding(told(HOSTILE, HOSTILE)) as (fed, url):
        fed.answer = 409, {"error": {"message": HOSTILE}}
        await live(browser, url)
        await browser.run("document.querySelector('.opener').click()")
        await browser.click(".more button", "Load")
        await browser.until("document.querySelector('.notice') !== null")
        assert HOSTILE in await browser.text(".notice") and HOSTILE in await browser.text("#decisions")
        assert HOSTILE in await browser.text(".opener") and HOSTILE in await browser.text(".residents")
        assert await browser.run("document.querySelectorAll('img, body script').length") == 1  # its own script
        assert await browser.run("window.broken") is None
        calm(browser, url)
        assert len(fed.asked) == 1 and fed.asked[0][0].startswith("/admin/models/%3Cimg%20src")


async def test_percentiles_and_differences_are_those_of_the_counts(browser: Browser) -> None:
    """The page's own functions, against values that are kept and sorted here."""
    chance = random.Random(5)
    bounds = [0.1, 0.2, 0.4, 0.8, 1.6]
    async with feeding(told()) as (_, url):
        await browser.open(f"{url}/dashboard")
        for _ in range(40):
            values = sorted(chance.uniform(0, chance.choice((0.3, 1.5, 3.0))) for _ in range(chance.randrange(1, 60)))
            counts = [0] * (len(bounds) + 1)
            for value in values:
                counts[bisect.bisect_left(bounds, value)] += 1
            share = chance.choice((0.5, 0.9, 0.99))
            found = await browser.run(f"quantile({bounds}, {counts}, {share})")
            exact = next(one for i, one in enumerate(values, 1) if i >= share * len(values))
            place = bisect.bisect_left(bounds, exact)
            low, high = ([0.0, *bounds][place], bounds[place]) if place < len(bounds) else (bounds[-1], bounds[-1])
            assert low <= found <= high, (counts, share)
        assert await browser.run(f"quantile({bounds}, [0, 0, 0, 0, 0, 0], 0.5)") is None
        assert await browser.run(f"quantile({bounds}, [0, 4, 0, 0, 0, 0], 0.5)") == pytest.approx(0.15)
        calm(browser, url)


async def test_a_minute_is_what_was_counted_in_it(browser: Browser) -> None:
    """Over two nodes, one of which starts again and counts from nothing."""

    def at(first: int, second: int, up_s: float) -> str:
        view = told()
        for node, ended in zip(view.nodes, (first, second), strict=False):
            spread = Spread(bounds_s=[0.1, 1.0], counts=[ended, 0, 0])
            node.applications = [application(
                "x", "m", attain=0.9, requests=ended, ended=ended, attained=ended // 2, ttft=spread, tpot=spread
            )]  # fmt: skip
        view.nodes[1].up_s = up_s
        return msgspec.json.encode(view).decode()

    async with feeding(told()) as (_, url):
        await browser.open(f"{url}/dashboard")
        await browser.run("window.one = new History()")

        async def point(view: str, now: float) -> dict[str, Any]:
            await browser.run(f"one.add({view}, {now})")
            return await browser.run("one.apps.get('x').points.at(-1)")

        assert (await point(at(1000, 500, 50), 100))["ended"] == 0
        grown = await point(at(1010, 500, 51), 110)
        assert (grown["ended"], grown["kept"], grown["rate"]) == (10, 0.5, 1.0)
        assert (grown["ttft50"], grown["ttft99"]) == (pytest.approx(0.05), pytest.approx(0.099))
        assert (await point(at(1010, 10, 1), 111))["ended"] == 20  # it began anew, and all it counted came since
        assert (await point(at(1010, 16, 2), 112))["ended"] == 26
        assert (await point(at(1012, 16, 40), 150))["ended"] == 28
        assert (await point(at(1012, 16, 65), 171))["ended"] == 8  # the first twenty are over a minute old
        assert (await point(at(1012, 16, 200), 300))["ended"] == 0
        assert (await point(at(4, 20, 201), 301))["ended"] == 4  # what falls is nothing, not less
        assert (await point(at(7, 20, 202), 302))["ended"] == 7


@pytest.mark.parametrize("name", ["constructor", "__proto__", "toString"])
async def test_a_model_may_be_called_as_what_every_object_has(browser: Browser, name: str) -> None:
    view = told(name)  # which the leader knows, and another that it does not
    view.nodes[0].models.append(ModelView(model="hasOwnProperty", stage="cold"))
    async with feeding(view) as (_, url):
        await live(browser, url)
        assert await browser.texts(".opener") == sorted(["hasOwnProperty", name])
        assert (await browser.text(f"tbody[data-model='{name}'] .forecast")).startswith("90.0 % expected95 % wanted")
        assert await browser.text("tbody[data-model='hasOwnProperty'] .forecast") == "–"
        assert await browser.text("#fact-waiting") == "4 waiting"
        calm(browser, url)


async def test_what_the_page_cannot_draw_is_not_the_nodes_fault(browser: Browser) -> None:
    async with feeding(told()) as (_, url):
        await live(browser, url)
        await browser.run("nodes.update = () => { throw new Error('no such thing') }")
        await browser.until("document.body.dataset.state === 'broken'")
        assert await browser.text("#freshness") == "this page cannot draw what the node says: Error: no such thing"
        await browser.run("delete nodes.update")
        await browser.until("document.body.dataset.state === 'live'")


async def test_a_page_begins_with_what_came_before_it(browser: Browser) -> None:
    """Two nodes, one up for ten minutes, the other for fifty seconds; five requests in each ten seconds of each."""
    view = told()
    for node, steps in zip(view.nodes, (60, 5), strict=False):
        come = Come(application="x", requests=5, ended=5, attained=4, ttft=[5, 0, 0], tpot=[0, 5, 0])
        node.applications = [application("x", "m", attain=0.9, ttft_s=1.0, requests=9000, ended=9000, attained=1)]
        node.past = [Stretch(ago_s=10.0 * i + 3.0, over_s=10.0, came=[come]) for i in reversed(range(steps))]
        node.past.append(Stretch(ago_s=0.0, over_s=3.0, came=[]))
    async with feeding(view) as (_, url):
        await live(browser, url)
        assert await browser.text("#fact-kept") == "80.0 %"
        assert await browser.text("[data-application='x'] .badge") == "missed"
        await browser.run("window.one = new History(); one.recall(latest.view, 1000); one.add(latest.view, 1000)")
        # Six stretches of one node lie within the minute, five of the other; of the last of each, seven seconds.
        assert await browser.run("one.pace(1000)") == {"rate": pytest.approx(0.7), "kept": 0.8, "ended": 55}
        points = await browser.run("one.apps.get('x').points.map((point) => [point.t, point.ended])")
        assert len(points) == 60 and points[0][0] == 410 and points[-1] == [1000, 55]
        assert all(b - a == 10 for (a, _), (b, _) in itertools.pairwise(points))
        assert {ended for t, ended in points if 460 < t < 900} == {30}
        await browser.run("one.add(latest.view, 1001)")  # seen anew: nothing is added
        assert await browser.run("one.pace(1001).ended") == 55 and await browser.run("one.span()") == 600
        await browser.until("history_.apps.get('x').points.length > 63")
        asked_for = [one for one in browser.fetched if "/admin/cluster" in one]
        assert asked_for[0].endswith("?past=true") and not any("past" in one for one in asked_for[1:])
        calm(browser, url)


async def test_what_takes_something_away_is_asked_about_first(browser: Browser) -> None:
    async with feeding(told()) as (fed, url):

        async def sent(*calls: tuple[str, bytes]) -> None:
            async def all_there() -> bool:
                return fed.asked == list(calls)

            await browser.when(all_there, f"the page sends {calls}")
            await browser.until("!document.querySelector('#confirm').open && !document.querySelector('.busy')")

        sleep, unpin = ("/admin/models/m/sleep", b""), ("/admin/models/m/unpin", b"")
        fork, drain = ("/admin/models/m/fork", b'{"source":"n0"}'), ("/admin/nodes/n0/drain", b"")
        serve, force = ("/admin/nodes/n1/serve", b""), ("/admin/nodes/n0/drain?force=true", b"")
        await live(browser, url)
        await browser.click(".opener")
        await browser.click(".more button", "Sleep")
        await browser.until("document.querySelector('#confirm').open")
        assert await browser.text("#confirm-title") == "Sleep m?"
        await browser.click("#confirm-no")
        await sent()
        await browser.click(".more button", "Sleep")
        await browser.click("#confirm-yes")
        await sent(sleep)
        assert await browser.text(".notice p") == "Sleep m: it is so"
        await browser.click(".more button", "Unpin")
        await sent(sleep, unpin)
        await browser.run("document.querySelector('.more select').value = 'n0'")
        await browser.click(".more button", "Fork")
        await sent(sleep, unpin, fork)
        await browser.click(".card header button", "Use again")
        await sent(sleep, unpin, fork, serve)
        fed.answer = 409, {"error": {"message": "m has no room elsewhere"}}
        await browser.click(".card header button", "Drain")
        await browser.click("#confirm-yes")
        await browser.until("document.querySelector('#confirm-text').textContent === 'm has no room elsewhere'")
        await browser.click("#confirm-yes", "Drain it")
        await sent(sleep, unpin, fork, serve, drain, force)
        await browser.click("#forget")
        await browser.until("!document.querySelector('#locked').hidden")
        await browser.click(".more button", "Load")
        await browser.until("document.querySelector('#notices').textContent.includes('the admin key is needed')")
        assert len(fed.asked) == 6 and await browser.run("sessionStorage.length") == 0
        calm(browser, url)


async def test_a_refusal_that_comes_late_rewrites_no_other_question(browser: Browser) -> None:
    """What was asked about is what happens, whatever comes back meanwhile."""
    async with feeding(told()) as (fed, url):
        await live(browser, url)
        fed.answer = 409, {"error": {"message": "m has no room elsewhere"}}
        fed.answering.clear()
        await browser.click(".card header button", "Drain")
        await browser.click("#confirm-yes")
        await browser.click(".opener")
        await browser.click(".more button", "Evict")
        await browser.until("document.querySelector('#confirm').open")
        fed.answering.set()
        await browser.until("document.querySelector('.notice.bad') !== null")
        await browser.until("!document.querySelector('.card .busy')")
        assert await browser.text("#confirm-title") == "Evict m?"
        assert await browser.text("#confirm-yes") == "Evict"
        fed.answer = 200, {"model": "m", "why": "it is so"}
        await browser.click("#confirm-yes")
        await browser.until("document.querySelector('.notice.good') !== null && !document.querySelector('.busy')")
        assert [path for path, _ in fed.asked] == ["/admin/nodes/n0/drain", "/admin/models/m/evict"]
        calm(browser, url)


async def test_an_address_with_the_key_opens_a_page_that_is_open_already(browser: Browser) -> None:
    async with feeding(told()) as (_, url):
        await browser.open(f"{url}/dashboard")
        await browser.until("!document.querySelector('#locked').hidden")
        await browser.call("Page.navigate", url=f"{url}/dashboard#key={KEY}")
        await browser.until("document.body.dataset.state === 'live'")
        assert await browser.run("location.href") == f"{url}/dashboard"
        calm(browser, url)


def test_every_part_is_in_the_page() -> None:
    assert sorted(SCRIPTS) == sorted(path.name for path in FOLDER.glob("*.js"))
    page = read_dashboard()
    assert b"@STYLE@" not in page.body and b"@SCRIPT@" not in page.body and page.body.count(b"</script>") == 1
    assert "unsafe" not in page.policy and "default-src 'none'" in page.policy


# A server alone.


class Alone(msgspec.Struct):
    url: str
    key: str
    runtime: Path


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    runtime = tmp_path_factory.mktemp("run")
    runtime.chmod(0o700)
    config = runtime / "janus.toml"
    config.write_text(PROMISED)
    named = [f"{name}={path}" for name, path in models.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        with Server(*named, "--config", str(config), *SMALL) as server:
            yield Alone(server.url, key_of(server.url, runtime), runtime)


async def test_a_server_alone_shows_itself_to_its_operator(alone: Alone, browser: Browser) -> None:
    await unlocked(browser, alone.url, "not the key")
    await browser.until("document.body.dataset.state === 'refused'")
    assert await browser.text("#refusal") == "the API key is not valid"
    count = len(browser.fetched)
    await browser.type("#key", alone.key)
    await browser.click("#unlock button")
    await browser.until("document.body.dataset.state === 'live'")
    assert len(browser.fetched) <= count + 2, "a key that was refused is not tried again"
    seen = asked(alone.url, alone.key)
    node = seen["nodes"][0]
    assert await browser.text("#fact-leader") == seen["leader"] == node["node"]
    areas = await browser.run("document.querySelector('.device').ariaLabel")
    for one in node["models"]:
        if one["stage"] == "active":
            assert f"{one['model']}: weights {one['weight_pages'] * 64} KiB" in areas
    assert f"free {node['free_pages'] * 64 / 1024:.1f}".removesuffix(".0") in areas
    calm(browser, alone.url)


async def test_the_command_prints_an_address_that_opens_it(alone: Alone, browser: Browser) -> None:
    def said(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "janus_server", "dashboard", "--url", alone.url]
        environment = {**os.environ, "PYTHONPATH": str(REPO), "XDG_RUNTIME_DIR": str(folder)}
        return subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=60)

    stranger = alone.runtime / "stranger"
    stranger.mkdir(mode=0o700)
    refused = said(stranger)
    assert refused.returncode == 1 and refused.stdout == "" and "admin key" in refused.stderr
    found = said(alone.runtime)
    assert found.returncode == 0, found.stderr
    address = found.stdout.strip()
    assert address.startswith(f"{alone.url}/dashboard#key=")
    await browser.open(address)
    await browser.until("document.body.dataset.state === 'live'")
    assert await browser.run("location.href") == f"{alone.url}/dashboard"
    assert await browser.run("history.length") == 2  # the address with the key is not among what was visited
    assert all(alone.key not in one.partition("#")[0] for one in browser.fetched)
    calm(browser, alone.url)


async def test_requests_are_counted_and_their_promises_judged(alone: Alone, browser: Browser) -> None:
    await live(browser, alone.url, alone.key)
    for name, count in (("kept", 5), ("impossible", 3)):
        for _ in range(count):
            complete(alone.url, name, tokens=4)

    async def counted() -> bool:
        seen = asked(alone.url, alone.key)["nodes"][0]["applications"]
        return {one["application"]: one["ended"] for one in seen if one["ended"]} == {"kept": 5, "impossible": 3}

    await browser.when(counted, "the server counts eight requests")
    await browser.until("document.querySelector('#fact-ended').textContent === 'of 8'")
    assert await browser.text("#fact-kept") == "62.5 %"
    assert await browser.text('[data-application="kept"] .badge') == "kept"
    assert await browser.text('[data-application="impossible"] .badge') == "missed"
    heads = await browser.texts('[data-application="kept"] .chart-head b')
    assert heads[0] == "100.0 %" and "p99" in heads[1]
    lines = await browser.run("[...document.querySelectorAll('.line.strong')].filter((n) => n.attributes.d).length")
    assert lines >= 2
    calm(browser, alone.url)


async def test_a_page_that_is_opened_after_the_requests_shows_them(alone: Alone, browser: Browser) -> None:
    for _ in range(4):
        complete(alone.url, "kept", tokens=4)
    await live(browser, alone.url, alone.key)
    assert int((await browser.text("#fact-ended")).removeprefix("of ")) >= 4
    assert await browser.text('[data-application="kept"] .badge') == "kept"
    calm(browser, alone.url)


async def test_a_model_is_put_to_sleep_and_woken(alone: Alone, browser: Browser) -> None:
    await live(browser, alone.url, alone.key)
    row = 'tbody[data-model="a"]'
    await browser.until(f"document.querySelector('{row} .place.active') !== null")
    await browser.click(f"{row} .opener")
    await browser.click(f"{row} .more button", "Sleep")
    await browser.click("#confirm-yes")
    await browser.until(f"document.querySelector('{row} .place.warm') !== null")
    seen = asked(alone.url, alone.key)["nodes"][0]["models"]
    assert next(one["stage"] for one in seen if one["model"] == "a") == "warm"
    await browser.until("document.querySelector('#decisions').textContent.includes('sleep')")
    await browser.click(f"{row} .more button", "Wake")
    await browser.until(f"document.querySelector('{row} .place.active') !== null")
    calm(browser, alone.url)


# A cluster.


@pytest.fixture(scope="module")
def cluster(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(models, tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


async def test_a_node_is_emptied_and_used_again(cluster: Cluster, browser: Browser) -> None:
    """By a page of another node: the one that serves a model, so that there is something to move."""
    url = cluster.urls["n0"]
    key = key_of(url, cluster.runtime)
    await live(browser, url, key)
    serving = str(
        await browser.until("(document.querySelector('tbody[data-model=a] .place.served') || {}).textContent")
    )
    card, badge = f"article[aria-label={serving}]", f"document.querySelector('article[aria-label={serving}] .badge')"
    await browser.click(f"{card} header button", "Drain")
    await browser.click("#confirm-yes")
    await browser.until(f"{badge}.textContent === 'empty: it can be stopped'")
    seen = {one["node"]: one for one in asked(url, key)["nodes"]}
    assert all(one["stage"] != "active" for one in seen[serving]["models"])
    assert any(one["leads"] and one["leads"]["draining"] == [serving] for one in seen.values())
    assert all(one != serving for one in await browser.texts(".place.served"))
    await browser.click(f"{card} header button", "Use again")
    await browser.until(f"!{badge}.textContent.includes('stopped')")
    assert await browser.run("document.querySelectorAll('.notice.bad').length") == 0
    calm(browser, url)


async def test_a_leader_that_is_killed_is_seen(cluster: Cluster, browser: Browser, texts: dict[str, str]) -> None:
    leader = cluster.leader
    node = next(name for name in cluster.urls if name != leader)
    url = cluster.urls[node]
    key = key_of(url, cluster.runtime)
    await live(browser, url, key)
    load = Load({node: url}, {"a": texts["a"]}, each=1)
    try:
        await browser.until("Number(document.querySelector('#fact-rate').textContent) > 0")
        seen = asked(url, key)
        assert [one["node"] for one in seen["nodes"]] == await browser.texts(".card h3") == ["n0", "n1", "n2"]
        assert await browser.text("#fact-leader") == seen["leader"] == leader
        crowned = "[...document.querySelectorAll('.card')].find((n) => !n.querySelector('.crown[hidden]')).ariaLabel"
        assert await browser.run(crowned) == leader
        where = {one["model"]: one["stage"] for one in seen["nodes"][0]["models"]}
        assert where.keys() == {"a", "b"}
        for model in where:
            stages = [one["stage"] for node in seen["nodes"] for one in node["models"] if one["model"] == model]
            places = f"document.querySelectorAll('tbody[data-model={model}] .place.active')"
            await browser.until(f"{places}.length === {stages.count('active')}")
        cluster.kill(leader)
        await browser.until(f"document.querySelector('#fact-leader').textContent !== '{leader}'")
        await browser.until(f"!['{leader}', 'nobody'].includes(document.querySelector('#fact-leader').textContent)")
        assert await browser.text("#fact-leader") == asked(url, key)["leader"]
        await browser.until("document.body.dataset.state === 'live'")
        await browser.until("document.querySelector('#fact-of').textContent === 'of 3 up'")  # it was started again
        await browser.until("document.querySelector('#fact-nodes').textContent === '3'")
    finally:
        load.stop()
    calm(browser, url)


async def test_a_page_whose_node_stops_says_so_and_goes_on_with_it(cluster: Cluster, browser: Browser) -> None:
    node = next(name for name in cluster.urls if name != cluster.leader)
    url = cluster.urls[node]
    key = key_of(url, cluster.runtime)
    await live(browser, url, key)
    cluster.kill(node, signal.SIGSTOP)
    try:
        await browser.until("document.body.dataset.state === 'stale'")
        assert "shown is what it said" in await browser.text("#freshness")
        await browser.run("document.querySelector('.opener').click()")
        assert "not now" in await browser.text(".more .why")
    finally:
        cluster.kill(node, signal.SIGCONT)
    await browser.until("document.body.dataset.state === 'live'")
    calm(browser, url)
