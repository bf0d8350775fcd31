"""The simulator's imaginary devices: their physics, that no call is lost, and that the two fidelities tell the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator import constants, physics
from bench.simulator.agreement import CASES, SHAPES, Case, calls, drive, run, world
from bench.simulator.batching import Rules
from bench.simulator.devices import FIDELITIES, make
from bench.simulator.rates import rates
from bench.simulator.records import AppSpec, Call, Device, ModelSpec, NodeSpec, Outcome
from bench.simulator.taped import Taped, outcomes, play
from janus_server.errors import BadConfig
from janus_server.orders import KnownModel
from janus_server.sched.oracle_records import Features
from janus_server.sched.roofline import ASCEND_910C, DEVICES, Work, physics_of, step
from janus_server.sched.shapes import ModelShape
from janus_server.sched.source import Origin


def spec_of(shape: ModelShape, shards: int = 1, **known: Any) -> ModelSpec:
    size = round(shape.weight_bytes / shards)
    asked = {"weight_pages": math.ceil(size / (2 << 20)), "host_bytes": size, "longest_pages": 0, **known}
    return ModelSpec(known=KnownModel(model=shape.name, shards=shards, **asked), shape=shape)


# Physics


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("device", DEVICES[:3], ids=lambda device: device.name)
@pytest.mark.parametrize("shards", [1, 4])
def test_a_step_takes_what_the_roofline_says(shape: ModelShape, device: Any, shards: int) -> None:
    speed, known = physics.Speed(spec_of(shape, shards), device), physics_of(shape, device, shards)
    for tokens, pairs, read in ((1, 100, 100), (64, 60_000, 60_000), (2048, 2e6, 4096), (3, 5.5, 7.25)):
        assert speed.seconds(tokens, pairs, read) == pytest.approx(
            float(step(known, Work(tokens, pairs, read)).seconds)
        )


def test_a_prompt_takes_its_steps() -> None:
    speed = physics.Speed(spec_of(SHAPES["8B"]), ASCEND_910C)
    whole = speed.seconds(2048, 2048 * 2049 / 2, 2048) + speed.seconds(52, 52 * (2048 + 26.5), 2100)
    assert speed.prefill_s(2100, 2048) == pytest.approx(whole)


def test_published_loads() -> None:
    """What the constants were fitted to, and what then follows."""
    small, large = (
        SHAPES["8B"],
        ModelShape(
            name="671B", parameters=671e9, layers=61, hidden=7168, kv_bytes=70_272, pair_flops=1.0, parameter_bytes=1.0
        ),
    )
    assert physics.load_s(spec_of(small, 2), Origin.NEAR) == pytest.approx(0.408, rel=0.01)
    assert physics.load_s(spec_of(large, 16), Origin.HOST, 16) == pytest.approx(2.71, rel=0.01)
    assert physics.load_s(spec_of(large, 16), Origin.HOST, 1) == pytest.approx(0.283 + 41.94 / 59, rel=0.01)
    assert physics.start_s(spec_of(small, 2)) > constants.PROCESS_START_S


def test_a_copy_slows_its_source_by_its_part_of_the_bandwidth() -> None:
    assert physics.slowdown(ASCEND_910C, 0.0) == 1.0
    assert physics.slowdown(ASCEND_910C, 0.25 * 0.8 * 1.49e12) == pytest.approx(4 / 3)
    assert physics.slowdown(ASCEND_910C, 1e15) == pytest.approx(1 / constants.LEAST_SPEED)


def test_pages_hold_the_tokens_of_a_shard() -> None:
    assert physics.page_tokens(spec_of(SHAPES["8B"]), 2 << 20) == 14
    assert physics.page_tokens(spec_of(SHAPES["8B"], 2), 2 << 20) == 28
    with pytest.raises(BadConfig, match="larger pages"):
        physics.page_tokens(spec_of(SHAPES["8B"]), 4096)


def test_shares_of_a_device_follow_its_traffic() -> None:
    predictor = physics.Predictor([spec_of(SHAPES["8B"])], ASCEND_910C)
    prompts = predictor.shares("Qwen3-8B", Features(4010.0, 2.0, 2000.0, 0.0, 5.0, 0.0), 0.4)
    answers = predictor.shares("Qwen3-8B", Features(620.0, 2.0, 10.0, 0.0, 300.0, 0.0), 0.4)
    assert prompts.compute == pytest.approx(0.4) and prompts.bandwidth < 0.2
    assert answers.bandwidth == pytest.approx(0.4) and answers.compute < 0.2
    assert answers.hbm > 16.4 / 64 / 0.9


# Turns as rates


@given(st.lists(st.tuples(st.floats(0.001, 0.05), st.floats(0.02, 0.2)), min_size=1, max_size=6))
def test_the_device_is_busy_and_never_more(steps: list[tuple[float, float]]) -> None:
    found = rates(steps)
    assert sum(rate * step_s for rate, (step_s, _) in zip(found, steps, strict=True)) == pytest.approx(1.0)
    assert min(found) > 0.0


def test_streams_take_turns_by_slack() -> None:
    """Of 10 ms each, promised at 30 and 60 ms: the first makes four steps between two of the other's."""
    found = rates([(0.01, 0.03), (0.01, 0.06)])
    assert found[0] == pytest.approx(80.0, rel=0.05) and found[1] == pytest.approx(20.0, rel=0.15)


def test_a_long_step_holds_up_short_ones() -> None:
    """A token is due every 30 ms, and a step of another takes 22: after each of those only one short one is needed."""
    found = rates([(0.004, 0.03), (0.022, 0.05)])
    assert found[0] == pytest.approx(found[1], rel=0.01)


def test_who_can_be_on_time_is_when_not_all_can() -> None:
    found = rates([(0.01, 0.2), (0.03, 0.03), (0.03, 0.03)])
    assert 1.0 / found[0] <= 0.2 * 1.001
    assert found[1] == pytest.approx(found[2]) and found[1] < 1.0 / 0.03


# Devices


class Bench:
    """A device, told of everything at the times that the world would."""

    def __init__(self, device: Device) -> None:
        self.device, self.now = device, 0.0
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}

    def until(self, now: float) -> None:
        while (due_s := self.device.next_s(self.now)) is not None and due_s <= now:
            assert due_s >= self.now - 1e-9
            self._advance(max(due_s, self.now))
        self._advance(now)

    def _advance(self, now: float) -> None:
        self.now = now
        for emit in self.device.advance(now):
            told = self.last if emit.ended else self.first
            assert emit.call not in told and emit.at_s <= now + 1e-9
            told[emit.call] = emit.at_s


def small(pages: int = 12_000, models: int = 2, **known: Any) -> tuple[NodeSpec, list[ModelSpec]]:
    node = NodeSpec(
        name="n", host="h", domain="d", shape=ASCEND_910C, pool_pages=pages, page_bytes=2 << 20, host_bytes=0
    )
    shapes = [ModelShape(name=f"m{i}", parameters=1.72e9, layers=28, hidden=2048, kv_bytes=114_688,
                         pair_flops=4.0 * 28 * 16 * 128) for i in range(models)]  # fmt: skip
    return node, [spec_of(shape, **known) for shape in shapes]


def emits_of(fidelity: str, coming: Sequence[Call], rules: Rules = Rules()) -> Bench:  # noqa: B008
    node, specs = small()
    bench = Bench(make(fidelity, node, specs, rules=rules))
    for spec in specs:
        bench.device.up(spec.known.model, 0.0)
    for call in coming:
        bench.until(call.at_s)
        bench.device.begin(call, f"m{call.app}", call.at_s)
    bench.until(1e6)
    return bench


moments = st.lists(
    st.tuples(st.floats(0, 2), st.integers(0, 1), st.integers(1, 6000), st.integers(1, 200)), min_size=1, max_size=25
)


@pytest.mark.parametrize("fidelity", FIDELITIES)
@given(rows=moments, one=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_call_begins_and_ends_once(fidelity: str, rows: list[tuple[float, int, int, int]], one: bool) -> None:
    coming = [Call(i, *row) for i, row in enumerate(sorted(rows))]
    bench = emits_of(fidelity, coming, Rules(one_prompt_at_a_time=one))
    assert bench.first.keys() == bench.last.keys() == {call.id for call in coming}
    for call in coming:
        assert call.at_s < bench.first[call.id] <= bench.last[call.id]
        assert (bench.first[call.id] == bench.last[call.id]) == (call.output_tokens == 1)
    assert bench.device.next_s(bench.now) is None
    assert all(busy.running == busy.waiting == 0 for busy in bench.device.busy(bench.now).values())
    bench.device.check()  # type: ignore[attr-defined]


@given(rows=moments)
@settings(max_examples=40, deadline=None)
def test_alone_both_take_the_same_steps(rows: list[tuple[float, int, int, int]]) -> None:
    """A model alone, nothing promised: the fluid counts the steps that the batcher makes, and reckons a stretch of them
    by the one in its middle."""
    coming = [Call(i, at_s, 0, size, out) for i, (at_s, _, size, out) in enumerate(sorted(rows))]
    step, fluid = (emits_of(fidelity, coming) for fidelity in FIDELITIES)
    end_s = max(step.last.values())
    for call in coming:
        assert fluid.first[call.id] == pytest.approx(step.first[call.id], rel=0.02, abs=0.02 * end_s)
        assert fluid.last[call.id] == pytest.approx(step.last[call.id], rel=0.02, abs=0.02 * end_s)
    used = [sum(bench.device.used().values()) for bench in (step, fluid)]
    assert used[1] == pytest.approx(used[0], rel=0.01)


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_one_call_takes_its_prompt_and_its_steps(fidelity: str) -> None:
    bench = emits_of(fidelity, [Call(3, 1.0, 0, 3000, 101)])
    speed = physics.Speed(small()[1][0], ASCEND_910C)
    assert bench.first[3] - 1.0 == pytest.approx(speed.prefill_s(3000), rel=1e-6)
    steps_s = sum(speed.decode_s(1, 3000 + i) for i in range(1, 101))
    assert bench.last[3] - bench.first[3] == pytest.approx(steps_s, rel=1e-6)


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_source_is_slower_while_it_is_read(fidelity: str) -> None:
    node, specs = small()
    bench = Bench(make(fidelity, node, specs))
    bench.device.up("m0", 0.0)
    bench.device.begin(Call(0, 0.0, 0, 100, 400), "m0", 0.0)
    bench.until(0.5)
    bench.device.slow(2.0, 0.5)
    bench.until(0.9)
    bench.device.slow(1.0, 0.9)
    bench.until(1e3)
    plain = emits_of(fidelity, [Call(0, 0.0, 0, 100, 400)])
    assert bench.last[0] - plain.last[0] == pytest.approx(0.2, abs=5e-3)


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_what_had_begun_is_lost_with_its_model(fidelity: str) -> None:
    node, specs = small()
    bench = Bench(make(fidelity, node, specs))
    for name in ("m0", "m1"):
        bench.device.up(name, 0.0)
    for i in range(6):
        bench.device.begin(Call(i, 0.0, i % 2, 500, 50 * (i + 1)), f"m{i % 2}", 0.0)
    bench.until(0.3)
    assert sorted(bench.device.down("m0", 0.3)) == [i for i in (0, 2, 4) if i not in bench.last]
    bench.until(1e3)
    assert {1, 3, 5} <= bench.last.keys() and set(bench.device.busy(1e3)) == {"m1"}
    bench.device.up("m0", 1e3)
    bench.device.begin(Call(9, 1e3, 0, 10, 2), "m0", 1e3)
    bench.until(2e3)
    assert 9 in bench.last


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_what_does_not_fit_waits_and_nothing_waits_for_ever(fidelity: str) -> None:
    """Twelve sequences of 3,000 tokens where five fit; two models share what there is."""
    node, specs = small(pages=2 * 1641 + 900, longest_pages=400)
    bench = Bench(make(fidelity, node, specs))
    for name in ("m0", "m1"):
        bench.device.up(name, 0.0)
    for i in range(12):
        bench.device.begin(Call(i, 0.0, i % 2, 2000, 1000), f"m{i % 2}", 0.0)
    bench.until(0.5)
    waiting = sum(busy.waiting for busy in bench.device.busy(0.5).values())
    assert waiting >= 4
    bench.until(1e4)
    assert len(bench.last) == 12


def test_memory_that_is_cut_into_parts_holds_fewer() -> None:
    """One model of four uses a device: with a quarter of it as its own, it queues where the whole would do."""
    node, specs = small(pages=4 * 3000, models=4)
    ends = {}
    for fidelity in FIDELITIES:
        for parts in (0, 4):
            bench = Bench(make(fidelity, node, specs, rules=Rules(parts=parts)))
            for spec in specs:
                bench.device.up(spec.known.model, 0.0)
            for i in range(40):
                bench.device.begin(Call(i, 0.0, 0, 1500, 100), "m0", 0.0)
            bench.until(1e4)
            ends[fidelity, parts] = sum(bench.first.values()) / 40
    for fidelity in FIDELITIES:
        assert ends[fidelity, 4] > 1.2 * ends[fidelity, 0]
    assert ends["fluid", 4] == pytest.approx(ends["step", 4], rel=0.1)


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_what_can_never_fit_is_said(fidelity: str) -> None:
    node, specs = small(longest_pages=100)
    device = make(fidelity, node, specs)
    device.up("m0", 0.0)
    with pytest.raises(BadConfig, match=r"call 5 is of 1700 \+ 200 tokens; m0 holds 1800 at most on n"):
        device.begin(Call(5, 0.0, 0, 1700, 200), "m0", 0.0)
    with pytest.raises(BadConfig, match="no fidelity 'steps'"):
        make("steps", node, specs)


# Agreement


def mean_of(case: Case, fidelity: str, seeds: Sequence[int] = (7,)) -> tuple[float, float, float]:
    runs = [run(case, fidelity, seed, 40.0) for seed in seeds]
    return tuple(
        sum(column) / len(runs) for column in zip(*((r.ttft_s, r.tpot_s, r.on_time) for r in runs), strict=True)
    )  # type: ignore[return-value]


CLOSE = {"alone, prompts", "alone, decode", "alone, little memory", "alone, a prompt a step"}
# Twenty calls: what the device has learnt of its steps by then, a few in sixteen, differs.
NEAR = {
    "alone, light": 0.08, "alone, long prompts": 0.05, "four, light": 0.06, "four, decode": 0.05, "four, prompts": 0.05,
    "four, mixed paces": 0.05, "four, bursts": 0.05, "two, short of time": 0.05,
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in CLOSE | NEAR.keys()], ids=lambda case: case.name
)
def test_the_fidelities_agree(case: Case) -> None:
    step, fluid = mean_of(case, "step"), mean_of(case, "fluid")
    assert fluid[0] == pytest.approx(step[0], rel=NEAR.get(case.name, 0.05))
    assert fluid[1] == pytest.approx(step[1], rel=0.05)
    assert fluid[2] == pytest.approx(step[2], abs=0.03)


def test_a_long_prompt_is_cut_anew_as_its_tokens_look_at_more() -> None:
    """Beside a stream that is promised 50 ms, 30,000 tokens: later chunks are smaller, so that the stream keeps up."""
    case = Case("", ("8B",), 1.0, 1.0, 1.0)
    node, specs, apps = world(case)
    ends = {}
    for fidelity in FIDELITIES:
        bench = Bench(make(fidelity, node, specs, apps=apps))
        bench.device.up("m0", 0.0)
        for call in (Call(0, 0.0, 0, 500, 400), Call(1, 1.0, 0, 30_000, 2)):
            bench.until(call.at_s)
            bench.device.begin(call, "m0", call.at_s)
        bench.until(1e3)
        ends[fidelity] = bench.first[1], bench.last[0]
    assert ends["fluid"][0] == pytest.approx(ends["step"][0], rel=0.03)
    assert ends["fluid"][1] == pytest.approx(ends["step"][1], rel=0.1)


def test_what_was_told_can_be_told_again() -> None:
    """Played to a device of the same kind, a tape comes to the same, a model's leaving and a slow spell included."""
    node, specs = small()
    tape = Taped(node, make("step", node, specs))
    bench = Bench(tape)
    for name in ("m0", "m1"):
        bench.device.up(name, 0.0)
    for i in range(8):
        bench.until(0.05 * i)
        bench.device.begin(Call(i, 0.05 * i, i % 2, 700, 40 + 9 * i), f"m{i % 2}", 0.05 * i)
    bench.until(0.5)
    bench.device.slow(1.5, 0.5)
    bench.until(0.8)
    lost = bench.device.down("m1", 0.8)
    bench.until(1e3)
    emits = play(tape, make("step", node, specs))
    assert {emit.call: emit.at_s for emit in emits if emit.ended} == bench.last and lost
    known = {i: Outcome(Call(i, 0.05 * i, i % 2, 700, 40 + 9 * i), None, 0.0, 0.0, "n") for i in range(8)}
    found = outcomes(known, emits)
    assert [bool(found[i].why) for i in range(8)] == [i in lost for i in range(8)]
    assert found[0].ttft_s == pytest.approx(bench.first[0])
    assert found[0].tpot_s == pytest.approx((bench.last[0] - bench.first[0]) / 39)


def test_a_run_is_the_same_each_time() -> None:
    case = CASES[-2]
    node, specs, apps = world(case)
    found = []
    for _ in range(2):
        device = make("fluid", node, specs, apps=apps)
        found.append(
            drive(device, [spec.known.model for spec in specs], calls(case, 3, 10.0), apps)._replace(took_s=0.0)
        )
    assert found[0] == found[1]


def test_promises_decide_who_goes_first() -> None:
    """Of two models that decode, the one whose tokens are due sooner gets them sooner, in both fidelities."""
    node, specs = small()
    apps = [
        AppSpec(name="a", model="m0", ttft_s=1.0, tpot_s=0.02),
        AppSpec(name="b", model="m1", ttft_s=1.0, tpot_s=0.2),
    ]
    for fidelity in FIDELITIES:
        bench = Bench(make(fidelity, node, specs, apps=apps))
        for i in range(2):
            bench.device.up(f"m{i}", 0.0)
            bench.device.begin(Call(i, 0.0, i, 50, 100), f"m{i}", 0.0)
        bench.until(1e3)
        assert bench.last[0] < 0.75 * bench.last[1]
