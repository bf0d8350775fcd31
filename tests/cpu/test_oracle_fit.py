"""Fitting by gpytorch in its own process, as the server starts it: what it learns, how surely, and that it replays."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from janus_server.bounded import Workers
from janus_server.sched import oracle
from janus_server.sched.oracle import Ask, Oracle
from janus_server.sched.oracle_arrays import pack, unpack
from janus_server.sched.oracle_gp import Posterior
from janus_server.sched.oracle_records import (
    Counts,
    Features,
    FitRequest,
    Fitted,
    Observation,
    Points,
    Promise,
    Subject,
)
from janus_server.sched.roofline import ASCEND_910C, ModelShape

if importlib.util.find_spec("gpytorch") is None:
    pytest.skip("gpytorch is not installed", allow_module_level=True)

PROGRAM = Path(oracle.__file__).with_name("oracle_fit.py")
SUBJECT = Subject(
    model=ModelShape(name="8B", parameters=8.19e9, layers=36, hidden=4096, kv_bytes=147_456.0, pair_flops=589_824.0),
    device=ASCEND_910C, promise=Promise(1.0, 0.05), pace_s=0.025,
)  # fmt: skip


@pytest.fixture(scope="module")
def fits() -> Iterator[Workers]:
    workers = Workers(PROGRAM, workers=1, cpu_s=120.0, memory_bytes=8 << 30, answer_bytes=16 << 20)
    yield workers
    workers.close()


def fit(fits: Workers, request: FitRequest) -> Fitted:
    answer = fits.ask(msgspec.to_builtins(request))
    assert answer is not None
    return msgspec.convert(answer, Fitted)


def points(inputs: np.ndarray, residuals: np.ndarray, aged: float = 0.0) -> Points:
    count = len(inputs)
    return Points(pack(inputs), pack(residuals), pack(np.full(count, 100.0)), pack(np.full(count, aged)))


def counts(inputs: np.ndarray, prior: float, requests: int, on_time: np.ndarray) -> Counts:
    size = len(inputs)
    return Counts(
        pack(inputs), pack(np.full(size, prior)), pack(np.full(size, float(requests))), pack(on_time),
        pack(np.zeros(size)),
    )  # fmt: skip


def test_it_finds_the_input_that_matters_and_the_noise(fits: Workers) -> None:
    draws = np.random.default_rng(0)
    inputs = draws.uniform(-2.0, 2.0, (120, 6))
    fitted = fit(
        fits, FitRequest("m", 0.0, (points(inputs, np.sin(2.0 * inputs[:, 1]) + 0.1 * draws.normal(size=120)),), None)
    )
    hyper = fitted.demand[0].hyper
    assert min(range(6), key=lambda k: hyper.lengths[k]) == 1
    assert 0.05 < (hyper.noise + hyper.request_noise / 100.0) ** 0.5 < 0.2
    asked = draws.uniform(-1.5, 1.5, (50, 6))
    said = Posterior(fitted.demand[0]).at(asked)
    assert np.abs(said.mean - np.sin(2.0 * asked[:, 1])).mean() < 0.15
    assert fitted.attainment is None and fitted.took_s > 0.0


def test_the_same_request_gives_the_same_numbers(fits: Workers) -> None:
    inputs = np.random.default_rng(1).normal(size=(20, 6))
    request = FitRequest("m", 0.0, (points(inputs, inputs[:, 0]),), None)
    first, second = (msgspec.structs.replace(fit(fits, request), took_s=0.0) for _ in range(2))
    assert first == second


def test_a_window_whose_few_requests_were_all_on_time_does_not_lower_a_good_prior(fits: Workers) -> None:
    """The empirical odds of 1 in 1 are 3 to 1, of 999 in 1000 a thousand to one; counts know the difference."""
    inputs = np.random.default_rng(2).normal(size=(60, 7))
    fitted = fit(fits, FitRequest("m", 0.0, (), counts(inputs, 6.0, 1, np.ones(60))))
    assert fitted.attainment is not None
    said = Posterior(fitted.attainment).at(inputs)
    assert said.mean.min() > -0.1


def test_windows_with_more_requests_are_believed_more(fits: Workers) -> None:
    inputs = np.random.default_rng(3).normal(size=(25, 7))
    few, many = (
        fit(fits, FitRequest("m", 0.0, (), counts(inputs, 3.0, size, np.full(25, 0.5 * size)))) for size in (4, 400)
    )
    assert few.attainment is not None and many.attainment is not None
    assert unpack(few.attainment.noise).mean() > unpack(many.attainment.noise).mean()
    said = Posterior(many.attainment).at(inputs)
    assert said.mean == pytest.approx(np.full(25, -3.0), abs=0.4), "half were on time: log odds 0"


def test_old_points_are_doubted(fits: Workers) -> None:
    inputs = np.random.default_rng(4).normal(size=(20, 6))
    fresh, old = (
        fit(fits, FitRequest("m", 0.0, (points(inputs, np.full(20, 0.5), aged),), None)).demand[0]
        for aged in (0.0, 30.0)
    )
    asked = inputs[:5]
    assert (Posterior(fresh).at(asked).mean > Posterior(old).at(asked).mean).all()


def test_a_fit_goes_on_from_the_last(fits: Workers) -> None:
    draws = np.random.default_rng(5)
    inputs = draws.uniform(-2.0, 2.0, (80, 6))
    request = FitRequest("m", 0.0, (points(inputs, np.sin(inputs[:, 0]) + 0.05 * draws.normal(size=80)),), None)
    first = fit(fits, request)
    again = fit(fits, msgspec.structs.replace(request, starts=(first.demand[0].hyper,)))
    before, after = first.demand[0].hyper, again.demand[0].hyper
    assert before.lengths != after.lengths
    assert np.abs(np.log(np.array(before.lengths) / np.array(after.lengths))).max() < 1.0


def test_nothing_observed_is_answered_with_the_prior(fits: Workers) -> None:
    fitted = fit(fits, FitRequest("m", 0.0, (points(np.zeros((0, 6)), np.zeros(0)),), None))
    said = Posterior(fitted.demand[0]).at(np.zeros((2, 6)))
    assert said.mean.tolist() == [0.0, 0.0] and said.sigma[0] == pytest.approx(fitted.demand[0].hyper.scale)


def test_observations_a_fit_and_what_the_oracle_says_then(fits: Workers) -> None:
    """A device that reaches half of what its data sheet promised: demand is learnt to be twice the prior's, the band
    narrows, and a load that the prior took for light turns out to be late."""
    draws, mind = np.random.default_rng(6), Oracle()
    mind.know("m", SUBJECT)
    ask = Ask("m", traffic(6.0), (1, 2))
    expected, demand = mind.attainment([ask])[0], mind.demand([ask])[0]
    for i in range(30):
        features = traffic(float(draws.uniform(2.0, 10.0)))
        prior = mind.demand([Ask("m", features, (1,))])[0].median[0] * 2.0
        mind.observe("m", Observation(
            at_s=120.0 * i, features=features, replicas=1, requests=200, on_time=int(draws.binomial(200, 0.6)),
            hbm=float(prior[0]), compute=float(prior[1]), bandwidth=float(prior[2]),
        ))  # fmt: skip
    request = mind.next_fit(3600.0)
    assert request is not None
    mind.learn(fit(fits, request))
    learnt, needed = mind.attainment([ask])[0], mind.demand([ask])[0]
    assert needed.median[0] == pytest.approx(2.0 * demand.median[0], rel=0.1)
    assert (needed.sigma[0] < demand.sigma[0]).all()
    assert expected.expected[0] > 0.9
    assert learnt.expected[0] == pytest.approx(0.6, abs=0.05)
    assert learnt.least[0] < learnt.expected[0] <= learnt.expected[1]


def traffic(rate: float) -> Features:
    return Features(rate * 600.0, rate, 500.0, 300.0**2, 100.0, 80.0**2)
