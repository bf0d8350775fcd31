"""What a node measures of its models, period by period: traffic, promises kept, use of the device, calibration."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.applications import Application
from janus_server.calibrate import PROMPT_STEPS, STEPS, Calibration
from janus_server.executor import StepReport, StepTime
from janus_server.orders import Lost, Observed, Order, Stage, Verb
from janus_server.sched import oracle_records
from janus_server.sched.oracle_records import Observation
from janus_server.sched.roofline import Work, physics_of, step
from janus_server.sched.shapes import DeviceShape, ModelShape
from janus_server.telemetry import Measured, Pool, Telemetry, strictest
from janus_server.types import BatcherStats, Owner, PageKind, Promise, Request

# 100 MB of weights that take 10 ms to read; a prompt's token takes 0.5 ms, a drawn one beside the first 1 ms.
SHAPE = ModelShape(name="m", parameters=1e8, layers=4, hidden=512, kv_bytes=4096.0, pair_flops=8192.0,
                   parameter_bytes=1.0)  # fmt: skip
MEASURED = Measured(SHAPE, oracle_records.Promise(1.0, 0.1), 0.95, 16)
POOL = Pool(1000, 1 << 20)
# 8 rows of 100 + 50 tokens fill 10 pages each; the prefix cache holds more.
WEIGHT_PAGES, KV_PAGES = 96, 500


class Fed:
    """A telemetry whose clock and reports are made here."""

    def __init__(self) -> None:
        self.telemetry = Telemetry(30.0)
        self.telemetry.measure({"m": MEASURED}, POOL)
        self.sampled = 0
        self.now = self.telemetry._since_s

    def requests(self, count: int, tokens: int = 100, output: int = 50, on_time: bool | None = True) -> None:
        for i in range(count):
            request = Request(id=f"r{i}", model="m", prompt=(1,) * tokens, max_tokens=output)
            self.telemetry.arrived(request)
            self.telemetry.ended(request, output, on_time)

    def step(self, rows: int, prompt: int, took_s: float | None = None) -> None:
        self.sampled += rows
        took_s = 0.009 + 0.001 * rows + 0.0005 * prompt if took_s is None else took_s
        pages = {Owner("m", PageKind.WEIGHTS): WEIGHT_PAGES, Owner("m", PageKind.KV): KV_PAGES}
        stats = BatcherStats(rows, 0, 0, 0, 0, 0, self.sampled)
        self.telemetry.step(StepReport("m", [], pages, 0, stats, StepTime(rows + prompt, 0.0, 0.0, took_s, took_s)))

    def steps(self, count: int = 60) -> None:
        for i in range(count):
            self.step(1 + i % 8, 64 if i % 5 == 0 else 0)

    def take(self, *active: str, after_s: float = 30.0) -> Observed | None:
        self.now += after_s
        return self.telemetry.take(self.now, active)

    def seen(self) -> Observation:
        found = self.take("m")
        assert found is not None
        return found.models["m"]


def calibrated() -> Fed:
    fed = Fed()
    fed.requests(1)
    fed.steps()
    found = fed.take("m")
    assert found is not None and list(found.subjects) == ["m"]
    return fed


@given(lengths=st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 2000), st.sampled_from([None, True, False])),
                        min_size=1, max_size=40), period_s=st.floats(1.0, 100.0))  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_features_are_those_of_the_requests(lengths: list[tuple[int, int, bool | None]], period_s: float) -> None:
    fed = Fed()
    for tokens, output, on_time in lengths:
        fed.requests(1, tokens, output, on_time)
    found = fed.take("m", after_s=period_s)
    assert found is not None
    seen, count = found.models["m"], len(lengths)
    mean = sum(tokens for tokens, _, _ in lengths) / count
    assert seen.features.request_rate == pytest.approx(count / period_s)
    assert seen.features.input_mean == pytest.approx(mean)
    assert seen.features.input_variance == pytest.approx(
        sum((tokens - mean) ** 2 for tokens, _, _ in lengths) / count, rel=1e-6, abs=1e-3
    )
    assert seen.features.output_mean == pytest.approx(sum(output for _, output, _ in lengths) / count)
    assert seen.features.token_rate == pytest.approx(sum(tokens + output for tokens, output, _ in lengths) / period_s)
    judged = [on_time for _, _, on_time in lengths if on_time is not None]
    assert (seen.requests, seen.on_time) == (len(judged), sum(judged))


def test_a_quiet_period_is_not_told_and_the_next_one_starts_anew() -> None:
    fed = Fed()
    assert fed.take("m") is None
    fed.requests(6)
    assert fed.seen().requests == 6
    assert fed.take("m") is None
    fed.requests(3)
    seen = fed.seen()
    assert (seen.requests, seen.features.request_rate) == (3, pytest.approx(0.1))


def test_what_ends_after_its_period_counts_with_the_next_that_has_traffic() -> None:
    fed = Fed()
    fed.requests(2)
    fed.seen()
    request = Request(id="late", model="m", prompt=(1,), max_tokens=9)
    fed.telemetry.ended(request, 9, False)
    assert fed.take("m") is None
    fed.requests(1)
    seen = fed.seen()
    assert (seen.requests, seen.on_time) == (2, 1)


def test_long_answers_keep_the_lengths_that_were_seen_last() -> None:
    fed = Fed()
    request = Request(id="r", model="m", prompt=(1,) * 10, max_tokens=9)
    fed.telemetry.arrived(request)
    assert fed.seen().replicas == 0  # nothing is known of its answers
    fed.requests(1, output=40)
    assert fed.seen().replicas == 1
    fed.telemetry.arrived(request)
    seen = fed.seen()
    assert (seen.replicas, seen.features.output_mean) == (1, 40.0)


def test_a_period_in_which_the_model_was_moved_counts_no_replica() -> None:
    fed = Fed()
    fed.requests(1)
    assert fed.seen().replicas == 1
    fed.telemetry.see(Order(1, 1, "n0", "m", Verb.SLEEP, ""))
    fed.requests(1)
    found = fed.take()  # asleep
    assert found is not None and found.models["m"].replicas == 0
    fed.requests(1)
    assert fed.seen().replicas == 0  # it woke in this one
    fed.requests(1)
    assert fed.seen().replicas == 1
    fed.telemetry.see(Order(1, 2, "n0", "m", Verb.EVICT, ""))  # of its host copy
    fed.requests(1)
    assert fed.seen().replicas == 1
    fed.telemetry.see(Lost("n0", "m", Stage.COLD, False))
    fed.requests(1)
    assert fed.seen().replicas == 0


def test_it_is_calibrated_once_enough_steps_ran_and_told_once() -> None:
    fed = Fed()
    fed.requests(1)
    for _ in range(STEPS - 1):
        fed.step(1, 64)
    found = fed.take("m")
    assert found is not None and not found.subjects and found.models["m"].hbm is None
    fed.step(1, 64)
    found = fed.take("m")
    assert found is not None and list(found.subjects) == ["m"]
    fed.steps()
    assert fed.take("m") is None


def test_a_model_without_a_promise_is_counted_and_not_measured() -> None:
    telemetry = Telemetry(30.0)
    telemetry.arrived(Request(id="r", model="m", prompt=(1,), max_tokens=1))
    telemetry.ended(Request(id="r", model="m", prompt=(1,), max_tokens=1), 1, None)
    found = telemetry.take(telemetry._since_s + 30.0, ["m"])
    assert found is not None and found.models["m"].requests == 0 and found.models["m"].compute is None
    assert telemetry.target("m") is None and telemetry.busy_share("gone") is None


def test_the_device_is_as_fast_as_its_steps_say() -> None:
    calibration = Calibration(SHAPE)
    for i in range(STEPS):
        rows, prompt = 1 + i % 8, 64 if i % 5 == 0 else 0
        calibration.step(rows, prompt, 0.009 + 0.001 * rows + 0.0005 * prompt)
    device = calibration.device(1e9)
    assert device is not None
    physics = physics_of(SHAPE, device, 1)
    assert float(step(physics, Work(1, 0, 0)).seconds) == pytest.approx(0.010, rel=0.1)
    assert float(step(physics, Work(64, 0, 0)).seconds) == pytest.approx(0.041, rel=0.1)
    assert float(step(physics, Work(256, 0, 0)).seconds) == pytest.approx(0.137, rel=0.25)


def test_of_a_device_that_overlaps_reading_and_arithmetic_the_truth_is_found() -> None:
    """What a prompt adds to a step is less than what it takes alone: a part of it is hidden behind reading."""
    true = DeviceShape(name="d", flops=1e12, memory_bytes=1e9, bandwidth_bytes_s=5e9, link_bytes_s=1e9, step_s=1e-3)
    known = physics_of(SHAPE, true, 1)
    calibration = Calibration(SHAPE)
    for i in range(STEPS):
        rows, prompt = 1 + i % 8, 300 if i % 5 == 0 else 0
        calibration.step(rows, prompt, float(step(known, Work(rows + prompt, 0, 0)).seconds))
    device = calibration.device(1e9)
    assert device is not None
    physics = physics_of(SHAPE, device, 1)
    for tokens in (1, 200, 300, 500):
        there = float(step(known, Work(tokens, 0, 0)).seconds)
        assert float(step(physics, Work(tokens, 0, 0)).seconds) == pytest.approx(there, rel=0.15)


def test_steps_without_prompts_do_not_calibrate() -> None:
    calibration = Calibration(SHAPE)
    for i in range(200):
        calibration.step(1 + i % 8, 0, 0.01)
    assert calibration.device(1e9) is None
    for _ in range(PROMPT_STEPS):
        calibration.step(1, 64, 0.04)
    assert calibration.device(1e9) is not None


def test_shares_of_the_device_are_its_work_over_what_it_reaches() -> None:
    """1000 steps that read 100 MB at 10 GB/s are 10 s; 4500 drawn and 12 800 prompt tokens of 0.2 GFLOPs at 0.31
    TFLOP/s are 11.1 s. They took 19.9 s of 30, all of them short of arithmetic."""
    fed = calibrated()
    fed.requests(20)
    for i in range(1000):
        fed.step(1 + i % 8, 64 if i % 5 == 0 else 0)
    seen = fed.seen()
    assert seen.bandwidth is not None and seen.compute is not None
    assert seen.compute == pytest.approx(19.9 / 30.0, rel=0.01)
    assert seen.bandwidth / seen.compute == pytest.approx(0.9, rel=0.15)
    # 8 rows at most of 150 tokens, ten pages each: not the 500 that the prefix cache has.
    assert seen.hbm == pytest.approx((WEIGHT_PAGES + 80) / 1000)
    busy = fed.telemetry.busy_share("m")
    assert busy is not None and busy == pytest.approx((1000 * 0.009 + 4.5 + 200 * 0.032) / 30.0, rel=1e-6)


def test_a_batcher_that_was_made_anew_counts_from_nothing() -> None:
    fed = calibrated()
    fed.sampled = 0
    fed.requests(1)
    fed.step(2, 0)
    assert fed.seen().bandwidth is not None


def test_the_strictest_promise_counts() -> None:
    listed = [
        Application("a", "m", Promise(ttft_s=2.0, attain=0.9)),
        Application("b", "m", Promise(ttft_s=5.0, tpot_s=0.1)),
        Application("c", "m"),
    ]
    assert strictest(listed) == oracle_records.Promise(2.0, 0.1)
    assert strictest(listed[:1]) == oracle_records.Promise(2.0, 3600.0)
    assert strictest(listed[2:]) is None


async def test_it_tells_period_after_period_until_closed() -> None:
    telemetry = Telemetry(0.01)
    told: list[Observed] = []
    telemetry.start(lambda: ["m"], told.append)
    while len(told) < 3:
        telemetry.arrived(Request(id="r", model="m", prompt=(1,), max_tokens=1))
        await asyncio.sleep(0.002)
    await telemetry.close()
    count = len(told)
    telemetry.arrived(Request(id="r", model="m", prompt=(1,), max_tokens=1))
    await asyncio.sleep(0.03)
    assert len(told) == count
