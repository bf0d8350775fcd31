"""Moves of weights: every byte once, at the pace that holds now, and no further than they may."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import open_table

from janus_server.kv.move import PIECE_BYTES, Pace, Stopped, move
from janus_server.resident import Deadlines

MB = 1 << 20


def cut(array: np.ndarray, places: list[int]) -> list[np.ndarray]:
    edges = [0, *sorted(place % (len(array) + 1) for place in places), len(array)]
    return [array[low:high] for low, high in itertools.pairwise(edges)]


@given(st.integers(0, 5000), st.lists(st.integers(0, 5000)), st.lists(st.integers(0, 5000)), st.booleans())
def test_a_move_copies_every_byte_however_both_sides_are_cut(
    size: int, first: list[int], second: list[int], paced: bool
) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros(size, np.uint8)
    told: list[int] = []
    pace = Pace(told.append, lambda: True, lambda: 1e12 if paced else None)
    move(cut(target, first), cut(source, second), pace)
    assert (target == source).all()
    assert told == sorted(told) and (told[-1:] or [0]) == [size]


def test_the_pace_changes_from_one_piece_to_the_next() -> None:
    """Small pieces while there is a limit, whole ones at once when it goes, small ones again when it comes back."""
    told: list[int] = []
    serving = iter([1e9, 1e9, 1e9, 1e9, *[None] * 4, *[1e9] * 10_000])
    source = np.ones(5 * PIECE_BYTES, np.uint8)
    move([np.zeros_like(source)], [source], Pace(told.append, lambda: True, lambda: next(serving)))
    sizes = np.diff([0, *told])
    full = np.flatnonzero(sizes == PIECE_BYTES)
    assert len(full) >= 2 and full[0] > 0 and (np.diff(full) == 1).all()
    assert set(sizes[: full[0]].tolist()) == {2_000_000}
    assert max(sizes[full[-1] + 1 :]) == 2_000_000


def test_a_stopped_move_writes_no_more() -> None:
    source, target = np.ones(3 * PIECE_BYTES, np.uint8), np.zeros(3 * PIECE_BYTES, np.uint8)
    told: list[int] = []
    with pytest.raises(Stopped):
        move([target], [source], Pace(told.append, lambda: len(told) < 2))
    assert int(target.sum()) == 2 * PIECE_BYTES


@pytest.mark.parametrize("table", ["cpu", "torch_ref"])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 4095, 4 * 4096 + 63, 4 * 4096 + 64, MB + 17, 3 * MB])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 5), (63, 64), (17, 4001)])
def test_copied_bytes_are_equal_and_nothing_beside_them_changes(
    table: str, size: int, offsets: tuple[int, int]
) -> None:
    kernels = open_table(table, 1)
    to, at = offsets
    source = np.random.default_rng(size + to).integers(0, 256, size + at + 64, dtype=np.uint8)
    source.flags.writeable = False  # a peer's pages are
    around = np.full(size + to + 200, 0xA5, np.uint8)
    kernels.copy_bytes(around[to : to + size], source[at : at + size])
    assert (around[to : to + size] == source[at : at + size]).all()
    assert (around[:to] == 0xA5).all() and (around[to + size :] == 0xA5).all()


def test_a_deadline_leaves_the_slowest_that_is_fine_twice_its_time() -> None:
    deadlines = Deadlines(floor_s=30, factor=2, slowest_bytes_per_s=50e6)
    assert deadlines.limit_s(1_000_000_000, None) == 70
    assert deadlines.limit_s(1_000_000_000, 512 << 20) == 70
    assert deadlines.limit_s(1_000_000_000, 10e6) == 230


@pytest.mark.parametrize("threads", [2, 3])
def test_several_threads_share_the_pieces(threads: int) -> None:
    rng = np.random.default_rng(threads)
    source = rng.integers(0, 256, 40 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    told: list[int] = []
    names: set[str] = set()

    def copy(to: np.ndarray, part: np.ndarray) -> None:
        names.add(threading.current_thread().name)
        time.sleep(0.01)
        np.copyto(to, part)

    move([target], [source[: 7 << 20], source[7 << 20 :]], Pace(told.append, lambda: True), copy, threads)
    assert np.array_equal(target, source)
    assert told == sorted(told) and told[-1] == len(source)
    assert len(names) == threads


def test_helpers_stop_with_the_move_and_leave_when_it_is_paced() -> None:
    source = np.ones(80 << 20, np.uint8)
    target = np.zeros_like(source)
    done: list[int] = []
    with pytest.raises(Stopped):
        move([target], [source], Pace(done.append, lambda: len(done) < 3), np.copyto, 2)
    names: list[str] = []

    def copy(to: np.ndarray, part: np.ndarray) -> None:
        names.append(threading.current_thread().name)
        np.copyto(to, part)

    done.clear()
    pace = Pace(done.append, lambda: True, lambda: None if len(done) < 3 else 4e9)
    move([target], [source], pace, copy, 2)
    assert done[-1] == len(source)
    assert set(names[6:]) == {threading.current_thread().name}
