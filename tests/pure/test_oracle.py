"""The oracle in numpy: its posterior against a dense one by hand, monotone answers, the prior far from data, replay.

Fits are made by hand here: what gpytorch finds is tested in the tier that has torch.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.errors import Bug
from janus_server.sched.oracle import ATTAINMENT_INPUTS, DEMAND_INPUTS, Ask, Oracle, OracleSettings
from janus_server.sched.oracle_arrays import pack, unpack
from janus_server.sched.oracle_gp import JITTER, Posterior, matern, rising
from janus_server.sched.oracle_records import (
    Features,
    FitRequest,
    Fitted,
    FittedGp,
    Hyper,
    Observation,
    Promise,
    Subject,
)
from janus_server.sched.roofline import (
    ASCEND_910C,
    DEVICES,
    ModelShape,
    Physics,
    Work,
    decode,
    memory_share,
    physics_of,
    prefill,
    shards_needed,
    step,
    wide,
)

QWEN3_8B = ModelShape(
    name="Qwen3-8B", parameters=8.19e9, layers=36, hidden=4096, kv_bytes=147_456.0, pair_flops=4.0 * 36 * 32 * 128
)
DEEPSEEK_V3 = ModelShape(
    name="DeepSeek-V3", parameters=671e9, layers=61, hidden=7168, kv_bytes=70_272.0, pair_flops=4.0 * 61 * 128 * 576,
    parameter_bytes=1.0, expert_parameters=654e9, experts=256, experts_per_token=8,
)  # fmt: skip
SUBJECT = Subject(model=QWEN3_8B, device=ASCEND_910C, promise=Promise(1.0, 0.05), pace_s=0.025)
COUNTS = (1, 2, 3, 4, 6, 8)

positive = st.floats(0.0, 1e7, allow_nan=False)
any_features = st.builds(Features, positive, positive, positive, positive, positive, positive)


def chat(rate: float) -> Features:
    return Features(rate * 600.0, rate, 500.0, 300.0**2, 100.0, 80.0**2)


def known(**options: float) -> Oracle:
    oracle = Oracle(OracleSettings(**options))  # type: ignore[arg-type]
    oracle.know("m", SUBJECT)
    return oracle


def attainment_gp(inputs: np.ndarray, targets: np.ndarray, noise: np.ndarray, scale: float = 1.5) -> FittedGp:
    hyper = Hyper((1.0,) * ATTAINMENT_INPUTS, scale, 0.05, 0.0)
    return FittedGp(hyper, pack(inputs), pack(targets), pack(noise))


# The roofline.


def test_a_decode_step_of_one_row_reads_the_weights_once() -> None:
    """16.38 GB over 0.8 × 1.49 TB/s is 13.7 ms, and 2 ms are fixed."""
    cost = step(physics_of(QWEN3_8B, ASCEND_910C, 1), decode(1, 0))
    assert cost.seconds == pytest.approx(16.38e9 / (0.8 * 1.49e12) + 2e-3)
    assert cost.bytes == pytest.approx(16.38e9)


def test_a_long_prompt_is_bound_by_compute() -> None:
    """Half of 376 TFLOPS: 2 × 8.19 G × 2048 takes 178 ms, and the attention of 2048 tokens a little more."""
    cost = step(physics_of(QWEN3_8B, ASCEND_910C, 1), prefill(0, 2048))
    pairs = 2048 * 2049 / 2
    assert cost.flops == pytest.approx(2 * 8.19e9 * 2048 + pairs * QWEN3_8B.pair_flops)
    assert cost.seconds == pytest.approx(cost.flops / 188e12 + 2e-3)


def test_chunks_of_a_prompt_do_the_work_of_the_whole() -> None:
    parts = [prefill(start, 512) for start in range(0, 2048, 512)]
    assert sum(part.pairs for part in parts) == prefill(0, 2048).pairs


def test_a_batch_of_one_reads_eight_experts_and_a_large_one_nearly_all() -> None:
    physics = physics_of(DEEPSEEK_V3, ASCEND_910C, 16)
    one, many = (float(step(physics, Work(tokens, 0.0, 0.0)).bytes) for tokens in (1, 256))
    dense = (671e9 - 654e9) / 16
    assert one == pytest.approx(dense + 654e9 / 16 * 8 / 256)
    assert 0.99 * (671e9 / 16) < many < 671e9 / 16


def test_shards_split_the_work_and_add_an_exchange() -> None:
    whole, half = (physics_of(QWEN3_8B, ASCEND_910C, shards) for shards in (1, 2))
    assert half.weight_bytes * 2 == whole.weight_bytes
    assert half.exchange_s > 0.0 == whole.exchange_s
    assert memory_share(half, 1000.0) < memory_share(whole, 1000.0)


def test_many_models_at_once_are_the_models_one_by_one() -> None:
    singles = [physics_of(model, device, 16) for model in (QWEN3_8B, DEEPSEEK_V3) for device in DEVICES]
    work = Work(np.array([[1.0, 64.0, 2048.0]]), np.array([[10.0, 1e5, 2e6]]), np.array([[10.0, 1e5, 4e3]]))
    together = step(Physics(*wide(np.array(singles), 3)), work)
    for i, physics in enumerate(singles):
        for j in range(3):
            alone = step(physics, Work(*(float(column[0, j]) for column in work)))
            assert together.seconds[i, j] == pytest.approx(float(alone.seconds), rel=1e-12)


def test_models_are_cut_until_their_weights_leave_room() -> None:
    assert shards_needed(QWEN3_8B, ASCEND_910C) == 1
    assert shards_needed(DEEPSEEK_V3, ASCEND_910C) == 16


# The posterior.


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 12))
def test_a_posterior_is_the_dense_one(seed: int, count: int) -> None:
    draws = np.random.default_rng(seed)
    hyper = Hyper(tuple(draws.uniform(0.5, 3.0, 3)), 0.7, 0.1, 0.0)
    inputs, asked = draws.normal(size=(count, 3)), draws.normal(size=(5, 3))
    targets, noise = draws.normal(size=count), draws.uniform(0.01, 1.0, count)
    said = Posterior(FittedGp(hyper, pack(inputs), pack(targets), pack(noise))).at(asked)

    def covariance(a: np.ndarray, b: np.ndarray) -> float:
        r = math.sqrt(sum(((x - y) / length) ** 2 for x, y, length in zip(a, b, hyper.lengths, strict=True)))
        return 0.7**2 * (1 + math.sqrt(5) * r + 5 * r * r / 3) * math.exp(-math.sqrt(5) * r)

    among = np.array([[covariance(a, b) for b in inputs] for a in inputs])
    among += np.diag(noise + JITTER * 0.7**2)
    for k, point in enumerate(asked):
        cross = np.array([covariance(point, a) for a in inputs])
        assert said.mean[k] == pytest.approx(cross @ np.linalg.solve(among, targets), abs=1e-6)
        assert said.sigma[k] ** 2 == pytest.approx(0.49 - cross @ np.linalg.solve(among, cross), abs=1e-6)


def test_far_from_all_data_a_posterior_is_the_prior() -> None:
    gp = attainment_gp(np.zeros((4, ATTAINMENT_INPUTS)), np.full(4, 3.0), np.full(4, 0.1))
    said = Posterior(gp).at(np.full((1, ATTAINMENT_INPUTS), 40.0))
    assert said.mean[0] == pytest.approx(0.0, abs=1e-9)
    assert said.sigma[0] == pytest.approx(1.5)


def test_equal_points_do_not_break_it() -> None:
    gp = attainment_gp(np.zeros((50, ATTAINMENT_INPUTS)), np.full(50, 1.0), np.full(50, 1e-12))
    said = Posterior(gp).at(np.zeros((1, ATTAINMENT_INPUTS)))
    assert said.mean[0] == pytest.approx(1.0, abs=1e-3)
    assert 0.0 <= said.sigma[0] < 0.01


def test_the_kernel_is_one_at_home_and_falls_with_distance() -> None:
    row = matern(np.zeros((1, 1)), np.linspace(0.0, 5.0, 20)[:, None], 1.0)[0]
    assert row[0] == 1.0 and (np.diff(row) < 0.0).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 10)), min_size=1, max_size=7))
def test_the_projection_is_the_nearest_that_never_falls(rows: list[tuple[float, float]]) -> None:
    """Against pooling neighbours that violate the order, one pair at a time."""
    pools = [[value, weight, 1.0] for value, weight in rows]
    i = 0
    while i + 1 < len(pools):
        if pools[i][0] <= pools[i + 1][0]:
            i += 1
            continue
        (a, wa, na), (b, wb, nb) = pools[i], pools.pop(i + 1)
        pools[i] = [(a * wa + b * wb) / (wa + wb), wa + wb, na + nb]
        i = max(i - 1, 0)
    expected = [value for value, _, count in pools for _ in range(int(count))]
    values, weights = (np.array([column]) for column in zip(*rows, strict=True))
    assert rising(values, weights)[0] == pytest.approx(expected, abs=1e-9)


# What it says.


@settings(max_examples=100, deadline=None)
@given(features=any_features, seed=st.integers(0, 1000))
def test_attainment_never_falls_with_replicas_and_everything_is_finite(features: Features, seed: int) -> None:
    """Whatever the traffic, and whatever was learnt: also that more replicas were worse."""
    draws = np.random.default_rng(seed)
    oracle = known()
    inputs = draws.normal(size=(20, ATTAINMENT_INPUTS)) * 3.0
    gp = attainment_gp(inputs, draws.normal(size=20) * 4.0, np.full(20, 0.2))
    oracle.learn(Fitted("m", 0.0, (), gp, 0.0))
    ask = Ask("m", features, COUNTS)
    said, demand = oracle.attainment([ask])[0], oracle.demand([ask])[0]
    for row in (said.expected, said.least):
        assert ((row >= 0.0) & (row <= 1.0)).all() and (np.diff(row) >= -1e-12).all()
    assert (said.least <= said.expected + 1e-12).all()
    assert np.isfinite(demand.median).all() and (demand.most >= demand.median).all() and (demand.median > 0.0).all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -5.0])
def test_reports_that_make_no_sense_are_answered(wrong: float) -> None:
    oracle = known()
    ask = Ask("m", Features(wrong, wrong, wrong, wrong, wrong, wrong), COUNTS)
    assert np.isfinite(oracle.attainment([ask])[0].least).all()
    assert np.isfinite(oracle.demand([ask])[0].most).all()
    assert oracle.smallest(ask, 0.95).replicas in COUNTS


def test_nobody_asks_about_a_model_that_is_not_known() -> None:
    with pytest.raises(Bug, match="unknown model"):
        known().attainment([Ask("other", chat(1.0), COUNTS)])


def test_before_any_observation_more_traffic_needs_more_replicas_and_more_of_a_device() -> None:
    oracle = known()
    chosen = [oracle.smallest(Ask("m", chat(rate), tuple(range(1, 65))), 0.95) for rate in (0.5, 20.0, 80.0)]
    assert all(choice.met for choice in chosen)
    assert chosen[0].replicas == 1 < chosen[1].replicas < chosen[2].replicas
    light, heavy = (oracle.demand([Ask("m", chat(rate), (1,))])[0].median[0] for rate in (0.1, 1.0))
    assert (heavy > light).all()
    # Where prompts take half of its time, steps are fewer and larger, and weights are read less often.
    full = oracle.demand([Ask("m", chat(10.0), (1,))])[0].median[0]
    assert (full[:2] > heavy[:2]).all()
    assert full[2] < heavy[2]
    assert light[0] == pytest.approx(0.3, abs=0.1), "the weights of 8B in bf16 are 16.4 of 57.6 GB"


def test_what_nothing_can_meet_does_not_take_every_device() -> None:
    """Prompts that alone take longer than TTFT: no number of replicas helps."""
    oracle = Oracle()
    oracle.know("m", msgspec.structs.replace(SUBJECT, promise=Promise(0.001, 0.05)))
    choice = oracle.smallest(Ask("m", chat(1.0), tuple(range(1, 65))), 0.95)
    assert not choice.met and choice.replicas <= 4


def test_ignorance_costs_replicas() -> None:
    ask = Ask("m", chat(30.0), tuple(range(1, 65)))
    bold, wary = known(sigmas=0.0).smallest(ask, 0.95), known(sigmas=2.0).smallest(ask, 0.95)
    assert bold.replicas < wary.replicas
    mean, most = known(sigmas=0.0).demand([ask])[0].most, known(sigmas=2.0).demand([ask])[0].most
    assert (most > mean).all()


def test_what_was_learnt_changes_the_answer_there_and_nowhere_else() -> None:
    oracle, ask = known(), Ask("m", chat(5.0), (1,))
    far = Ask("m", Features(1e6, 4e3, 240.0, 0.0, 10.0, 0.0), (1,))
    before, far_before = oracle.attainment([ask])[0], oracle.attainment([far])[0]
    for i in range(10):
        oracle.observe("m", Observation(at_s=float(i), features=chat(5.0), replicas=1, requests=150, on_time=30))
    request = oracle.next_fit(10.0)
    assert request is not None and request.attainment is not None
    inputs = unpack(request.attainment.inputs, ATTAINMENT_INPUTS)
    targets = np.log(0.2 / 0.8) - unpack(request.attainment.prior)
    oracle.learn(Fitted("m", 10.0, (), attainment_gp(inputs, targets, np.full(10, 0.1), scale=5.0), 0.0))
    after = oracle.attainment([ask])[0]
    assert oracle.fitted("m") and before.expected[0] > 0.8
    assert after.expected[0] == pytest.approx(0.2, abs=0.03)
    assert oracle.attainment([far])[0].expected == pytest.approx(far_before.expected, abs=1e-3)


def test_asked_again_it_answers_from_memory_until_it_learns() -> None:
    oracle, ask = known(), Ask("m", chat(5.0), COUNTS)
    first = oracle.attainment([ask])[0]
    assert oracle.attainment([ask])[0] is first
    gp = attainment_gp(np.zeros((1, ATTAINMENT_INPUTS)), np.zeros(1), np.ones(1))
    oracle.learn(Fitted("m", 0.0, (), gp, 0.0))
    assert oracle.attainment([ask])[0] is not first
    assert oracle.attainment([Ask("m", chat(6.0), COUNTS)])[0] is not first


def test_asked_together_or_alone_models_get_the_same_answers() -> None:
    oracle, alone = Oracle(), []
    names = [f"m{i}" for i in range(6)]
    for i, name in enumerate(names):
        model = DEEPSEEK_V3 if i % 2 else QWEN3_8B
        oracle.know(name, msgspec.structs.replace(SUBJECT, model=model, shards=16 if i % 2 else 1))
    asks = [Ask(name, chat(1.0 + i), COUNTS[: 1 + i]) for i, name in enumerate(names)]
    together = oracle.attainment(asks)
    for ask in asks:
        fresh = Oracle()
        model = DEEPSEEK_V3 if int(ask.model[1:]) % 2 else QWEN3_8B
        fresh.know(ask.model, msgspec.structs.replace(SUBJECT, model=model, shards=16 if model is DEEPSEEK_V3 else 1))
        alone.append(fresh.attainment([ask])[0])
    for a, b in zip(together, alone, strict=True):
        assert a.least == pytest.approx(b.least, rel=1e-12)


# What it remembers, and replay.


def observation(at_s: float, rate: float = 5.0) -> Observation:
    return Observation(
        at_s=at_s, features=chat(rate), replicas=1, requests=100, on_time=99, hbm=0.4, compute=0.2, bandwidth=0.5
    )


def points_of(request: FitRequest | None) -> int:
    return 0 if request is None else len(unpack(request.demand[0].residuals))


def test_the_window_is_bounded_and_keeps_the_one_burst_among_quiet_hours() -> None:
    oracle = known(points=16)
    oracle.observe("m", observation(0.0, rate=80.0))
    for i in range(100):
        oracle.observe("m", observation(1.0 + i, rate=5.0 + 0.001 * i))
    request = oracle.next_fit(200.0)
    assert points_of(request) == 16 and request is not None
    rates = unpack(request.demand[0].inputs, DEMAND_INPUTS)[:, 1]
    assert (rates > math.log(50.0)).sum() == 1


def test_old_points_count_less_and_then_not_at_all() -> None:
    oracle = known(half_life_s=100.0, keep_s=1000.0)
    oracle.observe("m", observation(0.0))
    oracle.observe("m", observation(900.0))
    request = oracle.next_fit(1000.0)
    assert request is not None
    assert unpack(request.demand[0].aged) == pytest.approx([1023.0, 1.0])
    oracle.observe("m", observation(1500.0))
    assert points_of(oracle.next_fit(3000.0)) == 2


def test_the_stalest_model_is_fitted_first_and_only_when_there_is_news() -> None:
    oracle = known(refit_points=4)
    oracle.know("n", SUBJECT)
    assert oracle.next_fit(0.0) is None
    for i in range(5):
        oracle.observe("m", observation(float(i)))
    for i in range(7):
        oracle.observe("n", observation(float(i)))
    first, second = oracle.next_fit(10.0), oracle.next_fit(10.0)
    assert first is not None and first.model == "n"
    assert second is not None and second.model == "m"
    assert oracle.next_fit(10.0) is None
    oracle.observe("m", observation(11.0))
    assert oracle.next_fit(12.0) is None, "one new observation right after a fit"
    assert oracle.next_fit(500.0) is not None


def test_what_says_nothing_is_not_remembered() -> None:
    oracle = known()
    oracle.observe("other", observation(0.0))
    oracle.observe("m", Observation(at_s=0.0, features=chat(0.0), replicas=1, requests=0, on_time=0))
    oracle.observe("m", Observation(at_s=0.0, features=chat(math.nan), replicas=1, requests=3, on_time=1))
    oracle.observe("m", Observation(at_s=0.0, features=chat(1.0), replicas=0, requests=3, on_time=1))
    assert oracle.next_fit(1e4) is None


def test_a_model_that_is_served_otherwise_starts_again() -> None:
    oracle = known()
    gp = attainment_gp(np.zeros((1, ATTAINMENT_INPUTS)), np.ones(1), np.ones(1))
    oracle.learn(Fitted("m", 5.0, (), gp, 0.0))
    oracle.know("m", SUBJECT)
    assert oracle.fitted("m")
    oracle.know("m", msgspec.structs.replace(SUBJECT, shards=2))
    assert not oracle.fitted("m")
    oracle.forget("m")
    oracle.learn(Fitted("m", 6.0, (), gp, 0.0))
    assert not oracle.knows("m")


def test_a_fit_that_comes_late_does_not_undo_a_later_one() -> None:
    oracle, ask = known(), Ask("m", chat(5.0), (1,))
    zeros = np.zeros((1, ATTAINMENT_INPUTS))
    oracle.learn(Fitted("m", 9.0, (), attainment_gp(zeros, np.ones(1), np.ones(1)), 0.0))
    before = oracle.attainment([ask])[0]
    oracle.learn(Fitted("m", 3.0, (), attainment_gp(zeros + 5.0, np.ones(1), np.ones(1)), 0.0))
    assert oracle.attainment([ask])[0] is before


def test_what_the_journal_gives_back_says_the_very_same_numbers() -> None:
    draws = np.random.default_rng(3)
    inputs, targets, noise = draws.normal(size=(30, 7)), draws.normal(size=30), draws.uniform(0.1, 1.0, 30)
    hyper = Hyper((0.7,) * DEMAND_INPUTS, 0.3, 0.01, 0.1, 1.3)
    demand = FittedGp(hyper, pack(inputs[:, :6]), pack(targets), pack(noise))
    fitted = Fitted("m", 1.0, (demand,) * 3, attainment_gp(inputs, targets, noise), 0.2)
    as_msgpack = msgspec.msgpack.decode(msgspec.msgpack.encode(fitted), type=Fitted)
    as_json = msgspec.convert(msgspec.json.decode(msgspec.json.encode(fitted)), Fitted)
    ask, said = Ask("m", chat(3.0), COUNTS), []
    for copy in (fitted, as_msgpack, as_json):
        assert copy == fitted
        oracle = known()
        oracle.learn(copy)
        attained, needed = oracle.attainment([ask])[0], oracle.demand([ask])[0]
        said.append(b"".join(row.tobytes() for row in (*attained, *needed)))
    assert said[0] == said[1] == said[2]
