"""One run of a scenario on live paced nodes, and the same on the simulator's: what became of each request, replicas.

`live` starts the nodes, sends the scenario's requests to all of them in turn through the load client of `bench serve`,
and reads the leader's journal afterwards. `twin` makes the simulator's cluster of what those nodes told their leader
(pages, models, settings), so that both differ in nothing but what is real. `live` (the command) compares them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from janus_server.orders import Action, Event, Observed, Order, Stage
from janus_server.sched.oracle_records import Subject
from janus_server.sched.state import BrainSettings

from .live_cluster import SEQUENCES, STEP_TOKENS, Busy, LiveCluster
from .live_told import Moved, Ordered, Told, told
from .load import LoadRun
from .records import Application, Drawn, Plan, Segment, Slo
from .records import Outcome as Answer
from .serve import loop_factory
from .simulator import policies
from .simulator.attempts import device_of
from .simulator.batching import Rules
from .simulator.records import AppSpec, Call, NodeSpec, Outcome, Policy, Scenario
from .simulator.run import run
from .target import Caller, make_target
from .wording import IdWording

_EVERY_S: Final = 1.0
_LIMIT_S: Final = 120.0
# What such a model says is noise: one letter again and again is an event a token, as with a real one.
_LETTER: Final[dict[str, object]] = {"logit_bias": {"67": 100}}


class Answered(NamedTuple):
    """One request: at_s since the trace began; ttft_s None where no token came; why it failed, "" where it did not."""

    app: int
    at_s: float
    ttft_s: float | None
    tpot_s: float
    why: str = ""


class Ran(NamedTuple):
    """Times are since the trace began. busy: of this machine's processors, by ours and by all, one a second."""

    name: str
    answers: tuple[Answered, ...]
    moved: tuple[Moved, ...]
    ordered: tuple[Ordered, ...]
    busy: tuple[Busy, ...] = ()
    notes: tuple[str, ...] = ()
    told: Told | None = None
    begins_s: float = 0.0


def on_time(one: Answered, app: AppSpec) -> bool:
    return not one.why and one.ttft_s is not None and one.ttft_s <= app.ttft_s and one.tpot_s <= app.tpot_s


def live(asked: Scenario, brain: BrainSettings, name: str, folder: Path | None = None) -> Ran:
    """folder keeps the journals and what the nodes said."""
    with LiveCluster(asked, brain, folder) as cluster:
        began_s, outcomes, busy = _send(asked, cluster)
    found = told(cluster.journals())
    answers = [_answered(number, one, asked) for number, one in outcomes]
    return Ran(
        name, tuple(sorted(answers, key=lambda one: one.at_s)),
        tuple(one._replace(at_s=one.at_s - began_s) for one in found.moved),
        tuple(one._replace(at_s=one.at_s - began_s, end_s=None if one.end_s is None else one.end_s - began_s)
              for one in found.ordered),
        tuple(one._replace(at_s=one.at_s - began_s) for one in busy), tuple(cluster.paced()), found,
        began_s - found.joined_s,
    )  # fmt: skip


def twin(asked: Scenario, of: Ran, name: str = "", policy: str = "janus") -> Ran:
    """The simulator's cluster in the place of the live one."""
    if of.told is None:
        return of
    scenario, settings = as_told(asked, of.told, of.begins_s), of.told.settings
    kept, rules = _Kept(of.begins_s), Rules(step_tokens=STEP_TOKENS, sequences=SEQUENCES)
    lessons = [(at_s - of.told.joined_s, subjects) for at_s, subjects in of.told.lessons]
    run(
        scenario,
        lambda: _Schooled(policies.make(policy, scenario, settings), lessons),
        device_of(scenario, "step", rules),
        kept,
        rules,
    )
    answers = sorted(kept.answers, key=lambda one: one.at_s)
    return Ran(name or f"{of.name}, simulated", tuple(answers), tuple(kept.moved), tuple(kept.ordered.values()))


def as_told(asked: Scenario, found: Told, begins_s: float) -> Scenario:
    """With the nodes and models as live ones presented themselves; the trace begins begins_s after that."""
    like = asked.nodes[0]
    nodes = tuple(
        NodeSpec(name=one.node, host=one.host or one.node, domain=one.domain or one.host or "live", shape=like.shape,
                 pool_pages=one.pool_pages, page_bytes=like.page_bytes, host_bytes=one.host_bytes)
        for one in found.joined
    )  # fmt: skip
    known = {one.model: one for one in found.joined[0].models}
    models = tuple(msgspec.structs.replace(spec, known=known[spec.known.model]) for spec in asked.models)
    first_s = min((call.at_s for call in asked.calls), default=0.0)
    calls = [call._replace(at_s=call.at_s - first_s + begins_s) for call in asked.calls]
    return msgspec.structs.replace(
        asked, nodes=nodes, models=models, calls=calls, duration_s=asked.duration_s - first_s + begins_s, since_s=0.0,
        bursts_s=(), copies={},
    )  # fmt: skip


def _send(asked: Scenario, cluster: LiveCluster) -> tuple[float, list[tuple[int, Answer]], list[Busy]]:
    """All requests, to the nodes in turn."""
    apps = [Application(app.name, app.name, Slo(app.ttft_s, app.tpot_s)) for app in asked.apps]
    calls = list(asked.calls)
    first_s = min((call.at_s for call in calls), default=0.0)
    loads = []
    for number, url in enumerate(cluster.urls):
        plans = [_plan(call, first_s, apps) for call in calls[number :: len(cluster.urls)]]
        caller = Caller(make_target(url, "completions", (), None, insecure=False), IdWording(16, 250, asked.seed),
                        sampling={"temperature": 0}, ignore_eos=True, running_usage=False, extra_body=_LETTER,
                        id_prefix=f"live{number}-")  # fmt: skip
        loads.append(
            LoadRun(make_target(url, "completions", (), None, insecure=False), caller, plans, timeout_s=_LIMIT_S)
        )
    busy: list[Busy] = []

    async def go() -> float:
        began_s = time.monotonic()
        watching = asyncio.ensure_future(_watch(cluster, busy))
        await asyncio.gather(*(load.run() for load in loads))
        watching.cancel()
        return began_s

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        began_s = runner.run(go())
    return began_s, [(number, one) for number, load in enumerate(loads) for one in load.outcomes], busy


async def _watch(cluster: LiveCluster, busy: list[Busy]) -> None:
    while True:
        busy.append(cluster.busy())
        await asyncio.sleep(_EVERY_S)


def _plan(call: Call, first_s: float, apps: Sequence[Application]) -> Plan:
    return Plan(call.at_s - first_s, apps[call.app], Drawn((Segment(call.id, call.input_tokens),)), call.output_tokens)


def _answered(number: int, one: Answer, asked: Scenario) -> Answered:
    names = {app.name: index for index, app in enumerate(asked.apps)}
    return Answered(names[one.plan.app.name], one.plan.due_s, one.ttft_s, one.tpot_s or 0.0, one.failure or "")


class _Schooled:
    """A policy that is told how models run when the live one was, and not before anything ran."""

    def __init__(self, policy: Policy, lessons: Sequence[tuple[float, dict[str, Subject]]]) -> None:
        self._policy, self._lessons = policy, list(lessons)

    def on(self, event: Event, now: float) -> list[Action]:
        actions: list[Action] = []
        while self._lessons and self._lessons[0][0] <= now:
            actions += self._policy.on(Observed({}, self._lessons.pop(0)[1]), now)
        if isinstance(event, Observed):
            event = Observed(event.models)
        return actions + self._policy.on(event, now)

    def next_wake(self, now: float) -> float | None:
        return self._policy.next_wake(now)


class _Kept:
    """A Recorder of everything, with times since the trace began."""

    def __init__(self, begins_s: float) -> None:
        self._begins_s = begins_s
        self.answers: list[Answered] = []
        self.moved: list[Moved] = []
        self.ordered: dict[tuple[str, str, int], Ordered] = {}
        self._open: dict[tuple[str, str], tuple[str, str, int]] = {}

    def outcome(self, outcome: Outcome) -> None:
        call = outcome.call
        self.answers.append(Answered(call.app, call.at_s - self._begins_s, outcome.ttft_s, outcome.tpot_s, outcome.why))

    def decision(self, action: Action, now: float) -> None: ...

    def began(self, order: Order, now: float, takes_s: float) -> None:
        key = order.node, order.model, order.id
        self._open[order.node, order.model] = key
        self.ordered[key] = Ordered(now - self._begins_s, None, order.node, order.model, order.verb.value, order.why)

    def stage(self, node: str, model: str, stage: Stage, now: float) -> None:
        self.moved.append(Moved(now - self._begins_s, node, model, stage))
        key = self._open.pop((node, model), None)
        if key is not None:
            self.ordered[key] = self.ordered[key]._replace(end_s=now - self._begins_s)

    def moment(self, now: float, active: Sequence[str]) -> None: ...

    def closed(self, now: float) -> None: ...


def replicas(moved: Sequence[Moved], model: str, times_s: Sequence[float]) -> list[int]:
    """How many nodes have it Active at each of these times, which rise."""
    active: set[str] = set()
    mine = [one for one in moved if one.model == model]
    counts, at = [], 0
    for now in times_s:
        while at < len(mine) and mine[at].at_s <= now:
            active = active | {mine[at].node} if mine[at].stage is Stage.ACTIVE else active - {mine[at].node}
            at += 1
        counts.append(len(active))
    return counts


def attainment(answers: Sequence[Answered], apps: Sequence[AppSpec], since_s: float) -> Mapping[str, float]:
    """By application and "all", of the requests from since_s on."""
    kept = [one for one in answers if one.at_s >= since_s]
    good = [(one.app, on_time(one, apps[one.app])) for one in kept]
    found = {"all": _share([ok for _, ok in good])}
    for index, app in enumerate(apps):
        found[app.name] = _share([ok for number, ok in good if number == index])
    return found


def _share(good: Sequence[bool]) -> float:
    return sum(good) / len(good) if good else 1.0
