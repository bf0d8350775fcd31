"""What nodes and their leader's own meters tell a policy: reports, counts twice a second, observations by window.

`world` asks for them when they are due. They say what a live server's `lifecycle.report`, counters and `telemetry` say,
over all nodes, and only of what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from janus_server.orders import Busy, Counted, Observed, Report
from janus_server.sched.oracle_records import Features, Observation

from .agenda import Pulse
from .cluster import Cluster, Node
from .serving import Served

Shares: TypeAlias = Callable[[str, Features, float], tuple[float, float, float]]
"""Of a model with this traffic to one replica whose device spends this part of its time on it: the shares of the
device's memory, compute and bandwidth that are in use."""

_IDLE = Busy(0, 0, 0.0)


def _since(busy: Busy, now: float) -> float:
    """When it became idle, to the millisecond; 0 while it is not."""
    return 0.0 if busy.running or busy.waiting else round(now - busy.idle_for_s, 3)


class Teller:
    """shares tells how a replica's device is used; see `Shares`."""

    def __init__(self, cluster: Cluster, pulse: Pulse, models: Mapping[str, Served], shares: Shares) -> None:
        self._cluster, self._pulse, self._models, self._shares = cluster, pulse, models, shares
        self._moved: set[str] = set()
        self._last: dict[str, tuple[float, float]] = {}
        self._since_s = 0.0

    def moved(self, model: str) -> None:
        """A window in which a model is moved says nothing of how it runs."""
        self._moved.add(model)

    def report(self, node: Node, now: float) -> Report:
        """How busy the models are that are Active there; a shard is as busy as its replica's head."""
        busy = node.device.busy(now)
        models = {}
        for name in node.active():
            replica = node.held[name].replica
            if name in busy:
                models[name] = busy[name]
            elif replica is not None and replica.up and replica.head is not node:
                models[name] = replica.head.device.busy(now).get(name, _IDLE)
            else:
                models[name] = _IDLE
        return Report(node.spec.name, models)

    def reports(self, now: float) -> list[Report]:
        """Of the nodes where something changed since the last time."""
        changed, self._pulse.changed = self._pulse.changed, {}
        for node in list(changed):
            for name, held in node.held.items():
                replica = held.replica
                if replica is not None and len(replica.nodes) > 1 and replica.up and replica.head is node:
                    is_busy = bool(node.running.get(name, 0))
                    # What came and ended since the last time left them as they were, but their leader saw it begin.
                    if not is_busy or not replica.told_busy:
                        replica.told_busy = is_busy
                        changed.update(dict.fromkeys(replica.nodes))
        reports = [(node, self.report(node, now)) for node in changed if node.alive]
        return [report for node, report in reports if self._is_news(node, report, now)]

    def _is_news(self, node: Node, report: Report, now: float) -> bool:
        """It says more than the last one: other numbers, or that something ended in between."""
        said = {name: (one.running, one.waiting, _since(one, now)) for name, one in report.models.items()}
        before, node.said = node.said, said
        return before != said

    def counted(self, now: float) -> Counted | None:
        models = {name: model.tally.counts(now) for name, model in self._models.items() if model.tally.moving}
        return Counted(models) if models else None

    def observed(self, now: float, moving: Iterable[str]) -> Observed | None:
        """The window that ends now, of the models that requests came for; `moving` are on their way somewhere."""
        period_s, self._since_s = max(now - self._since_s, 1e-3), now
        used_s = self._used()
        found: dict[str, Observation] = {}
        for name, model in self._models.items():
            tally = model.tally
            if tally.came:
                steady = name not in self._moved and model.replicas > 0
                replicas = model.replicas if steady else 0
                found[name] = self._observation(name, model, replicas, now, period_s, used_s.get(name, 0.0))
                tally.clear_ended()
            tally.clear()
        self._moved = set(moving)
        return Observed(found) if found else None

    def _observation(
        self, name: str, model: Served, replicas: int, now: float, period_s: float, used_s: float
    ) -> Observation:
        tally = model.tally
        input_mean = tally.in_total / tally.came
        input_variance = max(0.0, tally.in_squares / tally.came - input_mean**2)
        if tally.out_count:
            mean = tally.out_total / tally.out_count
            self._last[name] = mean, max(0.0, tally.out_squares / tally.out_count - mean * mean)
        known = name in self._last
        output_mean, output_variance = self._last.get(name, (0.0, 0.0))
        rate = tally.came / period_s
        features = Features(
            rate * (input_mean + output_mean), rate, input_mean, input_variance, output_mean, output_variance
        )
        if not known:
            replicas = 0  # nobody knows yet how long its answers are
        hbm = compute = bandwidth = None
        if replicas:
            one = Features(
                features.token_rate / replicas, rate / replicas, input_mean, input_variance, output_mean,
                output_variance,
            )  # fmt: skip
            hbm, compute, bandwidth = self._shares(name, one, min(1.0, used_s / period_s / replicas))
        return Observation(
            at_s=now, features=features, replicas=replicas, requests=tally.judged, on_time=tally.on_time, hbm=hbm,
            compute=compute, bandwidth=bandwidth,
        )  # fmt: skip

    def _used(self) -> dict[str, float]:
        """Seconds that devices spent on each model since this was asked last."""
        total: dict[str, float] = {}
        worked, self._pulse.worked = self._pulse.worked, {}
        for node in worked:
            for name, seconds in node.device.used().items():
                spent_s = seconds - node.used_s.get(name, 0.0)
                if spent_s:
                    total[name] = total.get(name, 0.0) + spent_s
                    node.used_s[name] = seconds
        return total
