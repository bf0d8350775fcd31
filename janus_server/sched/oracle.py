"""The performance oracle: what each model will need of its devices, and how many replicas keep its promise. Pure.

The Brain feeds it observations and the fits that `oracle_fit` made of them, and asks it on every tick. What it says is
the roofline's expectation (`oracle_prior`) times what the capacity GPs learnt of its error, and likewise in log odds
for attainment; sigma says how far to trust it. It never fits, and asks nobody: a model without a fit has its prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from janus_server.errors import require
from janus_server.sched.oracle_arrays import Array, pack, within
from janus_server.sched.oracle_gp import Posterior, rising, running_most
from janus_server.sched.oracle_prior import expect, numbers_of, physics_and_limits, table_of, traffic_of
from janus_server.sched.oracle_records import (
    OUTPUTS,
    Counts,
    Features,
    FitRequest,
    Fitted,
    Hyper,
    Learnt,
    Observation,
    Points,
    Subject,
)
from janus_server.sched.oracle_window import Window

DEMAND_INPUTS: Final = 6
ATTAINMENT_INPUTS: Final = 7
# Of a model that nobody fitted: the roofline is within a factor of two of the demand in nineteen cases of twenty.
UNFITTED_DEMAND: Final = Hyper((1.0,) * DEMAND_INPUTS, 0.35, 0.01, 0.1)
UNFITTED_ATTAINMENT: Final = Hyper((1.0,) * ATTAINMENT_INPUTS, 1.5, 0.1, 0.0)
_UNFITTED_SIGMA: Final = (UNFITTED_ATTAINMENT.doubt * (UNFITTED_ATTAINMENT.scale**2 + UNFITTED_ATTAINMENT.noise)) ** 0.5
# Log odds that no other count reaches: what pads a row must not pull on the others.
_ABOVE_ALL: Final = 700.0
# Of attainment: what more replicas must add to be worth having where the target is out of reach.
_HARDLY: Final = 0.01


class OracleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """sigmas: how many a pessimist adds to demand and takes from attainment.

    A window has at most `points` observations of the last keep_s; one that is half_life_s old counts as uncertain as
    if it had the prior's variance for noise. window_s is how long what is asked about lasts. A model is fitted first
    with first_points observations, and again after refit_points new ones, or refit_s after the last fit if there is one
    at all.
    """

    sigmas: float = 1.0
    points: int = 256
    keep_s: float = 86_400.0
    half_life_s: float = 7200.0
    alike: float = 0.1
    window_s: float = 120.0
    first_points: int = 1
    refit_points: int = 8
    refit_s: float = 300.0


class Ask(msgspec.Struct, frozen=True):
    """How the traffic of all replicas of a model would be met with each of `counts` replicas (rising, at least 1)."""

    model: str
    features: Features
    counts: tuple[int, ...]


class Demand(NamedTuple):
    """Of one replica's shard, shares [counts, 3] of a device in the order of OUTPUTS: the median, the standard
    deviation of its logarithm, and the pessimist's."""

    median: Array
    sigma: Array
    most: Array


class Attainment(NamedTuple):
    """Shares of requests on time, [counts], neither of which falls with the count: expected, and the pessimist's.

    sigma is the standard deviation of the expectation's log odds.
    """

    expected: Array
    least: Array
    sigma: Array


class Choice(NamedTuple):
    """A replica count. With met, a pessimist expects the target to be met with it; else more would hardly help."""

    replicas: int
    met: bool


class Oracle:
    """All models that the cluster serves."""

    def __init__(self, settings: OracleSettings | None = None, known: Sequence[Learnt] = ()) -> None:
        """With what another one knew (`memory`), this one goes on where that one was."""
        self.settings = settings or OracleSettings()
        self._models = {one.name: _Model.of(one, self.settings) for one in known}

    def memory(self) -> tuple[Learnt, ...]:
        """What it knows of every model."""
        return tuple(model.memory(name) for name, model in self._models.items())

    def know(self, name: str, subject: Subject) -> None:
        """From now on the model is served so. What was learnt of it on another device or promise is forgotten."""
        known = self._models.get(name)
        if known is None or known.subject != subject:
            self._models[name] = _Model(subject, self.settings)

    def forget(self, name: str) -> None:
        self._models.pop(name, None)

    def knows(self, name: str) -> bool:
        return name in self._models

    def observations(self, name: str) -> int:
        """How many it remembers of the model."""
        return len(self._models[name].window) if name in self._models else 0

    def fitted(self, name: str) -> bool:
        """Whether what `attainment` says of it rests on observations, and not on the roofline alone."""
        return name in self._models and self._models[name].attainment is not None

    def observe(self, name: str, observation: Observation) -> None:
        """Ignored where it says nothing: of an unknown model, or of a window without traffic."""
        model = self._models.get(name)
        if model is None or observation.replicas < 1 or not observation.features.request_rate > 0.0:
            return
        model.window.add(observation, _row(observation))

    def next_fit(self, now: float) -> FitRequest | None:
        """The model whose fit is most out of date, if any is; by name among equals. It then counts as fitted."""
        waiting = [(model.fresh(now, self.settings), name) for name, model in self._models.items()]
        fresh, name = min(((-fresh, name) for fresh, name in waiting), default=(0, ""))
        if fresh == 0:
            return None
        model = self._models[name]
        model.asked_added, model.asked_s = model.window.added, now
        return _request(name, model, now, self.settings)

    def learn(self, fitted: Fitted) -> None:
        """Of a model that is gone, or was fitted before it changed its shape, nothing."""
        model = self._models.get(fitted.model)
        if model is not None and (model.fitted is None or fitted.at_s >= model.fitted.at_s):
            model.learn(fitted)

    def demand(self, asks: Sequence[Ask]) -> list[Demand]:
        """One for each ask, in order; asked again about the same, it answers from memory."""
        models = [self._known(ask) for ask in asks]
        changed = [i for i, ask in enumerate(asks) if models[i].last_demand is None or models[i].demand_ask != ask]
        if changed:
            news = [asks[i] for i in changed]
            for i, answer in zip(changed, self._demand(news, self._expected(news)), strict=True):
                models[i].demand_ask, models[i].last_demand = asks[i], answer
        return [model.last_demand for model in models if model.last_demand is not None]

    def attainment(self, asks: Sequence[Ask]) -> list[Attainment]:
        """As `demand`."""
        models = [self._known(ask) for ask in asks]
        changed = [i for i, ask in enumerate(asks) if models[i].last_attainment is None or models[i].asked != ask]
        if changed:
            news = [asks[i] for i in changed]
            for i, answer in zip(changed, self._attainment(news, self._expected(news)), strict=True):
                models[i].asked, models[i].last_attainment = asks[i], answer
        return [model.last_attainment for model in models if model.last_attainment is not None]

    def both(self, asks: Sequence[Ask]) -> list[tuple[Demand, Attainment]]:
        """For each the demand with the first of its counts, and the attainment with all: one look at the traffic."""
        models, firsts = [self._known(ask) for ask in asks], [_first(ask) for ask in asks]
        changed = [
            i for i, model in enumerate(models)
            if model.last_demand is None or model.last_attainment is None
            or model.asked != asks[i] or model.demand_ask != firsts[i]
        ]  # fmt: skip
        if changed:
            news = [asks[i] for i in changed]
            expected = self._expected(news)
            demands = self._demand([firsts[i] for i in changed], expected)
            for i, demand, attainment in zip(changed, demands, self._attainment(news, expected), strict=True):
                models[i].demand_ask, models[i].last_demand = firsts[i], demand
                models[i].asked, models[i].last_attainment = asks[i], attainment
        return [(model.last_demand, model.last_attainment) for model in models
                if model.last_demand is not None and model.last_attainment is not None]  # fmt: skip

    def smallest(self, ask: Ask, target: float) -> Choice:
        """The fewest of the ask's counts with which a pessimist expects the target to be met.

        An SLO that none of them meets, as where some prompts alone take longer than TTFT, must not cost every device
        there is: then the fewest with which the expectation is within a hundredth of that of the most.
        """
        said = self.attainment([ask])[0]
        enough = np.flatnonzero(said.least >= target)
        if len(enough):
            return Choice(ask.counts[int(enough[0])], True)
        near = np.flatnonzero(said.expected >= said.expected[-1] - _HARDLY)
        return Choice(ask.counts[int(near[0])], False)

    def _known(self, ask: Ask) -> _Model:
        require(ask.model in self._models, f"the oracle was asked about the unknown model {ask.model}")
        require(bool(ask.counts) and ask.counts[0] >= 1, "the oracle was asked about no replicas")
        return self._models[ask.model]

    def _demand(self, asks: Sequence[Ask], expected: _Expected) -> list[Demand]:
        """Those of models that nobody fitted all at once."""
        arrived = np.maximum(expected.rate * self.settings.window_s, 1.0)
        doubt, least = UNFITTED_DEMAND.doubt, UNFITTED_DEMAND.scale * UNFITTED_DEMAND.scale + UNFITTED_DEMAND.noise
        unfitted = np.sqrt(doubt * (least + UNFITTED_DEMAND.request_noise / arrived))
        log, sigma = np.zeros_like(expected.shares), np.repeat(unfitted[:, :, None], len(OUTPUTS), axis=2)
        widths = _widths(asks)
        for i, ask in enumerate(asks):
            count = widths[i]
            for k, gp in enumerate(self._models[ask.model].demand):
                said, hyper = gp.at(expected.inputs(i)[:count, :DEMAND_INPUTS]), gp.hyper
                variance = said.sigma**2 + hyper.noise + hyper.request_noise / arrived[i, :count]
                log[i, :count, k], sigma[i, :count, k] = said.mean, np.sqrt(hyper.doubt * variance)
        median = expected.shares * np.exp(log)
        most = median * np.exp(self.settings.sigmas * sigma)
        return [Demand(median[i, :k], sigma[i, :k], most[i, :k]) for i, k in enumerate(widths)]

    def _attainment(self, asks: Sequence[Ask], expected: _Expected) -> list[Attainment]:
        mean, sigma = expected.log_odds.copy(), np.full_like(expected.log_odds, _UNFITTED_SIGMA)
        widths = _widths(asks)
        for i, ask in enumerate(asks):
            gp = self._models[ask.model].attainment
            if gp is not None:  # with what windows differ by beyond their requests' luck
                said, hyper = gp.at(expected.inputs(i)), gp.hyper
                mean[i] += said.mean
                sigma[i] = np.sqrt(hyper.doubt * (said.sigma**2 + hyper.noise))
            mean[i, widths[i] :] = _ABOVE_ALL
        mean = rising(mean, 1.0 / sigma**2)
        least = _share(running_most(mean - self.settings.sigmas * sigma))
        shares = _share(mean)
        return [Attainment(shares[i, :k], least[i, :k], sigma[i, :k]) for i, k in enumerate(widths)]

    def _expected(self, asks: Sequence[Ask]) -> _Expected:
        width = max(len(ask.counts) for ask in asks)
        counts = np.array([ask.counts + ask.counts[-1:] * (width - len(ask.counts)) for ask in asks], dtype=np.float64)
        features = [ask.features for ask in asks]
        physics, limits = physics_and_limits([self._models[ask.model].numbers for ask in asks], width)
        table = table_of(features)
        traffic = traffic_of(table, counts)
        prior = expect(physics, limits, traffic)
        return _Expected(table, counts, traffic.rate, prior.shares, prior.log_odds)


class _Expected(NamedTuple):
    """Of m asks about up to k counts, padded with each ask's last: features [m, 6], counts [m, k], requests a second of
    a replica [m, k], and the prior's shares [m, k, 3] and log odds [m, k]."""

    table: Array
    counts: Array
    rate: Array
    shares: Array
    log_odds: Array

    def inputs(self, i: int) -> Array:
        """What a GP is asked with of one ask, [k, 7]."""
        inputs: Array = _inputs(self.table[i : i + 1], self.counts[i : i + 1])[0]
        return inputs


class _Model:
    """What is known of one model. asked_* are of the last fit that was asked for; last_* answer demand_ask, asked."""

    def __init__(self, subject: Subject, settings: OracleSettings) -> None:
        self.subject, self.numbers = subject, numbers_of(subject)
        self.window = Window(settings.points, settings.keep_s, settings.alike)
        self.asked_added = 0
        self.asked_s: float | None = None
        self.fitted: Fitted | None = None
        self.starts: tuple[Hyper, ...] = ()
        self.demand: tuple[Posterior, ...] = ()
        self.attainment: Posterior | None = None
        self.demand_ask: Ask | None = None
        self.asked: Ask | None = None
        self.last_demand: Demand | None = None
        self.last_attainment: Attainment | None = None

    @classmethod
    def of(cls, known: Learnt, settings: OracleSettings) -> _Model:
        model = cls(known.subject, settings)
        # One by one, as they came: the same number may round otherwise among others.
        model.window.restore(known.observations, [_row(one) for one in known.observations], known.added)
        model.asked_added, model.asked_s = known.asked_added, known.asked_s
        if known.fitted is not None:
            model.learn(known.fitted)
        return model

    def memory(self, name: str) -> Learnt:
        return Learnt(
            name=name, subject=self.subject, observations=tuple(self.window.observations), added=self.window.added,
            asked_added=self.asked_added, asked_s=self.asked_s, fitted=self.fitted,
        )  # fmt: skip

    def learn(self, fitted: Fitted) -> None:
        self.fitted = fitted
        self.starts = tuple(gp.hyper for gp in (*fitted.demand, *filter(None, [fitted.attainment])))
        self.demand = tuple(Posterior(gp) for gp in fitted.demand)
        self.attainment = None if fitted.attainment is None else Posterior(fitted.attainment)
        self.last_attainment = self.last_demand = None

    def fresh(self, now: float, settings: OracleSettings) -> int:
        """Observations that no fit has seen, or 0 while a fit is not worth it."""
        if self.window.added < settings.first_points:
            return 0
        fresh = self.window.added - self.asked_added
        due = self.asked_s is None or not 0.0 <= now - self.asked_s < settings.refit_s
        return fresh if fresh >= settings.refit_points or (fresh and due) else 0


def _request(name: str, model: _Model, now: float, settings: OracleSettings) -> FitRequest:
    """What the window holds, as errors of the prior."""
    seen = list(model.window.observations)
    rows = model.window.rows()
    replicas = np.array([[float(o.replicas)] for o in seen])
    physics, limits = physics_and_limits([model.numbers])
    prior = expect(physics, limits, traffic_of(table_of([o.features for o in seen]), replicas))
    ages = np.array([max(now - o.at_s, 0.0) for o in seen])
    aged = np.expm1(np.minimum(ages / settings.half_life_s, 30.0) * np.log(2.0))
    requests = np.array([float(o.requests) for o in seen])
    shares = np.array([(_number(o.hbm), _number(o.compute), _number(o.bandwidth)) for o in seen])
    demand = []
    for k in range(len(OUTPUTS)):
        there = np.isfinite(shares[:, k])
        error = np.log(np.maximum(shares[there, k], 1e-4) / prior.shares[there, 0, k])
        demand.append(Points(
            pack(rows[there, :DEMAND_INPUTS]), pack(error), pack(_arrived(seen, settings)[there]), pack(aged[there]),
        ))  # fmt: skip
    ended = requests > 0.0
    counts = Counts(
        pack(rows[ended]), pack(prior.log_odds[ended, 0]), pack(requests[ended]),
        pack(np.array([float(min(max(o.on_time, 0), o.requests)) for o in seen])[ended]), pack(aged[ended]),
    )  # fmt: skip
    return FitRequest(name, now, tuple(demand), counts if ended.any() else None, model.starts)


def _arrived(seen: Sequence[Observation], settings: OracleSettings) -> Array:
    """Requests of each window and replica, at least 1."""
    return np.array([max(o.features.request_rate / o.replicas * settings.window_s, 1.0) for o in seen])


def _number(share: float | None) -> float:
    return np.nan if share is None or share < 0.0 else share


def _widths(asks: Sequence[Ask]) -> list[int]:
    return [len(ask.counts) for ask in asks]


def _first(ask: Ask) -> Ask:
    return Ask(ask.model, ask.features, ask.counts[:1])


def _inputs(table: Array, counts: Array) -> Array:
    """[m, k, 7] of features [m, 6]: logarithms of a replica's rates, the lengths' means and deviations, and the count.

    Per replica, so that two replicas at twice the rate are near one at the rate; the offsets keep nothing finite.
    """
    replica = counts.astype(np.float64)
    rows = np.empty((*counts.shape, ATTAINMENT_INPUTS))
    rows[..., 0] = np.log(table[:, 0:1] / replica + 1.0)
    rows[..., 1] = np.log(table[:, 1:2] / replica + 0.01)
    rows[..., 2:6] = np.log(np.stack((table[:, 2], table[:, 3] ** 0.5, table[:, 4], table[:, 5] ** 0.5), 1) + 1.0)[
        :, None
    ]
    rows[..., 6] = np.log(replica)
    return rows


def _row(observation: Observation) -> Array:
    """[7]: what the window compares observations by."""
    row: Array = _inputs(table_of([observation.features]), np.array([[observation.replicas]]))[0, 0]
    return row


def _share(log_odds: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-within(log_odds, -_ABOVE_ALL, _ABOVE_ALL))))
