"""What the cluster looked like over the run: devices held and serving, devices and replicas by model, pools.

`recorder` tells it stages and moments; the report draws it. Levels are integrated exactly between changes, in a bounded
number of bins: when a run lasts longer than they reach, two become one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from janus_server.orders import Stage

from .records import Scenario

_BINS: Final = 480
_LEAST_S: Final = 0.5
_POOLS: Final = 4
# Policies change pools every 30 s.
_ASK_POOLS_S: Final = 10.0
_HELD: Final = 0
_SERVING: Final = 1
_FIRST: Final = 2


class Timeline:
    """Levels are, in order: devices held, devices that serve, devices by model (one that holds several counts to each
    in part), replicas by model, devices by pool.

    held_s are device-seconds from since_s to the end of the trace, tail_s those after it, all_s
    those of the whole run. ask_pools tells the pool of each model,
    where the policy has any.
    """

    def __init__(self, scenario: Scenario, since_s: float = 0.0) -> None:
        self.models = tuple(spec.known.model for spec in scenario.models)
        self.pool_names: list[str] = []
        self.width_s = max(_LEAST_S, scenario.duration_s / _BINS)
        self.held_s = self.tail_s = self.all_s = 0.0
        self.most = self._held = 0
        self._since_s, self._end_s = since_s, scenario.duration_s
        self._at = {model: i for i, model in enumerate(self.models)}
        self._shards = [max(1, spec.known.shards) for spec in scenario.models]
        count = len(self.models)
        self._shares = slice(_FIRST, _FIRST + count)
        self._replicas = slice(_FIRST + count, _FIRST + 2 * count)
        self._level = np.zeros(_FIRST + 2 * count + _POOLS)
        self._integral = np.zeros((2 * _BINS, len(self._level)))
        self._peak = np.zeros((2 * _BINS, len(self._level)))
        self._nodes: dict[str, set[str]] = {}
        self._now = 0.0
        self.ask_pools: Callable[[], Mapping[str, str]] | None = None
        self._asked_s = -_ASK_POOLS_S
        self._masks: dict[str, np.ndarray] = {}

    def moment(self, now: float, held: int) -> None:
        if held != self._held:  # told twice a second, and mostly the same
            self._pass(now)
            self._held = self._level[_HELD] = held
        self.most = max(self.most, held) if now >= self._since_s else 0
        if self.ask_pools is not None and now >= self._asked_s + _ASK_POOLS_S:
            self._asked_s = now
            self._pass(now)
            self._ask(self.ask_pools())

    def stage(self, node: str, model: str, stage: Stage, now: float) -> None:
        """Replicas and shares follow from who is Active where."""
        at, holds = self._at.get(model), self._nodes.setdefault(node, set())
        active = stage is Stage.ACTIVE
        if at is None or active == (model in holds):
            return
        self._pass(now)
        self._share(holds, -1.0)
        (holds.add if active else holds.discard)(model)
        self._share(holds, 1.0)
        self._level[self._replicas.start + at] += (1.0 if active else -1.0) / self._shards[at]
        if len(holds) == (1 if active else 0):
            self._level[_SERVING] += 1.0 if active else -1.0

    def closed(self, now: float) -> None:
        self._pass(now)

    @property
    def bins(self) -> int:
        """How many have begun."""
        return min(2 * _BINS, int(self._now / self.width_s) + (self._now % self.width_s > 0.0)) or 1

    def held(self) -> np.ndarray:
        return self._mean()[:, _HELD]

    def serving(self) -> np.ndarray:
        return self._mean()[:, _SERVING]

    def shares(self) -> np.ndarray:
        """[bins, models] mean devices by model."""
        return self._mean()[:, self._shares]

    def replicas(self) -> np.ndarray:
        """[bins, models] mean replicas."""
        return self._mean()[:, self._replicas]

    def most_replicas(self) -> np.ndarray:
        """[bins, models] the most at once."""
        return self._peak[: self.bins, self._replicas]

    def pools(self) -> np.ndarray:
        """[bins, pools] mean devices that serve models of each pool."""
        first = self._replicas.stop
        return self._mean()[:, first : first + len(self.pool_names)]

    def _mean(self) -> np.ndarray:
        """[bins, levels]; the last bin may be shorter than the others."""
        spans = np.full(self.bins, self.width_s)
        spans[-1] = max(1e-9, self._now - (self.bins - 1) * self.width_s) if self._now > 0.0 else self.width_s
        mean: np.ndarray = self._integral[: self.bins] / spans[:, None]
        return mean

    def _share(self, holds: set[str], sign: float) -> None:
        for model in holds:
            self._level[_FIRST + self._at[model]] += sign / len(holds)

    def _ask(self, pools: Mapping[str, str]) -> None:
        """Who belongs to which pool now."""
        for name in sorted(set(pools.values())):
            if name not in self.pool_names and len(self.pool_names) < _POOLS:
                self.pool_names.append(name)
        self._masks = {
            name: np.array([float(pools.get(model) == name) for model in self.models]) for name in self.pool_names
        }

    def _pass(self, now: float) -> None:
        """Levels stay as they are until now."""
        if now <= self._now:
            return
        held = float(self._level[_HELD])
        self.all_s += held * (now - self._now)
        self.held_s += held * max(0.0, min(now, self._end_s) - max(self._now, self._since_s))
        self.tail_s += held * max(0.0, now - max(self._now, self._end_s))
        for k, name in enumerate(self.pool_names):
            self._level[self._replicas.stop + k] = self._masks[name] @ self._level[self._shares]
        while now > 2 * _BINS * self.width_s:
            self._halve()
        while self._now < now:
            at = min(int(self._now / self.width_s), 2 * _BINS - 1)
            until = min(now, (at + 1) * self.width_s)
            if until <= self._now:  # rounding put the end of the bin at its beginning
                at, until = min(at + 1, 2 * _BINS - 1), min(now, (at + 2) * self.width_s)
            self._integral[at] += self._level * (until - self._now)
            np.maximum(self._peak[at], self._level, out=self._peak[at])
            self._now = until

    def _halve(self) -> None:
        pairs = (_BINS, 2, len(self._level))
        integral, peak = self._integral.reshape(pairs).sum(axis=1), self._peak.reshape(pairs).max(axis=1)
        self._integral[:_BINS], self._peak[:_BINS] = integral, peak
        self._integral[_BINS:], self._peak[_BINS:] = 0.0, 0.0
        self.width_s *= 2.0
