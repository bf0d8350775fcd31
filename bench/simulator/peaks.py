"""How many replicas each model of a scenario takes at its peak: read off its calls before the day, by the roofline.

`static` is provisioned by it. The calls are read once, in bounded memory: the requests and tokens of the busiest half
minute of each model, and the lengths of all of its requests. The leader's own prior then says how many replicas keep
the promise at that rate, on devices of their own. (Lengths of one half minute alone say little: a rare model has one
request in it.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from janus_server.sched.oracle_prior import expect, numbers_of, physics_and_limits, table_of, traffic_of
from janus_server.sched.oracle_records import Features, Promise, Subject

from .records import AppSpec, Call, ModelSpec, Scenario

# As long as the leader's own observations.
WINDOW_S: Final = 30.0
# With so many no prompt waits for another.
_MOST: Final = 1024


class _Sums:
    """Of one model's calls: of all of them, and the most in one window."""

    __slots__ = ("input", "input_square", "most_requests", "most_tokens", "output", "output_square", "requests",
                 "since_requests", "since_tokens")  # fmt: skip

    def __init__(self) -> None:
        self.requests = self.input = self.input_square = self.output = self.output_square = 0
        self.most_requests = self.most_tokens = self.since_requests = self.since_tokens = 0

    def close(self) -> None:
        """A window ends."""
        tokens = self.input + self.output
        self.most_requests = max(self.most_requests, self.requests - self.since_requests)
        self.most_tokens = max(self.most_tokens, tokens - self.since_tokens)
        self.since_requests, self.since_tokens = self.requests, tokens

    def features(self) -> Features:
        """As if the busiest window lasted; if its requests were few but long, more mean ones instead."""
        n = self.requests
        given, answered = self.input / n, self.output / n
        rate = max(self.most_requests, self.most_tokens / max(given + answered, 1.0)) / WINDOW_S
        return Features(rate * (given + answered), rate, given, max(0.0, self.input_square / n - given**2), answered,
                        max(0.0, self.output_square / n - answered**2))  # fmt: skip


def needs(scenario: Scenario) -> dict[str, int]:
    """Replicas by model, 0 for those that no call is for."""
    peaks = peaks_of(scenario.calls, scenario.apps)
    found = {}
    for spec in scenario.models:
        model = spec.known.model
        peak, subject = peaks.get(model), subject_of(scenario, spec)
        attain = max((app.attain for app in scenario.apps if app.model == model), default=0.0)
        found[model] = 0 if peak is None or subject is None else replicas_for(peak, subject, attain)
    return found


def devices(scenario: Scenario) -> int:
    """How many devices all peaks together take, each on devices of its own: a cluster sized for `static`."""
    shards = {spec.known.model: spec.known.shards for spec in scenario.models}
    return sum(count * shards[model] for model, count in needs(scenario).items())


def subject_of(scenario: Scenario, spec: ModelSpec) -> Subject | None:
    """The model on devices of its own, with the strictest promise of its applications; None where it has none."""
    apps = [app for app in scenario.apps if app.model == spec.known.model]
    if not apps or not scenario.nodes:
        return None
    promise = Promise(min(app.ttft_s for app in apps), min(app.tpot_s for app in apps))
    return Subject(model=spec.shape, device=scenario.nodes[0].shape, promise=promise, shards=spec.known.shards)


def peaks_of(calls: Iterable[Call], apps: Sequence[AppSpec]) -> dict[str, Features]:
    """By model with calls, its traffic if the busiest window lasted."""
    names = [app.model for app in apps]
    sums: dict[str, _Sums] = {}
    until_s = WINDOW_S
    for _, at_s, app, given, answered in calls:
        if at_s >= until_s:
            for one in sums.values():
                one.close()
            until_s = (at_s // WINDOW_S + 1.0) * WINDOW_S
        found = sums.get(names[app])
        if found is None:
            found = sums[names[app]] = _Sums()
        found.requests += 1
        found.input += given
        found.input_square += given * given
        found.output += answered
        found.output_square += answered * answered
    for one in sums.values():
        one.close()
    return {model: one.features() for model, one in sums.items()}


def replicas_for(peak: Features, subject: Subject, attain: float) -> int:
    """The fewest that keep the promise to the promised share of those that idle devices would keep it to.

    (Some prompts are too long for the promise on any device, and more devices do nothing about it.)
    """
    best = _share(peak, subject, _MOST)
    return next(count for count in range(1, _MOST + 1) if _share(peak, subject, count) >= attain * best)


def _share(peak: Features, subject: Subject, count: int) -> float:
    """Of requests, the part expected on time with so many replicas."""
    physics, limits = physics_and_limits([numbers_of(subject)])
    prior = expect(physics, limits, traffic_of(table_of([peak]), np.array([[float(count)]])))
    return 1.0 / (1.0 + math.exp(-float(prior.log_odds[0, 0])))
