"""A fault ends the instance it is in and nothing else: its requests end, its pages return, the thread lives."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel_cases import open_table
from local_engine import LocalEngine, request
from server_process import tiny_model

from janus_server.config import ServeConfig
from janus_server.errors import Bug
from janus_server.executor import Cancel, DeviceThread, EndAll, Engine, StepReport, Stop, Submit
from janus_server.node import Node as ServerNode
from janus_server.types import FinishReason, PageKind


class Node:
    """A device thread over one engine's pool, with two models on it that share weights."""

    def __init__(self, path: Path) -> None:
        self.local = LocalEngine(path, open_table("cpu", 1), page_bytes=1 << 14)
        self.reports: queue.Queue[StepReport] = queue.Queue()
        self.released: list[str] = []
        pool = self.local.xtensor.pool
        self.thread = DeviceThread(pool, self.local.scarcity, self.reports.put, lambda page: None, self.released.append)
        engine = Engine("m", self.local.batcher, self.local.runner)
        self.thread.ask(lambda: self.thread.attach(engine))
        self.thread.start()

    def ends(self, count: int) -> dict[tuple[str, int], FinishReason]:
        """Wait until that many choices ended."""
        found: dict[tuple[str, int], FinishReason] = {}
        while len(found) < count:
            for emit in self.reports.get(timeout=30).emits:
                if emit.finish is not None:
                    assert (emit.request_id, emit.index) not in found
                    found[(emit.request_id, emit.index)] = emit.finish
        return found

    def kv_pages(self) -> int:
        return sum(n for owner, n in self.local.xtensor.pool.held().items() if owner.kind is PageKind.KV)


def served_by(thread: DeviceThread, frozen_after_s: float) -> ServerNode:
    """The node of a server whose models are loaded onto that thread."""
    config = ServeConfig(
        models=(), memory_bytes=1 << 20, host_memory_bytes=0, threads=1, cache_dir=Path(), frozen_after_s=frozen_after_s
    )  # fmt: skip
    made = ServerNode(config)
    made._device, made._loaded = thread, True
    return made


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tiny_model(tmp_path))
    yield made
    made.thread.post(Stop())
    made.thread.join(30)
    assert not made.thread.alive


def test_requests_run_to_their_end(node: Node) -> None:
    node.thread.post(Submit("m", request("a", [5, 6, 7], 5), 0.0))
    node.thread.post(Submit("m", request("b", [5, 6], 3, n=2), 0.0))
    assert set(node.ends(3)) == {("a", 0), ("b", 0), ("b", 1)}


@pytest.mark.parametrize("place", ["forward", "draw", "stage", "plan", "commit", "add", "cancel"])
def test_a_fault_anywhere_ends_the_instance_and_its_requests(
    node: Node, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = node.local.runner if place in ("forward", "draw", "stage") else node.local.batcher

    def fail(*arguments: object) -> None:
        raise Bug("injected")

    node.thread.post(Submit("m", request("a", [5] * 20, 200), 0.0))
    while not node.reports.get(timeout=30).emits:
        pass
    monkeypatch.setattr(owner, place, fail)
    node.thread.post(Submit("m", request("b", [5] * 20, 200, n=3), 0.0))
    node.thread.post(Cancel("m", "nobody"))
    assert set(node.ends(4).values()) == {FinishReason.ERROR}
    node.thread.post(Submit("m", request("late", [5], 2), 0.0))
    assert node.ends(1) == {("late", 0): FinishReason.ERROR}
    assert node.thread.alive
    assert node.kv_pages() == 0
    assert node.released == ["m"]


def test_books_that_do_not_add_up_end_the_instance_when_idle(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise Bug("injected")

    monkeypatch.setattr(node.local.xtensor.pool, "check", fail)
    node.thread.post(Submit("m", request("a", [5, 6], 2), 0.0))
    assert node.ends(1) == {("a", 0): FinishReason.LENGTH}
    while not node.reports.get(timeout=30).failed:
        pass
    assert node.thread.alive


def test_end_all_ends_everything_once_and_frees_its_pages(node: Node) -> None:
    node.thread.post(Submit("m", request("a", [5] * 20, 200, n=2), 0.0))
    node.thread.post(EndAll())
    ended = node.ends(2)
    assert set(ended) == {("a", 0), ("a", 1)}
    assert node.kv_pages() == 0


def test_a_blocked_step_is_seen_from_outside_and_waiting_for_work_is_not(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.monotonic() + 1000.0
    node.thread.post(Submit("m", request("a", [5, 6], 2), 0.0))
    assert node.ends(1)
    while node.thread.stalled_s(later):  # it goes to sleep
        time.sleep(0.001)
    forward, entered, go_on = node.local.runner.forward, threading.Event(), threading.Event()

    def blocked(arrays: Any) -> Any:
        entered.set()
        go_on.wait(30)
        return forward(arrays)

    monkeypatch.setattr(node.local.runner, "forward", blocked)
    before = time.monotonic()
    node.thread.post(Submit("m", request("b", [5, 6], 2), 0.0))
    assert entered.wait(30)
    stuck = time.monotonic()
    # Counted from when the work came, not from the end of the work before it.
    assert 900.0 < later - stuck <= node.thread.stalled_s(later) <= later - before
    for frozen_after_s, ready in ((0.0, False), (1000.0, True)):
        shown = served_by(node.thread, frozen_after_s).ready()
        assert (shown is None) is ready
        assert ready or (shown is not None and "--frozen-after 0" in shown)
    go_on.set()
    assert node.ends(1) == {("b", 0): FinishReason.LENGTH}
    while node.thread.stalled_s(later):
        time.sleep(0.001)
