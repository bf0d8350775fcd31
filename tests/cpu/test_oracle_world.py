"""The simulated truth that the oracle's bench holds it against: each request judged once, at the roofline's cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from bench.oracle_subjects import Recorded, drawn_window, read, recorded_window
from bench.oracle_world import Requests, Window, features_of, observe, simulate
from janus_server.sched.oracle import Ask, Oracle
from janus_server.sched.oracle_records import Promise, Subject
from janus_server.sched.roofline import ASCEND_910C, ModelShape, decode, physics_of, prefill, shards_needed, step

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces" / "workload62"
SHAPE = ModelShape(name="8B", parameters=8.19e9, layers=36, hidden=4096, kv_bytes=147_456.0, pair_flops=589_824.0)
SUBJECT = Subject(model=SHAPE, device=ASCEND_910C, promise=Promise(1.0, 0.05), pace_s=0.0)
PHYSICS = physics_of(SHAPE, ASCEND_910C, 1)


@pytest.fixture(scope="module")
def models() -> Mapping[str, Recorded]:
    if not TRACES.is_dir():
        pytest.skip(f"no trace workload62 in {TRACES}")
    return read(TRACES)


def requests(count: int, per_second: float, inputs: int = 500, outputs: int = 50) -> Requests:
    at_s = np.random.default_rng(0).exponential(1.0 / per_second, count).cumsum()
    return Requests(at_s, np.full(count, inputs), np.full(count, outputs))


def test_a_lone_request_does_the_roofline_s_work() -> None:
    """One prefill and 49 decode steps, of 501 to 549 tokens."""
    seen = simulate(SUBJECT, PHYSICS, requests(1, 1e3), Window(0.0, 10.0), np.random.default_rng(1))
    costs = [step(PHYSICS, prefill(0, 500)), *(step(PHYSICS, decode(1, context)) for context in range(501, 550))]
    assert seen.compute == pytest.approx(sum(float(c.flops) for c in costs) / 10.0 / PHYSICS.flops_s, rel=1e-9)
    assert seen.bandwidth == pytest.approx(sum(float(c.bytes) for c in costs) / 10.0 / PHYSICS.bytes_s, rel=1e-9)
    assert (seen.requests, seen.on_time) == (1, 1)


@pytest.mark.parametrize("per_second", [0.5, 10.0, 200.0])
def test_every_request_of_the_window_is_judged_once(per_second: float) -> None:
    """Also far beyond saturation, where most have not ended when the simulation stops."""
    sent, window = requests(int(per_second * 40), per_second), Window(10.0, 30.0)
    seen = simulate(SUBJECT, PHYSICS, sent, window, np.random.default_rng(1))
    assert seen.requests == ((sent.at_s >= 10.0) & (sent.at_s < 30.0)).sum()
    assert 0 <= seen.on_time <= seen.requests
    assert seen.compute <= 1.1 and seen.bandwidth <= 1.1
    assert (seen.on_time == 0) == (per_second == 200.0)


def test_round_robin_gives_every_request_to_one_replica() -> None:
    sent = requests(10, 1.0)
    parts = [sent.of_replica(i, 3) for i in range(3)]
    assert sorted(np.concatenate([part.at_s for part in parts]).tolist()) == sent.at_s.tolist()


def test_a_window_without_requests_is_no_observation() -> None:
    draws = np.random.default_rng(1)
    assert observe(SUBJECT, PHYSICS, requests(3, 1.0), Window(1e3, 2e3), 1, 1, 0.0, draws) is None


def test_the_prior_is_within_a_factor_of_two_for_each_model_of_the_trace(
    models: Mapping[str, Recorded],
) -> None:
    """The median of five windows of the day, at the replica count that the prior would choose, on a device as its data
    sheet says."""
    for i, (name, recorded) in enumerate(models.items()):
        subject, draws, oracle, ratios = recorded.subject, np.random.default_rng(i), Oracle(), []
        oracle.know("m", subject)
        physics = physics_of(subject.model, subject.device, subject.shards)
        for _ in range(5):
            sent, window = recorded_window(recorded, draws)
            features = features_of(sent, window)
            replicas = oracle.smallest(Ask("m", features, (1, 2, 4, 8, 16, 32, 64)), 0.9).replicas
            truth = observe(subject, physics, sent, window, replicas, 1, 0.0, draws)
            if truth is not None:
                expected = oracle.demand([Ask("m", features, (replicas,))])[0].median[0]
                ratios.append(np.array([truth.hbm, truth.compute, truth.bandwidth]) / expected)
        middle = np.median(ratios, axis=0)
        assert ((middle > 0.5) & (middle < 2.0)).all(), (name, middle)


def test_the_trace_s_models_are_the_fourteen_and_weigh_what_it_says(models: Mapping[str, Recorded]) -> None:
    assert len(models) == 14
    shapes = {name: recorded.subject.model for name, recorded in models.items()}
    assert shapes["DeepSeek-V3-671B"].active_parameters == pytest.approx(37.5e9, rel=0.02)
    assert shapes["Qwen3-30B-A3B"].active_parameters == pytest.approx(3.35e9, rel=0.05)
    assert shapes["Qwen3-8B"].weight_bytes == pytest.approx(16.4e9, rel=0.01)
    assert shards_needed(shapes["Qwen3-32B"], ASCEND_910C) == 2


def test_windows_are_drawn_at_the_rate_that_was_asked_for(models: Mapping[str, Recorded]) -> None:
    recorded = models["Qwen3-8B"]
    sent, window = drawn_window(recorded, 20.0, np.random.default_rng(0))
    assert features_of(sent, window).request_rate == pytest.approx(20.0, rel=0.2)
