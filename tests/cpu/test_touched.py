"""Memory is provided before it is needed: once a page, ahead while the node rests, at once where nobody was in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from janus_server.kv.host import CHUNK_BYTES, HostCopies
from janus_server.kv.move import Pace, Stopped
from janus_server.kv.touch import Ahead, TouchAhead
from janus_server.kv.touched import Touched
from janus_server.kv.vmm_cpu import CpuMemory
from janus_server.kv.xtensor import XTensor

FREE = Pace(lambda done: None, lambda: True)


class Provided:
    """What was asked of the system."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []

    def __call__(self, first: int, count: int) -> None:
        self.runs.append((first, count))


def until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.005)


def test_each_unit_is_provided_once_and_in_runs() -> None:
    provided = Provided()
    touched = Touched(40, provided)
    touched.touch(3)
    touched.touch(3)
    assert provided.runs == [(3, 1)]
    assert touched.prepare([(0, 6), (30, 4)], FREE) == 9
    assert provided.runs == [(3, 1), (0, 3), (4, 2), (30, 4)]
    assert touched.prepare([(0, 6), (30, 4)], FREE) == 0
    assert touched.missing(0, 40) == 30
    assert 5 in touched and 6 not in touched


def test_beside_streams_units_come_one_by_one_and_a_stop_is_heard_between_them() -> None:
    provided = Provided()
    touched = Touched(10, provided)
    with pytest.raises(Stopped):
        touched.prepare([(0, 10)], Pace(lambda done: None, lambda: len(provided.runs) < 3, lambda: 1e6))
    assert provided.runs == [(0, 1), (1, 1), (2, 1)]
    assert touched.missing(0, 10) == 7


def test_when_streams_end_the_rest_comes_at_once() -> None:
    provided = Provided()
    touched = Touched(10, provided)
    touched.prepare([(0, 10)], Pace(lambda done: None, lambda: True, lambda: 1e6 if len(provided.runs) < 2 else None))
    assert provided.runs == [(0, 1), (1, 1), (2, 8)]


def test_ahead_waits_until_the_node_rests_but_kv_pages_do_not() -> None:
    pages, chunks = Provided(), Provided()
    resting = threading.Event()
    ahead = TouchAhead(Touched(100, pages), Touched(8, chunks), resting.is_set)
    try:
        ahead.start(Ahead(5, 2))
        ahead.below(90)
        until(lambda: len(pages.runs) == 100 - (90 - 32))
        assert min(first for first, _ in pages.runs) == 58 and not chunks.runs and not ahead.finished
        resting.set()
        until(lambda: ahead.finished)
        assert pages.runs[-5:] == [(page, 1) for page in range(5)]
        assert chunks.runs == [(0, 1), (1, 1)]
    finally:
        ahead.close()


def test_a_toucher_that_never_started_can_be_closed() -> None:
    TouchAhead(Touched(4, Provided()), Touched(0, Provided()), lambda: True).close()


def test_weights_and_copies_lie_on_provided_memory_which_keeps_its_contents() -> None:
    memory = CpuMemory(8, 64 << 10)
    xtensor = XTensor(memory)
    weights = xtensor.weights("m", 3 * (64 << 10) - 7)
    assert weights.reserve()
    memory.slab[0] = 42
    assert weights.prepare(FREE) == 3
    weights.map()
    assert weights.array[0] == 42
    assert weights.prepare(FREE) == 0
    copies = HostCopies(3 * CHUNK_BYTES)
    copy = copies.take("m", CHUNK_BYTES + 1)
    assert copy is not None and copies.prepare(copy, FREE) == 2
    copies.drop("m")
    again = copies.take("m", CHUNK_BYTES + 1)
    assert again is not None and copies.prepare(again, FREE) == 0


def test_pages_whose_unmapping_failed_can_be_mapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CpuMemory(8, 64 << 10)
    weights = XTensor(memory).weights("m", 2 * (64 << 10))
    assert weights.reserve()
    weights.map()

    def refuse(*arguments: Any) -> None:
        raise OSError(12, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(weights._window, "unmap", refuse)
        with pytest.raises(OSError, match="injected"):
            weights.unmap()
    weights.release()
    assert weights.reserve()
    weights.map()
    weights.array[:] = 7
    assert int(memory.slab[: 2 * (64 << 10)].min()) == 7
