"""What a run leaves behind: requests counted, the cluster over time, decisions and their sentences, in bounded memory.

The world tells a `Record` everything in order of time; `summary` and the reports read it when the run is over. An
outcome costs a place in a list and, once in some thousands, a batch of array work: the speed of a day depends on it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from janus_server.errors import BadConfig
from janus_server.orders import Action, Order, Stage
from janus_server.sched.brain import Brain

from .decisions import Decisions
from .records import Outcome, Policy, Scenario
from .tallies import Tallies
from .timeline import Timeline

_BATCH: Final = 4096


class Record:
    """A Recorder. What came before since_s is not counted, so that a cluster that starts with nothing need not be
    judged by that; pictures show it. closed_s is None while the run goes on; used_s are seconds that devices spent on
    each model's steps, empty where nobody told; took_s is what the run took of ours."""

    def __init__(self, scenario: Scenario, since_s: float = 0.0) -> None:
        if not 0.0 <= since_s < max(scenario.duration_s, 1e-9):
            raise BadConfig(
                f"scenario {scenario.name} lasts {scenario.duration_s:g} s: nothing comes from {since_s:g} s on"
            )
        self.scenario, self.since_s = scenario, since_s
        self.tallies = Tallies(scenario, since_s)
        self.timeline = Timeline(scenario, since_s)
        self.decisions = Decisions(scenario.duration_s)
        self.closed_s: float | None = None
        self.took_s = 0.0
        self.used_s: Mapping[str, float] = {}
        self.notes: list[str] = []
        self._batch: list[Outcome] = []
        self._began_s = time.perf_counter()

    def outcome(self, outcome: Outcome) -> None:
        batch = self._batch
        batch.append(outcome)
        if len(batch) >= _BATCH:
            self.settle()

    def decision(self, action: Action, now: float) -> None:
        self.decisions.add(action, now)

    def began(self, order: Order, now: float, takes_s: float) -> None:
        self.decisions.began(order, takes_s)

    def stage(self, node: str, model: str, stage: Stage, now: float) -> None:
        self.timeline.stage(node, model, stage, now)

    def moment(self, now: float, active: Sequence[str]) -> None:
        self.timeline.moment(now, len(active))

    def closed(self, now: float) -> None:
        self.settle()
        self.timeline.closed(now)
        self.closed_s, self.took_s = now, time.perf_counter() - self._began_s

    def follow(self, make: Callable[[], Policy]) -> Callable[[], Policy]:
        """A maker of policies whose pools the timeline shows, where a policy has any: of the last one that it made."""

        def made() -> Policy:
            policy = make()
            self.timeline.ask_pools = functools.partial(_pools, policy)
            return policy

        return made

    def worked(self, used_s: Mapping[str, float]) -> None:
        """Seconds of steps by model, over all devices: what utilisation is computed from."""
        self.used_s = dict(used_s)

    def note(self, line: str) -> None:
        """Something that the report must say."""
        self.notes.append(line)

    def settle(self) -> None:
        """Count what was put aside; before a look at the tallies of a run under way."""
        self.tallies.add(self._batch)
        self._batch = []


def _pools(policy: Policy) -> Mapping[str, str]:
    """The pool of each model; empty where the policy knows no pools."""
    if not isinstance(policy, Brain):
        return {}
    return {model: pool.value for model, pool in policy.pools().items()}
