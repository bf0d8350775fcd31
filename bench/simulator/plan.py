"""How many devices a load takes: the fewest with which a simulation keeps enough promises, and who needs the last one.

`search` doubles and then halves over runs that `attempt` makes; it knows nothing of scenarios. More devices do not
always keep more promises, so what it answers is only what it has seen: that many were enough, one less was not.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from janus_server.errors import BadConfig, require

from .columns import amount, share


class Judge(enum.Enum):
    """Which share is to reach the target: of all requests, of each hour's, or of each application's."""

    OVERALL = "overall"
    HOUR = "hour"
    APPLICATION = "application"


class Kept(NamedTuple):
    """Of one model: requests, and those whose promise was kept."""

    requests: int
    good: int


class Trial(NamedTuple):
    """A run with so many nodes. attainment is the share that is judged; why says why it could not be run at all."""

    nodes: int
    attainment: float
    models: Mapping[str, Kept]
    device_hours: float = 0.0
    why: str = ""


class Marginal(NamedTuple):
    """The model that loses the most with one node less, and its attainment with the answer and below it."""

    model: str
    attainment: float
    below: float


class Plan(NamedTuple):
    """enough is the trial of the answer, below the one with a node less: None where the answer is a single node.

    odd are trials that were larger than the answer and yet not enough.
    """

    target: float
    enough: Trial
    below: Trial | None
    marginal: Marginal | None
    trials: tuple[Trial, ...]
    odd: tuple[Trial, ...]


def search(attempt: Callable[[int], Trial], target: float, *, first: int = 1, most: int = 4096) -> Plan:
    """attempt(nodes) runs; it is asked about each number once. BadConfig where not even `most` are enough."""
    if not 0.0 < target <= 1.0:
        raise BadConfig(f"the target is a share of requests, above 0 and at most 1, not {target:g}")
    if not 1 <= first <= most:
        raise BadConfig(f"the search goes from at least 1 node to at most {most}: it cannot begin with {first}")
    trials: dict[int, Trial] = {}

    def enough(nodes: int) -> bool:
        if nodes not in trials:
            trials[nodes] = attempt(nodes)
        return trials[nodes].attainment >= target

    low, high = 0, first
    while not enough(high):
        if high == most or _flat(trials):
            raise BadConfig(_never(trials, high, target))
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    require(enough(high) and (high == 1 or not enough(high - 1)), "a search ended beside its answer")
    answer, below = trials[high], trials.get(high - 1)
    tried = tuple(trials[nodes] for nodes in sorted(trials))
    odd = tuple(t for t in tried if t.nodes > high and t.attainment < target)
    return Plan(target, answer, below, below and marginal(answer, below), tried, odd)


def _flat(trials: Mapping[int, Trial]) -> bool:
    """Three doublings in a row that brought nothing: what is missing is not devices."""
    last = [trials[nodes].attainment for nodes in sorted(trials)][-4:]
    return len(last) == 4 and 0.0 < max(last) <= last[0] + 5e-4


def marginal(answer: Trial, below: Trial) -> Marginal | None:
    """The one of which the most requests lose their promise; None where the smaller cluster could not be run."""
    losses = []
    for model, kept in answer.models.items():
        less = below.models.get(model)
        if less is not None and kept.requests and less.requests:
            before, after = kept.good / kept.requests, less.good / less.requests
            losses.append(((after - before) * kept.requests, model, Marginal(model, before, after)))
    worst = min(losses, default=None, key=lambda loss: loss[:2])
    return worst[2] if worst is not None and worst[0] < 0 else None


def trial_of(nodes: int, summary: Mapping[str, Any], judge: Judge = Judge.OVERALL) -> Trial:
    """A summary as the search sees it. A run without requests keeps every promise."""
    kept = judged(summary, judge)
    models = {model: Kept(own["requests"], own["good"]) for model, own in summary["models"].items()}
    return Trial(nodes, 1.0 if kept is None else kept, models, summary["devices"]["device_hours"])


def judged(summary: Mapping[str, Any], judge: Judge) -> float | None:
    """The share that counts. Applications with few requests count together: one of theirs is a large share."""
    overall: float | None = summary["attainment"]["of_all"]["overall"]
    match judge:
        case Judge.OVERALL:
            return overall
        case Judge.HOUR:
            hour: float | None = summary["worst_hour"]["overall"]
            return hour
        case Judge.APPLICATION:
            few = summary["tail"]["fewer_than"]
            shares = [a["attainment"]["of_all"]["overall"] for a in summary["applications"] if a["requests"] >= few]
            shares.append(summary["tail"]["attainment"]["of_all"]["overall"])
            return min((s for s in shares if s is not None), default=None)


def worst(trials: list[Trial]) -> Trial:
    """Of several runs with the same nodes and other seeds, the one that keeps the fewest promises."""
    return min(trials, key=lambda trial: trial.attainment)


def sentences(plan: Plan) -> list[str]:
    """The answer, and how sure it is."""
    nodes = plan.enough.nodes
    lines = [f"{nodes} device{'s' if nodes > 1 else ''}: {share(plan.enough.attainment)} of promises kept, "
             f"{share(plan.target)} wanted; {amount(plan.enough.device_hours)} device-hours held"]  # fmt: skip
    if plan.below is None:
        lines.append("fewer there are none")
    elif plan.below.why:
        lines.append(f"with {plan.below.nodes} it cannot run: {plan.below.why}")
    else:
        lines.append(f"with {plan.below.nodes}: {share(plan.below.attainment)}")
    if plan.marginal is not None:
        m = plan.marginal
        lines.append(f"the last device is there for {m.model}: without it {share(m.below)} of its promises are kept, "
                     f"with it {share(m.attainment)}")  # fmt: skip
    for trial in plan.odd:
        lines.append(f"! {trial.nodes} devices were not enough ({share(trial.attainment)}), though {nodes} were")
    return lines


def _never(trials: Mapping[int, Trial], most: int, target: float) -> str:
    last = trials[most]
    if last.why:
        return f"not even {most} nodes can run this: {last.why}"
    shares = {m: k.good / k.requests for m, k in last.models.items() if k.requests}
    least = min(shares, default=None, key=lambda m: (shares[m], m))
    what = "" if least is None else f"; the worst model is {least} with {math.floor(shares[least] * 1000) / 10:.1f} %"
    kept = f"not even {most} nodes keep {share(target)} of promises, only {share(last.attainment)}{what}"
    return f"{kept}; a lower --target may be to be had"
