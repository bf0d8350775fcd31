"""What nodes measured of their models over a period, as one window of the whole cluster. Pure.

Each node tells of the requests that came to it, in periods of its own; together they are what came to all. How a device
was used says the node that has it: replicas are alike, so that is a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from janus_server.orders import Observed
from janus_server.sched.oracle_records import Features, Observation


class Windows:
    """Told since the window began, of each node only the last."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], Observation] = {}

    def heard(self, node: str, observed: Observed) -> None:
        for model, observation in observed.models.items():
            self._told[model, node] = observation

    def take(self, now: float, replicas: Callable[[str], int], moved: Collection[str]) -> Observed | None:
        """The window that ends now. Of a model that was moved within it, it says nothing of how that ran."""
        told, self._told = self._told, {}
        models: dict[str, list[Observation]] = {}
        for (model, _), observation in sorted(told.items()):
            models.setdefault(model, []).append(observation)
        found = {
            model: _together(parts, now, 0 if model in moved else replicas(model)) for model, parts in models.items()
        }
        return Observed(found) if found else None


def _together(parts: Sequence[Observation], now: float, replicas: int) -> Observation:
    features = [part.features for part in parts]
    rate = sum(one.request_rate for one in features)
    answered = [one for one in features if one.output_mean > 0.0]
    input_mean, input_variance = _moments([(one.request_rate, one.input_mean, one.input_variance) for one in features])
    output_mean, output_variance = _moments(
        [(one.request_rate, one.output_mean, one.output_variance) for one in answered]
    )
    whole = Features(rate * (input_mean + output_mean), rate, input_mean, input_variance, output_mean, output_variance)
    return Observation(
        at_s=now, features=whole, replicas=replicas if answered else 0, requests=sum(part.requests for part in parts),
        on_time=sum(part.on_time for part in parts), hbm=_mean([part.hbm for part in parts]),
        compute=_mean([part.compute for part in parts]), bandwidth=_mean([part.bandwidth for part in parts]),
    )  # fmt: skip


def _moments(groups: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Mean and variance of several groups together, of each its weight, mean and variance."""
    total = sum(weight for weight, _, _ in groups)
    if total <= 0.0:
        return 0.0, 0.0
    mean = sum(weight * one for weight, one, _ in groups) / total
    square = sum(weight * (variance + one * one) for weight, one, variance in groups) / total
    return mean, max(0.0, square - mean * mean)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
