"""An operator whose files vanish, whose host is full, whose models are too large: clear answers, nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from http_server import NO_KEYS, OPEN, ROOMY
from server_process import Server, tiny_model
from test_lifecycle import ROOM_FOR_ONE, generate, opened, settings, until
from test_peers import Admin, answer, command

from janus_server import keys
from janus_server.admission import Admission
from janus_server.api.bodies import Limits
from janus_server.http.app import build_app
from janus_server.http.edge import build_runner
from janus_server.http.gate import Gate
from janus_server.metrics import Metrics
from janus_server.node import Node
from janus_server.orders import Wish

FLAGS = ("--memory", "16MiB", "--page-size", "64KiB", "--kernels", "cpu", "--threads", "1")
UNREADABLE = "the model could not be loaded; the server's log says why"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed) for seed, name in enumerate("abcd")}


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for variable in (keys.USER_VARIABLE, keys.ADMIN_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    yield tmp_path / "janus"


@pytest.fixture
def mine(models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(models["a"], tmp_path / "mine"))


def refused(server: Server, model: str) -> urllib.error.HTTPError:
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    return error.value


def is_unreadable(error: urllib.error.HTTPError) -> None:
    assert error.code == 503
    body = json.loads(error.read())["error"]
    assert (body["message"], body["code"]) == (UNREADABLE, "model_unavailable")


def test_a_model_larger_than_the_node_is_refused_at_the_start_with_what_to_do(models: dict[str, Path]) -> None:
    done = command("serve", f"a={models['a']}", *FLAGS, "--memory", "512KiB", "--port", "0")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "a: its weights take" in done.stderr and "--memory is 512 KiB; give more" in done.stderr


def test_a_folder_that_vanishes_is_missed_only_when_it_is_needed_and_welcome_back(
    models: dict[str, Path], mine: Path, run_folder: Path, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    with Server(f"a={mine}", f"b={models['b']}", *FLAGS) as server:
        admin = Admin(server, run_folder)
        expected = answer(server, "a")
        admin.wish("a", "sleep")
        mine.rename(away)
        assert answer(server, "a") == expected  # from the host copy
        assert admin.model("a")["origin"] == "wake"
        admin.wish("a", "evict")
        error = refused(server, "a")
        assert int(error.headers["Retry-After"]) >= 1
        is_unreadable(error)
        state = admin.model("a")
        assert (state["stage"], state["trouble"], state["held_pages"]) == ("cold", UNREADABLE, 0)
        status, body = admin.call("/admin/models/a/load?wait=30", "POST")
        assert (status, body["error"]["code"]) == (409, "conflict")
        assert UNREADABLE in body["error"]["message"] and str(tmp_path) not in json.dumps(body)
        assert answer(server, "b")
        away.rename(mine)
        assert answer(server, "a") == expected
        assert admin.model("a")["trouble"] is None
        admin.wish("a", "evict")
        mine.rename(away)
        shutil.copytree(away, mine)  # other files of equal content
        assert answer(server, "a") == expected
        server.stop()
        assert "a: load failed: FileNotFoundError" in server.log


def test_a_shard_that_went_bad_is_said_and_a_good_one_taken_again(
    models: dict[str, Path], mine: Path, run_folder: Path
) -> None:
    weights = mine / "model.safetensors"
    good = weights.read_bytes()
    with Server(f"a={mine}", f"b={models['b']}", *FLAGS) as server:
        admin = Admin(server, run_folder)
        expected = answer(server, "a")
        for bad in (good[:-1000], good[:8] + b"?" + good[9:], good[:-64] + b"\xff" * 64, other(models["c"])):
            admin.wish("a", "evict")
            weights.write_bytes(bad)
            status, body = admin.call("/admin/models/a/load?wait=30", "POST")
            assert (status, UNREADABLE in body["error"]["message"]) == (409, True), body
            is_unreadable(refused(server, "a"))  # at once, from what is known
            assert answer(server, "b")
            weights.write_bytes(good)
            assert admin.call("/admin/models/a/load?wait=30", "POST")[0] == 200
            assert answer(server, "a") == expected
        server.stop()
        assert "Traceback" not in server.log
        assert "holds a NaN" in server.log and "its files hold other weights than before" in server.log


def other(folder: Path) -> bytes:
    """Another training of the same shape."""
    return (folder / "model.safetensors").read_bytes()


def test_a_host_that_is_full_lets_no_model_be_lost(models: dict[str, Path], run_folder: Path) -> None:
    with Server(*(f"{name}={models[name]}" for name in "ab"), *FLAGS, "--host-memory", "2MiB") as server:
        admin = Admin(server, run_folder)
        expected = [answer(server, name) for name in "ab"]
        admin.wish("a", "sleep")
        admin.wish("b", "sleep")  # the copy that matters less gives way
        assert [admin.model(name)["stage"] for name in "ab"] == ["cold", "warm"]
        assert [answer(server, name) for name in "ab"] == expected
    with Server(f"a={models['a']}", *FLAGS, "--host-memory", "1MiB") as server:
        admin = Admin(server, run_folder)
        status, body = admin.call("/admin/models/a/sleep?wait=30", "POST")
        assert (status, body["error"]["state"]["stage"]) == (409, "cold")
        assert body["error"]["message"] == "a is cold: the host has no memory for a copy of it (--host-memory)"
        assert answer(server, "a") == expected[0]


@contextlib.asynccontextmanager
async def over_http(node: Node) -> AsyncIterator[aiohttp.ClientSession]:
    """The node behind a real socket, with keep-alive comments every 50 ms."""
    metrics, limits = Metrics(), Limits(keep_alive_s=0.05)
    app = build_app(node, metrics=metrics, limits=limits, admission=Admission(ROOMY, ROOMY, NO_KEYS.limits()))
    runner = build_runner(app, limits, Gate(OPEN, NO_KEYS, metrics))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:
            yield http
    finally:
        await runner.cleanup()


def waiting_for(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "x", "max_tokens": 4, "stream": True, "ignore_eos": True, **more}


async def test_a_stream_that_waits_for_its_model_is_kept_alive_then_answered(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ONE)) as node, over_http(node) as http:
        changing = node._lifecycle.residents["b"].changing  # type: ignore[union-attr]
        async with changing:  # the load of b waits for this
            async with http.post("/v1/completions", json=waiting_for("b")) as reply:
                assert reply.status == 200
                for _ in range(3):
                    assert await reply.content.readuntil(b"\n\n") == b": ping\n\n"
                assert node.operator is not None and node.operator.model("b").held == 1
                changing.release()
                rest = await reply.content.read()
                await changing.acquire()
        events = [part for part in rest.decode().split("\n\n") if part and not part.startswith(":")]
        assert events[-1] == "data: [DONE]" and len(events) >= 2
        assert all("error" not in event for event in events)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wait_has_an_end_and_says_when_to_come_again(models: dict[str, Path], stream: bool) -> None:
    async with opened(settings(models, ROOM_FOR_ONE)) as node, over_http(node) as http:
        resident = node._lifecycle.residents["b"]  # type: ignore[union-attr]
        resident.flow.patience_s = 0.02 if not stream else 0.3
        async with resident.changing:
            async with http.post("/v1/completions", json=waiting_for("b", stream=stream)) as reply:
                raw = (await reply.read()).decode()
                if stream:  # its headers were sent with the first comment
                    *_, event, done = [part for part in raw.split("\n\n") if part and not part.startswith(":")]
                    assert (reply.status, done) == (200, "data: [DONE]")
                    error = json.loads(event.removeprefix("data: "))["error"]
                else:
                    assert (reply.status, reply.headers["Retry-After"]) == (503, "5")
                    error = json.loads(raw)["error"]
                assert error["code"] == "model_unavailable" and "could not be made ready in time" in error["message"]
        await until(lambda: node.settled("b"))
        resident.flow.patience_s = 120.0
        assert len((await generate(node, "b"))[0]) == 8


async def test_an_operator_who_asks_many_things_at_once_is_answered_each_time(models: dict[str, Path]) -> None:
    """Whatever is refused names the state, and in the end the model does what was accepted last."""
    async with opened(settings(models, ROOM_FOR_ONE)) as node:
        operator = node.operator
        assert operator is not None
        wishes = [Wish.SLEEP, Wish.LOAD, Wish.EVICT, Wish.WAKE, Wish.PIN, Wish.EVICT, Wish.UNPIN, Wish.LOAD]
        for _ in range(6):
            answers = await asyncio.gather(*(operator.ask("a", wish) for wish in wishes))
            for one in answers:
                assert one.why.startswith("a is ") and any(w in one.why for w in ("active", "warm", "cold"))
            await until(lambda: node.settled("a"))
        assert len((await generate(node, "a"))[0]) == 8
