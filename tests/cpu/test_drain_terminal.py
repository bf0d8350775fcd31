"""`janus drain --wait` of a server whose answers are written out, and commands whose server says nothing at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from janus_server.api.cluster import ClusterView, LeaderView, ModelView, NodeView
from janus_server.api.nodes import NodeDuty
from janus_server.terminal import dashboard, drain, status


def sight(term: int, *draining: str, empty: bool = False, leads: bool = True, gone: bool = False) -> ClusterView:
    """n0 leads, and is asked; n1 is the one that is to be emptied."""
    leader = LeaderView(served={}, predictions={}, decisions=[], draining=list(draining))
    models = [] if empty else [ModelView(model="a", stage="active", running=2)]
    nodes = [NodeView(node="n0", leads=leader if leads else None), NodeView(node="n1", empty=empty, models=models)]
    return ClusterView(asked="n0", leader="n0" if leads else None, term=term, time=0.0, nodes=nodes[: 2 - gone])


class Scripted:
    """Answers with one sight after the other, the last of them again and again; counts what it is asked for."""

    def __init__(self, sights: list[ClusterView]) -> None:
        self.asked: list[str] = []
        coming = iter(sights[:-1])

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(next(coming, sights[-1]))

            def do_POST(self) -> None:
                scripted.asked.append(self.path)
                self.answer(NodeDuty(node="n1", duty="drain", why="n1 is being emptied: a still there"))

            def answer(self, value: msgspec.Struct) -> None:
                body = msgspec.json.encode(value)
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        scripted = self
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Scripted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_LOOK_S", 0.01)


def drained(sights: list[ClusterView]) -> tuple[int, int]:
    """Its exit code, and how often the leader was told. The first sight is from before that."""
    with Scripted(sights) as server:
        options = drain.DrainOptions(server.url, "n1", wait=True, timeout_s=60.0, key="k")
        code = drain.run(options)
        assert set(server.asked) == {"/admin/nodes/n1/drain"}
        return code, len(server.asked)


def test_it_waits_until_the_node_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    older = sight(1, empty=True)  # a sight is shared for a moment: what it shows was before
    nobody = sight(1, leads=False)
    assert drained([sight(1), older, sight(1, "n1"), nobody, sight(1, "n1"), sight(1, "n1", empty=True)]) == (0, 1)
    assert capsys.readouterr().out.splitlines() == [
        "n1 is being emptied: a still there", "n1 is being emptied: a still there, with 2 requests",
        "n1 is empty: it can be stopped",
    ]  # fmt: skip


def test_a_leader_that_knows_nothing_of_it_is_told_once() -> None:
    forgot = [sight(2)] * 5
    assert drained([sight(1), sight(1, "n1"), *forgot, sight(2, "n1"), sight(2, "n1", empty=True)]) == (0, 2)
    assert drained([sight(1), sight(1, "n1"), sight(2, "n1"), sight(2, "n1", empty=True)]) == (0, 1)


def test_who_uses_the_node_again_meanwhile_is_not_overruled(capsys: pytest.CaptureFixture[str]) -> None:
    for sights in ([sight(1), sight(1, "n1"), sight(1)], [sight(1), sight(1, "n1"), sight(2, "n1"), sight(2)]):
        assert drained(sights) == (1, 1)
        assert "n1 is not being emptied any more" in capsys.readouterr().err


def test_a_node_that_is_gone_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert drained([sight(1), sight(1, "n1"), sight(1, gone=True)]) == (1, 1)
    assert "n1 is gone" in capsys.readouterr().err


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that takes connections and says nothing, as one that was stopped by a signal."""
    for module in (status, drain):
        monkeypatch.setattr(module, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_nobody_waits_for_ever_for_a_server_that_says_nothing(silent: str, capsys: pytest.CaptureFixture[str]) -> None:
    codes = (
        status.run(status.StatusOptions(silent, once=True, key="k")),
        dashboard.run(dashboard.DashboardOptions(silent, key="k")),
        drain.run(drain.DrainOptions(silent, "n1", key="k")),
        drain.run(drain.DrainOptions(silent, "n1", wait=True, key="k")),
    )
    assert codes == (1, 1, 1, 1)
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("has not answered for 200 ms") == 4
