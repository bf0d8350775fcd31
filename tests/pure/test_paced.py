"""A paced node's steps and copies take what the simulator's physics say, on a clock that only passes when told to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator.physics import Speed
from bench.simulator.records import ModelSpec
from janus_server.errors import BadConfig
from janus_server.kv.move import Stopped
from janus_server.kv.pages import PagePool
from janus_server.orders import KnownModel
from janus_server.paced import HIDDEN_S, Clock, Imagined, PacedMover, Pacing, Steps, work_of
from janus_server.resident import Laps
from janus_server.sched.roofline import DEVICES, physics_of, step
from janus_server.sched.shapes import ModelShape
from janus_server.sched.source import Link
from janus_server.types import Batch, Chunk

SHAPE = ModelShape(name="m", parameters=13e9, layers=40, hidden=5120, kv_bytes=819200.0, pair_flops=819200.0)
PACING = Pacing(device=DEVICES[3], models={"m": SHAPE}, pool_pages=20, host_bytes=10**11)


class Fake:
    """Time that passes when somebody sleeps, or when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.slept.append(seconds)
        self.now_s += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, self.sleep)


@given(st.lists(st.tuples(st.floats(0.0, HIDDEN_S * 0.99), st.floats(0.0, 0.01), st.floats(0.011, 0.2)), min_size=1))
def test_steps_in_a_row_take_exactly_what_they_should(parts: list[tuple[float, float, float]]) -> None:
    """Whatever the host does between two, and however long the real model takes, as long as both fit."""
    fake = Fake()
    steps = Steps(fake.clock)
    start_s = None
    for between_s, real_s, takes_s in parts:
        begun_s = steps.begin()
        start_s = begun_s if start_s is None else start_s
        fake.now_s += min(real_s, takes_s * 0.2)
        steps.end(begun_s, takes_s)
        fake.now_s += between_s if takes_s > 0.05 else 0.0
    assert start_s is not None
    assert steps.late == 0
    passed_s = fake.now_s - start_s - (parts[-1][0] if parts[-1][2] > 0.05 else 0.0)
    assert passed_s == pytest.approx(sum(takes_s for _, _, takes_s in parts))
    assert steps.model_s == pytest.approx(sum(takes_s for _, _, takes_s in parts))


def test_a_step_after_a_rest_begins_when_it_is_staged_and_one_that_is_late_is_counted() -> None:
    fake = Fake()
    steps = Steps(fake.clock)
    begun_s = steps.begin()
    fake.now_s += 0.03
    steps.end(begun_s, 0.02)
    assert fake.slept == []
    assert (steps.steps, steps.late) == (1, 1)
    assert steps.late_s == pytest.approx(0.01)
    fake.now_s += 5.0
    assert steps.begin() == fake.now_s


chunks = st.builds(lambda start, n: Chunk(1, start, (1,) * n, ()), st.integers(0, 900), st.integers(1, 300))


@given(st.lists(chunks, min_size=1, max_size=8))
def test_a_batch_takes_what_the_simulators_devices_take(parts: list[Chunk]) -> None:
    batch = Batch(1, tuple(parts))
    tokens = sum(len(one.tokens) for one in parts)
    pairs = sum(one.start + i + 1 for one in parts for i in range(len(one.tokens)))
    read = sum(one.start + len(one.tokens) for one in parts)
    work = work_of(batch)
    assert (work.tokens, work.pairs, work.kv_tokens) == (tokens, pairs, read)
    spec = ModelSpec(known=KnownModel(model="m", weight_pages=1, host_bytes=1, longest_pages=1), shape=SHAPE)
    mine = float(step(physics_of(SHAPE, PACING.device, 1), work).seconds)
    assert mine == pytest.approx(Speed(spec, PACING.device).seconds(tokens, pairs, read))


def resident() -> Any:
    return SimpleNamespace(name="m", laps=Laps(), stop=False)


def mover(fake: Fake) -> PacedMover:
    imagined = Imagined(PACING, fake.clock)
    return cast(PacedMover, imagined.mover(None, None, None, None, None))


def test_a_copy_takes_as_long_as_the_imagined_weights_over_the_link() -> None:
    fake = Fake()

    def work() -> None:
        fake.now_s += 0.2

    mover(fake)._take(resident(), Link(0.283, 65e9), work)
    assert fake.now_s - 100.0 == pytest.approx(0.283 + 26e9 / 65e9)
    assert max(fake.slept) < 0.1  # it looks whether it is still wanted


def test_two_copies_over_one_link_of_a_node_share_it_and_over_two_they_do_not() -> None:
    fake = Fake()
    paced = mover(fake)
    disk, host = Link(0.5, 3e9), Link(0.283, 59e9)
    with paced._imagined.lanes.on(disk):
        paced._take(resident(), disk, lambda: None)
    assert fake.now_s - 100.0 == pytest.approx(0.5 + 2 * 26 / 3)
    before_s = fake.now_s
    with paced._imagined.lanes.on(disk):
        paced._take(resident(), host, lambda: None)
    assert fake.now_s - before_s == pytest.approx(0.283 + 26 / 59)


def test_a_copy_that_is_not_wanted_any_more_ends_within_a_piece() -> None:
    fake, one = Fake(), resident()

    def sleep(seconds: float) -> None:
        fake.sleep(seconds)
        one.stop = fake.now_s > 100.5

    imagined = Imagined(PACING, Clock(lambda: fake.now_s, sleep))
    with pytest.raises(Stopped):
        cast(PacedMover, imagined.mover(None, None, None, None, None))._take(one, Link(0.5, 3e9), lambda: None)
    assert fake.now_s < 100.6


def test_the_leader_is_told_of_the_imagined_device() -> None:
    known = KnownModel(model="m", weight_pages=7, host_bytes=1, longest_pages=3, load_s=0.001, wake_s=0.001)
    (told,) = Imagined(PACING).known([known])
    assert told.host_bytes == 26_000_000_000
    assert told.load_s == pytest.approx(0.5 + 26 / 3)
    assert told.wake_s == pytest.approx(0.283 + 26 / 59)
    assert (told.weight_pages, told.longest_pages) == (7, 3)


def test_pages_that_the_device_has_not_are_held_back_for_good() -> None:
    pool = PagePool(50)
    imagined = Imagined(PACING)
    imagined.hold_back(pool)
    assert pool.free_pages == 20
    pool.check()
    with pytest.raises(BadConfig, match="raise --memory"):
        imagined.hold_back(PagePool(19))


def test_a_file_that_says_nothing_of_a_model_or_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pacing.json"
    file.write_bytes(msgspec.json.encode(PACING))
    assert Imagined.of_file(file, ["m"]).pacing == PACING
    with pytest.raises(BadConfig, match="what other stands for"):
        Imagined.of_file(file, ["m", "other"])
    for text in ("", "{}", '{"device": 3}', "[" * 100_000):
        file.write_text(text)
        with pytest.raises(BadConfig, match="paced"):
            Imagined.of_file(file, ["m"])
