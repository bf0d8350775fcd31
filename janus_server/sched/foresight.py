"""What the Brain expects of each model's traffic: the live side of the oracle. Pure; the Brain owns one.

Observations and fits come in as events; out go requests for new fits, and forecasts for whoever looks. A forecast
answers for the traffic that was seen last. Models without a promise, or not measured yet, have none.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from janus_server.orders import Action, Observed, Refit
from janus_server.sched.mind import Question, Shares
from janus_server.sched.oracle import Ask, Oracle, OracleSettings
from janus_server.sched.oracle_records import Features, FitRequest, Fitted, Learnt, Observation

# Of a device's time, below which another replica finds nothing to do.
_IDLE: Final = 0.1
# Lengths scatter so much that fewer requests say little of them.
_LENGTHS_MOST: Final = 200.0
# A fit that has brought nothing after so long never will: its process ran out of something.
LATE_S = 120.0


class Lengths(NamedTuple):
    """Means over the last `requests` of a model: tokens of prompts and answers, and their squares."""

    requests: float
    input: float
    input_square: float
    output: float
    output_square: float

    @classmethod
    def of(cls, observation: Observation) -> Lengths:
        f = observation.features
        return cls(
            float(max(1, observation.requests)), f.input_mean, f.input_variance + f.input_mean**2, f.output_mean,
            f.output_variance + f.output_mean**2,
        )  # fmt: skip

    def after(self, later: Lengths) -> Lengths:
        """With those of another period, the present ones counting as _LENGTHS_MOST at most."""
        kept = min(self.requests, _LENGTHS_MOST)
        part = later.requests / (kept + later.requests)
        means = (old + part * (new - old) for old, new in zip(self[1:], later[1:], strict=True))
        return Lengths(kept + later.requests, *means)

    def at(self, request_rate: float) -> Features:
        """So many requests a second that are as long."""
        return Features(
            request_rate * (self.input + self.output), request_rate, self.input,
            max(0.0, self.input_square - self.input**2), self.output, max(0.0, self.output_square - self.output**2),
        )  # fmt: skip


class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Foresight` knows at one moment. latest are the last observations with traffic, lengths those of the
    requests of longer than that, request is the open fit."""

    models: tuple[Learnt, ...] = ()
    latest: dict[str, Observation] = {}
    lengths: dict[str, Lengths] = {}
    request: FitRequest | None = None
    asked_s: float | None = None


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of one replica of a model at the traffic of features, which were seen age_s ago.

    attainment is the share of requests on time, attainment_least the pessimist's. hbm, compute and bandwidth are the
    medians of shares of the device, device_most the pessimist's largest of them. on_time of `requests` attained their
    promise in the window that was seen. fitted: it rests on observations, not on the model's shape alone.
    """

    features: Features
    age_s: float
    attainment: float
    attainment_least: float
    hbm: float
    compute: float
    bandwidth: float
    device_most: float
    observations: int
    fitted: bool
    requests: int
    on_time: int


class Need(NamedTuple):
    """Of a model: its tokens a second, and the shares of a device that one replica takes for them."""

    tokens_s: float
    hbm: float
    compute: float
    bandwidth: float


class Foresight:
    """An `Oracle`, what each model's traffic was last, and the fit that is under way."""

    def __init__(self, settings: OracleSettings, refit_every_s: float | None, known: Foreseen | None = None) -> None:
        """refit_every_s None: nothing is ever fitted, forecasts rest on shapes and step times."""
        known = known or Foreseen()
        self._refit_every_s = refit_every_s
        self._oracle = Oracle(settings, known.models)
        self._latest = dict(known.latest)
        self._lengths = dict(known.lengths)
        self._request = known.request
        self._asked_s = known.asked_s

    def memory(self) -> Foreseen:
        """What it knows now."""
        return Foreseen(
            models=self._oracle.memory(), latest=dict(self._latest), lengths=dict(self._lengths),
            request=self._request, asked_s=self._asked_s,
        )  # fmt: skip

    def observed(self, event: Observed, now: float, actions: list[Action]) -> None:
        """Take a period in, and have the model fitted that needs it most, if it is time for that."""
        for name, subject in event.subjects.items():
            self._oracle.know(name, subject)
        for name, observation in event.models.items():
            self._oracle.observe(name, observation)
            features = observation.features
            if self._oracle.knows(name) and features.request_rate > 0.0 and features.output_mean > 0.0:
                self._latest[name] = observation
                lengths, known = Lengths.of(observation), self._lengths.get(name)
                self._lengths[name] = lengths if known is None else known.after(lengths)
        self._refit(now, actions)

    def learn(self, fitted: Fitted) -> None:
        """A fit came back; one that is not the last that was asked for counts too."""
        self._oracle.learn(fitted)
        if self._request is not None and self._request.model == fitted.model:
            self._request = None
        # Its equations take milliseconds to solve, once: for one model now, not for all when somebody looks.
        self.forecast(fitted.model, fitted.at_s)

    def fit_request(self, model: str) -> FitRequest | None:
        """What the last `Refit` of the model wants fitted, while that is open."""
        return self._request if self._request is not None and self._request.model == model else None

    def forecast(self, model: str, now: float) -> Forecast | None:
        """None of a model that is not known yet, or had no traffic while it was."""
        seen = self._latest.get(model)
        if seen is None or not self._oracle.knows(model):
            return None
        ask: Sequence[Ask] = [Ask(model, seen.features, (1,))]
        demand, attainment = self._oracle.demand(ask)[0], self._oracle.attainment(ask)[0]
        hbm, compute, bandwidth = (float(share) for share in demand.median[0])
        return Forecast(
            features=seen.features,
            age_s=max(0.0, now - seen.at_s),
            attainment=float(attainment.expected[0]),
            attainment_least=float(attainment.least[0]),
            hbm=hbm,
            compute=compute,
            bandwidth=bandwidth,
            device_most=float(demand.most[0].max()),
            observations=self._oracle.observations(model),
            fitted=self._oracle.fitted(model),
            requests=seen.requests,
            on_time=seen.on_time,
        )

    def expect(self, questions: Sequence[Question], traffic: Mapping[str, Features]) -> list[Shares | None]:
        """The attainment for each question with the present traffic of the models. None of one that nothing is known
        of.

        A pessimist's, once the model was fitted. Before, its shape is all there is: a pessimist who has seen nothing
        believes nothing, and would have every device. Replicas beyond those that have something to do add nothing.
        """
        answers: list[Shares | None] = [None] * len(questions)
        asks: list[tuple[int, Ask]] = []
        for i, question in enumerate(questions):
            features = self._features(question.model, traffic.get(question.model))
            if features is not None:
                scaled = at_rate(features, question.factor * features.token_rate)
                asks.append((i, Ask(question.model, scaled, question.counts)))
        for (i, ask), (demand, one) in zip(asks, self._oracle.both([ask for _, ask in asks]), strict=True):
            shares = one.least if self._oracle.fitted(ask.model) else one.expected
            answers[i] = _useful(ask.counts, shares, float(demand.median[0, 1:].max()))
        return answers

    def needs(self, traffic: Mapping[str, Features]) -> dict[str, Need]:
        """What one replica of each model takes of a device with all of the model's traffic, of those that something is
        known of."""
        asks = []
        for name, present in traffic.items():
            features = self._features(name, present)
            if features is not None:
                asks.append(Ask(name, features, (1,)))
        needs = {}
        for ask, demand in zip(asks, self._oracle.demand(asks), strict=True):
            said = demand.most if self._oracle.fitted(ask.model) else demand.median
            hbm, compute, bandwidth = (float(share) for share in said[0])
            needs[ask.model] = Need(ask.features.token_rate, hbm, compute, bandwidth)
        return needs

    def recent(self, model: str, now: float, within_s: float) -> Features | None:
        """The traffic of the last period that was observed, unless that is longer ago."""
        seen = self._latest.get(model)
        return None if seen is None or now - seen.at_s > within_s else seen.features

    def _features(self, model: str, present: Features | None) -> Features | None:
        """The present rate, with the lengths of the requests so far where a period was observed."""
        if present is None or not present.token_rate > 0.0 or not self._oracle.knows(model):
            return None
        lengths = self._lengths.get(model)
        if lengths is not None:
            return lengths.at(present.token_rate / max(lengths.input + lengths.output, 1e-9))
        return present if present.output_mean > 0.0 else None

    def _refit(self, now: float, actions: list[Action]) -> None:
        every_s = self._refit_every_s
        if every_s is None:
            return
        since_s = LATE_S if self._asked_s is None else now - self._asked_s
        # A clock that jumped back must not stop it for ever.
        if 0.0 <= since_s < (every_s if self._request is None else max(every_s, LATE_S)):
            return
        request = self._oracle.next_fit(now)
        self._request = request
        if request is None:
            return
        self._asked_s = now
        seen = self._oracle.observations(request.model)
        why = f"{request.model}: fit its demand and attainment to {seen} observed periods"
        actions.append(Refit(request.model, why))


def _useful(counts: Sequence[int], shares: Shares, load: float) -> Shares:
    """The shares, with those of more replicas than are of use as that of the last one that is: where each would work
    for less than a tenth of its time, whoever is late would be so with any number. load is what one of them has to do
    with all of the traffic, in devices.

    Example: 0.35 devices of work are 4 replicas' at most: of 1, 2, 4 and 8, that attain 0.5, 0.7, 0.8 and 0.9, the last
    two attain 0.8.
    """
    most = max(1, math.ceil(load / _IDLE))
    last = max(0, bisect.bisect_right(counts, most) - 1)
    useful: Shares = np.minimum(shares, shares[last])
    return useful


def at_rate(features: Features, token_rate: float) -> Features:
    """The same lengths, more or fewer requests."""
    factor = token_rate / features.token_rate if features.token_rate > 0.0 else 1.0
    return msgspec.structs.replace(features, token_rate=token_rate, request_rate=factor * features.request_rate)
