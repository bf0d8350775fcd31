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
from janus_server.kv.blocks import KvPages
from janus_server.kv.prefix import PrefixCache
from janus_server.node import Node as ServerNode
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.scarcity import Scarcity
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
    made._device = thread
    made._intake.opened()
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


def neighbour(node: Node, model: str) -> Engine:
    """Another model on the same pool."""
    kv = KvPages(node.local.xtensor.pool, model, node.local.kv.page_tokens)
    limits = BatcherLimits(context_tokens=64, capacity_pages=8)
    return Engine(model, Batcher(kv, PrefixCache(kv, b"n"), node.local.scarcity, limits), node.local.runner)


def test_the_pools_books_are_checked_once_a_rest_and_are_no_models_fault(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checks: list[int] = []

    def fail() -> None:
        checks.append(len(node.thread._engines))
        raise Bug("injected")

    other = neighbour(node, "n")
    node.thread.ask(lambda: node.thread.attach(other)).result(30)
    while not node.thread._resting:
        time.sleep(0.001)
    monkeypatch.setattr(node.local.xtensor.pool, "check", fail)
    node.thread.post(Submit("m", request("a", [5, 6], 2), 0.0))
    assert node.ends(1) == {("a", 0): FinishReason.LENGTH}
    failed: list[str] = []
    while len(failed) < 2:
        report = node.reports.get(timeout=30)
        failed += [report.model] if report.failed else []
    assert sorted(failed) == ["m", "n"] and checks == [2]
    assert [r.getMessage() for r in caplog.records if "pool's books" in r.getMessage()]
    assert node.thread.alive


def test_a_model_whose_requests_are_stuck_ends_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    other = neighbour(node, "n")
    node.thread.ask(lambda: node.thread.attach(other)).result(30)
    monkeypatch.setattr(other.batcher, "plan", lambda now: None)
    node.thread.post(Submit("n", request("a", [5, 6], 2), 0.0))
    assert node.ends(1) == {("a", 0): FinishReason.ERROR}
    node.thread.post(Submit("m", request("b", [5, 6], 2), 0.0))
    assert node.ends(1) == {("b", 0): FinishReason.LENGTH}
    assert node.released == ["n"]


def test_many_cancels_at_once_are_one_report_that_comes_before_the_thread_sleeps(node: Node) -> None:
    go_on = threading.Event()
    node.thread.ask(lambda: go_on.wait(30))
    for i in range(20):
        node.thread.post(Submit("m", request(f"r{i}", [5, 6], 2), 0.0))
    for i in range(20):
        node.thread.post(Cancel("m", f"r{i}"))
    go_on.set()
    while node.thread.stalled_s(time.monotonic() + 1000.0):
        time.sleep(0.001)
    told = []
    while not node.reports.empty():
        told.append(node.reports.get())
    stats = [report.stats for report in told if report.model == "m"]
    assert len(stats) == 1 and stats[0] is not None and (stats[0].running, stats[0].waiting) == (0, 0)


def test_a_model_that_was_just_torn_down_is_not_there_to_detach(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(now: float) -> None:
        raise Bug("injected")

    monkeypatch.setattr(node.local.batcher, "plan", fail)
    node.thread.post(Submit("m", request("a", [5, 6], 2), 0.0))
    assert node.ends(1) == {("a", 0): FinishReason.ERROR}
    assert node.thread.ask(lambda: node.thread.detach("m")).result(30) is False


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


def test_prefixes_that_nobody_uses_go_back_while_the_thread_rests(node: Node) -> None:
    """Whole pages, and the loop is told."""
    local = node.local
    local.reset(prefix_caching=True)
    local.scarcity = Scarcity(local.xtensor.pool, idle_s=0.2)
    local.batcher._scarcity = local.batcher._placer._scarcity = local.scarcity
    thread = DeviceThread(local.xtensor.pool, local.scarcity, node.reports.put, lambda page: None, lambda model: None)
    thread.ask(lambda: thread.attach(Engine("m", local.batcher, local.runner)))
    thread.start()
    size = local.kv.page_tokens
    thread.post(Submit("m", request("a", [5] * (2 * size + 1), 2), 0.0))
    assert node.ends(1)
    assert len(thread.ask(lambda: tuple(local.prefix._nodes)).result(30)) == 2
    while local.kv.owner in (report := node.reports.get(timeout=30)).pages:
        assert report.emits == []
    assert report.free_pages == local.xtensor.pool.n_pages - local.memory.n_pages
    thread.post(Stop())
    thread.join(30)
