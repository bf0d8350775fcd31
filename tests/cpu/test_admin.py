"""An operator at a real server with room for one of three models: over HTTP, and with the commands of the terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from server_process import REPO, Server, post, tiny_model

from janus_server import keys
from janus_server.api.admin import AdminError, ManagedList, ManagedModel, MemoryMap, ModelEvent, Wished

NAMES = ("a", "org/b", "c")
PAGE = 64 << 10
# 9 pages of weights each; a quarter of the other 16 is scratch; two models do not fit beside a longest sequence of 5.
FLAGS = ("--memory", "1600KiB", "--page-size", "64KiB", "--kernels", "cpu", "--threads", "1", "--host-memory", "16MiB")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [f"{name}={tiny_model(folder / name[-1], seed=seed)}" for seed, name in enumerate(NAMES)]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where servers and commands of these tests meet, instead of the user's own folder."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        for variable in (keys.USER_VARIABLE, keys.ADMIN_VARIABLE):
            patch.delenv(variable, raising=False)
        yield folder / "janus"


@pytest.fixture(scope="module")
def server(arguments: list[str], run_folder: Path) -> Iterator[Server]:
    with Server(*arguments, *FLAGS) as server:
        yield server


@pytest.fixture
def admin(server: Server, run_folder: Path) -> Admin:
    """The operator; at first `a` is active, nobody is pinned and nothing is under way."""
    one = Admin(server, key_of(server, run_folder))
    for name in NAMES:
        one.wish(name, "unpin")
    assert one.wish("a", "load", 30)[0] == 200
    return one


def key_of(server: Server, folder: Path) -> str:
    key: str = json.loads((folder / f"{urlsplit(server.url).port}.key").read_text())["key"]
    return key


class Admin:
    """Calls of the admin routes with the admin key."""

    def __init__(self, server: Server, key: str) -> None:
        self.url = server.url
        self.key = key

    def call(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def wish(self, model: str, wish: str, wait_s: float | None = None) -> tuple[int, bytes]:
        query = "" if wait_s is None else f"?wait={wait_s:g}"
        return self.call(f"/admin/models/{model}/{wish}{query}", "POST")

    def models(self) -> dict[str, ManagedModel]:
        status, body = self.call("/admin/models")
        assert status == 200
        return {one.model: one for one in msgspec.json.decode(body, type=ManagedList).data}

    def memory(self) -> MemoryMap:
        status, body = self.call("/admin/memory")
        assert status == 200
        return msgspec.json.decode(body, type=MemoryMap)

    def until(self, model: str, stage: str) -> ManagedModel:
        end = time.monotonic() + 30
        while (found := self.models()[model]).stage != stage or found.under_way is not None:
            assert time.monotonic() < end, found
            time.sleep(0.01)
        return found


class Onlooker:
    """Reads /admin/events on a thread of its own, from when it is entered."""

    def __init__(self, admin: Admin) -> None:
        request = urllib.request.Request(admin.url + "/admin/events", headers={"Authorization": f"Bearer {admin.key}"})
        self._reply = urllib.request.urlopen(request, timeout=60)
        assert self._reply.headers["Content-Type"].startswith("text/event-stream")
        assert self._reply.readline() == b": ping\n"
        self.events: list[ModelEvent] = []
        self.done = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._reply:
            if line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"data: "):
                self.events.append(msgspec.json.decode(line[6:], type=ModelEvent))

    def until(self, kind: str, model: str) -> list[ModelEvent]:
        end = time.monotonic() + 30
        while not any(one.type == kind and one.model == model for one in self.events):
            assert time.monotonic() < end, self.events
            time.sleep(0.01)
        return list(self.events)

    def join(self) -> None:
        self._thread.join(30)


def error_of(body: bytes) -> Any:
    error = msgspec.json.decode(body, type=AdminError).error
    assert set(json.loads(body)["error"]) >= {"message", "type", "param", "code"}
    return error


# Models


def test_every_model_of_the_catalogue_is_listed_with_where_it_stands(admin: Admin) -> None:
    found = admin.models()
    assert list(found) == list(NAMES)
    one = found["a"]
    assert (one.stage, one.goal, one.under_way, one.pinned, one.draining) == ("active", None, None, False, False)
    assert (one.running, one.held, one.trouble) == (0, 0, None)
    assert one.idle_s is not None
    assert one.held_pages == one.weight_pages == -(-one.weight_bytes // PAGE)
    assert one.load_s > 0 and one.wake_s > 0
    for other in (found["org/b"], found["c"]):
        assert other.stage in ("cold", "warm")
        assert (other.held_pages, other.kv_pages, other.idle_s) == (0, 0, None)
        assert (other.host_copy_bytes > 0) is (other.stage == "warm")


def test_a_model_with_a_slash_takes_the_room_of_another_and_gives_it_back(admin: Admin) -> None:
    status, body = admin.wish("org/b", "load")
    assert status == 202
    accepted = msgspec.json.decode(body, type=Wished)
    assert (accepted.model, accepted.state.goal) == ("org/b", "active")
    admin.until("org/b", "active")
    assert admin.models()["a"].stage == "warm"
    status, body = admin.wish("a", "wake", 30)
    assert (status, msgspec.json.decode(body, type=Wished).state.stage) == (200, "active")
    assert admin.models()["org/b"].stage == "warm"


def test_asking_again_changes_nothing(admin: Admin) -> None:
    for wish, stage in (("sleep", "warm"), ("evict", "cold"), ("load", "active"), ("pin", "active")):
        for _ in range(3):
            status, body = admin.wish("a", wish, 30)
            assert (status, msgspec.json.decode(body, type=Wished).state.stage) == (200, stage)
    assert admin.models()["a"].pinned
    first, second = admin.wish("c", "unpin"), admin.wish("c", "unpin")
    assert first[0] == second[0] == 200


def test_a_slept_model_leaves_a_copy_and_an_evicted_one_nothing(admin: Admin) -> None:
    admin.wish("a", "sleep", 30)
    assert (admin.models()["a"].host_copy_bytes, admin.models()["a"].held_pages) == (2 << 20, 0)
    admin.wish("a", "evict", 30)
    assert admin.models()["a"].host_copy_bytes == 0
    assert "a" not in {copy.model for copy in admin.memory().host.copies}


@pytest.mark.parametrize(("first", "wish", "named"), [
    ("evict", "wake", "cold"), ("evict", "sleep", "cold"), ("pin", "evict", "pinned"), ("pin", "sleep", "active"),
])  # fmt: skip
def test_what_a_models_state_forbids_is_a_conflict_that_names_it(
    admin: Admin, first: str, wish: str, named: str
) -> None:
    assert admin.wish("a", first, 30)[0] == 200
    for wait_s in (None, 5):
        status, body = admin.wish("a", wish, wait_s)
        error = error_of(body)
        assert (status, error.code, error.param) == (409, "conflict", None)
        assert named in error.message
        assert error.state.stage == ("cold" if first == "evict" else "active")


def test_a_load_that_cannot_be_is_given_up_and_says_why(admin: Admin) -> None:
    admin.wish("a", "pin")
    status, body = admin.wish("c", "load", 30)
    error = error_of(body)
    assert (status, error.code) == (409, "conflict")
    assert "pinned on this node leave no room" in error.message
    assert error.state.trouble in error.message
    assert admin.models()["a"].stage == "active"


def test_a_load_that_must_wait_is_late_and_comes_all_the_same(admin: Admin) -> None:
    with long_answer(admin, "a"):
        status, body = admin.wish("c", "load", 0.2)
        assert (status, error_of(body).code, error_of(body).state.goal) == (504, "timeout", "active")
    admin.until("c", "active")


def test_a_busy_model_is_drained_before_it_sleeps(admin: Admin) -> None:
    with long_answer(admin, "a", 6) as stream:
        status, body = admin.wish("a", "sleep")
        state = msgspec.json.decode(body, type=Wished).state
        assert (status, state.stage, state.goal, state.draining, state.running) == (202, "active", "warm", True, 1)
        assert stream.read().endswith(b"data: [DONE]\n\n")
    admin.until("a", "warm")


@pytest.mark.parametrize(("path", "status", "code"), [
    ("/admin/models/nobody/load", 404, "model_not_found"), ("/admin/models/a/explode", 404, "not_found"),
    ("/admin/models/nobody/fork", 404, "model_not_found"), ("/admin/models/load", 404, "not_found"),
    ("/admin/models/a/load?wait=soon", 400, "invalid_value"), ("/admin/models/a/load?wait=nan", 400, "invalid_value"),
    ("/admin/models/a/load?wait=-1", 400, "invalid_value"), ("/admin/models/a/load?wait=1e9", 400, "invalid_value"),
])  # fmt: skip
def test_what_cannot_be_asked(admin: Admin, path: str, status: int, code: str) -> None:
    got, body = admin.call(path, "POST")
    assert (got, error_of(body).code) == (status, code)


# Memory


def test_the_map_adds_up_to_the_pool_and_shows_a_running_request(admin: Admin) -> None:
    adds_up(admin.memory())
    with long_answer(admin, "a"):
        found = admin.memory()
        adds_up(found)
        held = {(total.model, total.kind): total.pages for total in found.totals}
        assert held["a", "weights"] == 9
        assert held["a", "kv"] >= 1
        assert [(run.kind, run.model) for run in found.runs[-2:]] == [("kv", "a"), ("scratch", "(device)")]
        assert held["(device)", "scratch"] == found.runs[-1].count == 4
        one = next(m for m in found.models if m.model == "a")
        assert one.weight_extents >= 1
        assert 0 <= one.weight_waste_bytes < PAGE
        assert 0 < one.kv_waste_bytes < held["a", "kv"] * PAGE
        assert found.fragmentation.external == 0.0
        assert found.fragmentation.largest_request_pages == 9
    end = time.monotonic() + 30
    while admin.models()["a"].running and time.monotonic() < end:
        time.sleep(0.01)
    after = admin.memory()
    adds_up(after)
    kv_pages = sum(total.pages for total in after.totals if total.kind == "kv")
    assert next(m for m in after.models if m.model == "a").prefix_pages == kv_pages


def adds_up(found: MemoryMap) -> None:
    assert (found.page_bytes, found.pool_pages) == (PAGE, 25)
    at = 0
    for run in found.runs:
        assert run.first == at
        at += run.count
    assert at == found.pool_pages
    assert found.free_pages == sum(run.count for run in found.runs if run.kind == "free")
    assert sum(total.pages for total in found.totals) + found.free_pages == found.pool_pages
    assert found.host.held_bytes == sum(copy.bytes for copy in found.host.copies) <= found.host.budget_bytes


# Events


def test_events_show_a_whole_load_and_who_gave_way(admin: Admin) -> None:
    admin.wish("c", "evict", 30)
    onlooker = Onlooker(admin)
    assert admin.wish("c", "load", 30)[0] == 200
    events = onlooker.until("done", "c")
    story = [(one.type, one.model, one.verb or None) for one in events if one.type != "progress"]
    assert story == [
        ("answer", "c", None), ("order", "a", "sleep"), ("done", "a", "sleep"), ("order", "c", "load"),
        ("done", "c", "load"),
    ]  # fmt: skip
    moved = [one for one in events if one.type == "progress" and one.model == "c"]
    assert moved[-1].done_bytes == moved[-1].total_bytes
    assert all(one.order == moved[0].order for one in moved)
    first, last = events[0], events[-1]
    assert (first.accepted, last.stage, last.copy) == (True, "active", False)
    assert isinstance(last.took_s, float) and last.took_s > 0
    assert "wanted" in str(next(one for one in events if one.type == "order" and one.model == "c").why)
    admin.wish("c", "wake")
    assert admin.wish("org/b", "evict", 30)[0] == 200
    assert admin.wish("org/b", "wake")[0] == 409
    refused = [one for one in onlooker.until("answer", "org/b") if one.model == "org/b" and one.accepted is False]
    assert all("cold" in str(one.why) for one in refused)


# Keys


def test_admin_routes_want_the_key_that_only_this_user_can_read(server: Server, admin: Admin, run_folder: Path) -> None:
    file = run_folder / f"{urlsplit(server.url).port}.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(run_folder.stat().st_mode) == 0o700
    for wrong in ("", "wrong-key-0123456789", admin.key[:-1]):
        other = Admin(server, wrong)
        for path, method in (("/admin/models", "GET"), ("/admin/models/a/evict", "POST"), ("/admin/memory", "GET"),
                             ("/admin/events", "GET")):  # fmt: skip
            status, body = other.call(path, method)
            assert (status, error_of(body).code) == (401, "invalid_api_key")
    assert admin.models()["a"].stage == "active"


def test_the_local_key_closes_nothing_to_others(server: Server, admin: Admin) -> None:
    assert Admin(server, "").call("/v1/models")[0] == 200
    assert post(f"{server.url}/v1/completions", b'{"model":"a","prompt":"x","max_tokens":1}')[0] == 200
    status, body = Admin(server, admin.key).call("/v1/models")
    assert status == 200
    assert admin.key not in body.decode()


def test_with_a_configured_key_there_is_no_other_and_the_end_ends_onlookers(
    arguments: list[str], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keys.ADMIN_VARIABLE, "configured-0123456789")
    with Server(arguments[0], *FLAGS) as server:
        assert not (run_folder / f"{urlsplit(server.url).port}.key").exists()
        admin = Admin(server, "configured-0123456789")
        assert list(admin.models()) == ["a"]
        assert Admin(server, "other-0123456789").call("/admin/models")[0] == 401
        assert command("models", "--url", server.url).returncode == 0
        onlooker = Onlooker(admin)
        assert server.stop() == 0
        onlooker.join()
        assert onlooker.done


def test_the_key_shows_nowhere_and_its_file_goes_with_the_server(arguments: list[str], run_folder: Path) -> None:
    with Server(arguments[0], *FLAGS, "--log-level", "debug") as server:
        file = run_folder / f"{urlsplit(server.url).port}.key"
        admin = Admin(server, key_of(server, run_folder))
        assert list(admin.models()) == ["a"]
        assert admin.key not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
        assert admin.key not in json.dumps(server.metrics())
        assert server.stop(signal.SIGTERM) == 0
        assert "/admin/models" in server.log
        assert admin.key not in server.log
        assert not file.exists()


def test_user_keys_alone_still_leave_the_operator_of_this_machine_in(
    arguments: list[str], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keys.USER_VARIABLE, "user-0123456789")
    with Server(arguments[0], *FLAGS) as server:
        assert list(Admin(server, key_of(server, run_folder)).models()) == ["a"]
        status, body = Admin(server, "user-0123456789").call("/admin/models")
        assert (status, error_of(body).code) == (403, "admin_key_needed")
        assert Admin(server, "user-0123456789").call("/v1/models")[0] == 200
        assert Admin(server, "").call("/v1/models")[0] == 401


# The document


def test_the_document_tells_of_the_admin_routes_and_who_may_call_them(server: Server, admin: Admin) -> None:
    tree = json.loads(admin.call("/openapi.json")[1])
    found = {path: set(item) for path, item in tree["paths"].items() if path.startswith("/admin")}
    assert found == {
        "/admin/models": {"get"}, "/admin/models/{model}/{wish}": {"post"}, "/admin/memory": {"get"},
        "/admin/events": {"get"}, "/admin/models/{model}/fork": {"post"}, "/admin/peers": {"get"},
        "/admin/cluster": {"get"}, "/admin/nodes/{node}/drain": {"post"}, "/admin/nodes/{node}/serve": {"post"},
    }  # fmt: skip
    wish = tree["paths"]["/admin/models/{model}/{wish}"]["post"]
    assert {"200", "202", "401", "403", "404", "409", "503", "504"} <= set(wish["responses"])
    assert [one["name"] for one in wish["parameters"]] == ["model", "wish", "wait"]
    for path in found:
        for operation in tree["paths"][path].values():
            assert {"admin": []} in operation["security"]
    assert "x-itemSchema" in tree["paths"]["/admin/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]


# The commands


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "janus_server", *arguments], capture_output=True, text=True, timeout=60, cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), **environment}, check=False,
    )  # fmt: skip


def test_janus_models_lists_what_stands_where(admin: Admin) -> None:
    done = command("models", "--url", admin.url)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["MODEL", "STAGE", "WEIGHTS"]
    assert [line.split()[0] for line in lines[1:]] == list(NAMES)
    assert lines[1].split()[1] == "active"
    listed = json.loads(command("models", "list", "org/b", "--json", "--url", admin.url).stdout)
    assert [one["model"] for one in listed] == ["org/b"]


def test_janus_models_brings_models_up_and_down(admin: Admin) -> None:
    done = command("models", "load", "org/b", "--wait", "--url", admin.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "org/b is active\n", "")
    assert admin.models()["org/b"].stage == "active"
    done = command("models", "sleep", "org/b", "--wait", "--url", admin.url)
    assert (done.returncode, done.stdout) == (0, "org/b is warm\n")
    done = command("models", "evict", "org/b", "--url", admin.url)
    assert done.returncode == 0
    assert "org/b is warm and will be cold" in done.stdout
    admin.until("org/b", "cold")
    assert command("models", "pin", "org/b", "--url", admin.url).returncode == 0
    assert admin.models()["org/b"].pinned


@pytest.mark.parametrize(("wish", "model", "expected"), [
    ("wake", "c", "janus: c is cold: there is nothing to wake; load it"),
    ("load", "org/bb", 'did you mean "org/b"'),
])  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_exit_code_one(admin: Admin, wish: str, model: str, expected: str) -> None:
    admin.wish("c", "evict", 30)
    for more in ((), ("--wait",)):
        done = command("models", wish, model, *more, "--url", admin.url)
        assert (done.returncode, done.stdout) == (1, "")
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1


def test_waiting_too_long_is_exit_code_one(admin: Admin) -> None:
    with long_answer(admin, "a"):
        done = command("models", "load", "c", "--wait", "--timeout", "300ms", "--url", admin.url)
        assert done.returncode == 1
        assert "still on its way" in done.stderr
    admin.until("c", "active")


def test_janus_memory_draws_the_pool(admin: Admin) -> None:
    done = command("memory", "--url", admin.url)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("1.56 MiB in 25 pages of 64 KiB")
    drawn = "".join(lines[1 : lines.index("")])
    assert len(drawn) == 25
    assert drawn.count("A") == 9 and drawn.endswith("####")
    assert "# is scratch for the steps of all models: 256 KiB" in lines
    assert re.search(r"^Bb  org/b", done.stdout, re.MULTILINE)
    as_json = command("memory", "--json", "--url", admin.url)
    adds_up(msgspec.json.decode(as_json.stdout, type=MemoryMap))


def test_janus_memory_goes_on_until_it_is_interrupted(admin: Admin) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "janus_server", "memory", "--watch", "--url", admin.url], stdout=subprocess.PIPE,
        text=True, cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)},
        # A shell that runs the tests in the background has them ignore what Ctrl-C sends.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert running.stdout is not None
        seen = 0
        while seen < 2:
            seen += running.stdout.readline().startswith("1.56 MiB in 25 pages")
        running.send_signal(signal.SIGINT)
        running.stdout.read()
        assert running.wait(30) == 0
    finally:
        running.kill()
        running.wait(30)


def test_without_a_server_or_a_key_the_commands_say_what_to_do(admin: Admin, tmp_path: Path) -> None:
    for name in ("models", "memory"):
        done = command(name, "--url", "http://127.0.0.1:9")
        assert (done.returncode, done.stdout) == (1, "")
        assert "no server answers at http://127.0.0.1:9" in done.stderr
        done = command(name, "--url", admin.url, XDG_RUNTIME_DIR=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
        assert done.returncode == 1
        assert "JANUS_ADMIN_KEY" in done.stderr
        done = command(name, "--url", admin.url, JANUS_ADMIN_KEY="wrong-key-0123456789")
        assert done.returncode == 1
        assert "not valid" in done.stderr
        assert "wrong-key" not in done.stderr


def long_answer(admin: Admin, model: str, choices: int = 64) -> Any:
    """A stream of many tokens that has begun; leaving it ends the request. The memory holds three choices at once."""
    body = {"model": model, "prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True, "n": choices}
    request = urllib.request.Request(
        f"{admin.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    reply = urllib.request.urlopen(request, timeout=60)
    assert reply.readline().startswith(b"data: ")
    return reply
