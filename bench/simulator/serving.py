"""The requests of a run: they come, wait, are begun where the policy says, and end once each, whatever happens.

`world` hands it arrivals and the policy's dispatches, devices' tokens come through `emitted`; it gathers what the
policy is to be told, like the live server's front desk, and tells the recorder how each request ended. It decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from janus_server.errors import require
from janus_server.orders import Dispatch, Refuse, Ticket, Traffic, Unwanted, Wanted

from .agenda import Agenda, Pulse
from .cluster import Node
from .counting import Tally
from .records import AppSpec, Call, Emit, Outcome, Scenario

# A live server lets a request wait for its model for so long.
PATIENCE_S: Final = 120.0
_TIRED: Final = f"its model was not there for {PATIENCE_S:.0f} s"


class Live:
    """A request that has not ended. node is who has begun it, None while it waits."""

    __slots__ = ("app", "call", "first_s", "model", "node", "ticket")

    def __init__(self, call: Call, app: AppSpec, model: Served) -> None:
        self.call, self.app, self.model = call, app, model
        self.node: Node | None = None
        self.first_s: float | None = None
        self.ticket: Ticket | None = None


class Served:
    """One model: who waits for it, how many replicas take its requests, since when there are none."""

    __slots__ = ("closed_s", "ever", "name", "replicas", "tally", "waiting", "wanted")

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: dict[int, Live] = {}
        self.replicas = 0
        self.closed_s = 0.0
        self.wanted = self.ever = False
        self.tally = Tally()


class Desk:
    """work_s(model, tokens) predicts what a prompt takes, longest_tokens(model) is what a device can hold of one
    request; ended(outcome) is told once of each call."""

    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        work_s: Callable[[str, int], float],
        longest_tokens: Callable[[str], int],
        ended: Callable[[Outcome], None],
    ) -> None:
        self._agenda, self._work_s, self._ended = agenda, work_s, ended
        self.models: Mapping[str, Served] = {spec.known.model: Served(spec.known.model) for spec in scenario.models}
        self._apps = [(app, self.models[app.model], longest_tokens(app.model)) for app in scenario.apps]
        self._live: dict[int, Live] = {}
        self._looked: dict[str, Served] = {}  # models of which it may have changed whether they are wanted
        self._arrived: list[Ticket] = []
        self._again: list[Ticket] = []
        self._started: list[str] = []
        self._left: list[str] = []
        self.came = 0

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def urgent(self) -> bool:
        """Somebody came, or is wanted: the policy is to be told now."""
        return bool(self._arrived or self._again or self._looked)

    @property
    def news(self) -> bool:
        return bool(self._started or self._left)

    def arrive(self, call: Call) -> None:
        app, model, longest_tokens = self._apps[call.app]
        require(call.id not in self._live, f"two requests have the id {call.id}")
        live = self._live[call.id] = Live(call, app, model)
        self.came += 1
        if call.input_tokens + call.output_tokens > longest_tokens:
            del self._live[call.id]
            why = f"refused: with its answer it is longer than the {longest_tokens} tokens that a device can hold"
            self._ended(Outcome(call, None, 0.0, call.at_s, "", why))
            return
        model.tally.arrived(call.input_tokens)
        live.ticket = Ticket(
            id=str(call.id), model=model.name, prompt_tokens=call.input_tokens,
            work_s=self._work_s(model.name, call.input_tokens), arrived_s=call.at_s, ttft_s=app.ttft_s,
            priority=app.priority,
        )  # fmt: skip
        model.waiting[call.id] = live
        self._arrived.append(live.ticket)
        if not model.replicas:
            self._looked[model.name] = model

    def begin(self, dispatch: Dispatch, node: Node, pulse: Pulse) -> None:
        """Those that still wait begin there; others have left, or were begun before."""
        calls: dict[str, list[Call]] = {}
        for request in dispatch.requests:
            live = self._live.get(int(request))
            if live is None or live.node is not None:
                continue
            name, held = live.model.name, node.held.get(live.model.name)
            taken = held is not None and held.replica is not None and held.replica.open and held.replica.head is node
            require(
                taken, f"request {request} is begun on {node.spec.name}, which does not take {name}: {dispatch.why}"
            )
            del live.model.waiting[live.call.id]
            live.node = node
            calls.setdefault(name, []).append(live.call)
        for name, begun in calls.items():
            pulse.begin(node, begun, name)

    def refuse(self, refuse: Refuse) -> None:
        """Who waits for a model that nobody serves is sent away."""
        model = self.models[refuse.model]
        if not model.replicas:
            for live in list(model.waiting.values()):
                self._end(live, f"refused: {refuse.why}")
            model.wanted = False  # who comes after them wants it anew

    def emitted(self, node: Node, emits: Sequence[Emit]) -> None:
        for call, at_s, is_last in emits:
            live = self._live[call]
            if live.first_s is None:
                live.first_s = at_s
                self._started.append(str(call))
                live.model.tally.began(at_s)
            if is_last:
                node.running[live.model.name] -= 1
                self._end(live, "", at_s)

    def opened(self, name: str, by: int) -> None:
        """More replicas of a model take requests, or fewer."""
        model = self.models[name]
        model.replicas += by
        model.ever = model.ever or by > 0
        if not model.replicas:
            model.closed_s = self._agenda.now
        self._looked[name] = model

    def lost(self, node: Node, calls: Sequence[int]) -> None:
        """A device is gone with what it had begun: who has seen a token is cut off, the others are asked for again."""
        for call in calls:
            live = self._live[call]
            if live.first_s is not None:
                self._end(live, f"cut: {node.spec.name} lost it")
                continue
            live.node = None
            live.model.waiting[call] = live
            self._left.append(str(call))
            if live.ticket is not None:
                self._again.append(live.ticket)
            self._looked[live.model.name] = live.model

    def take(self) -> list[Traffic]:
        """What happened since it was last taken."""
        told = []
        if self._arrived or self._started or self._left:
            told.append(Traffic(tuple(self._arrived), tuple(self._started), tuple(self._left)))
            self._arrived, self._started, self._left = [], [], []
        if self._again:
            told.append(Traffic(tuple(self._again)))
            self._again = []
        return told

    def wishes(self) -> list[Wanted | Unwanted]:
        """Which models somebody waits for now that nobody serves, or that nobody waits for any more."""
        news: list[Wanted | Unwanted] = []
        for model in self._looked.values():
            wanted = bool(model.waiting) and not model.replicas
            if wanted != model.wanted:
                model.wanted = wanted
                news.append(Wanted(model.name) if wanted else Unwanted(model.name))
        self._looked = {}
        return news

    def tire(self) -> None:
        """Who has waited too long for a model that nobody serves is sent away."""
        now = self._agenda.now
        for model in self.models.values():
            while model.waiting and not model.replicas:
                live = next(iter(model.waiting.values()))
                if max(live.call.at_s, model.closed_s) + PATIENCE_S > now:
                    break
                self._end(live, f"refused: {_TIRED}")

    def forget(self) -> None:
        """Another policy leads: it is told of everybody who waits."""
        self._arrived, self._started, self._left = [], [], []
        self._again = [live.ticket for model in self.models.values() for live in model.waiting.values() if live.ticket]
        for model in self.models.values():
            model.wanted = False
            self._looked[model.name] = model

    def close(self) -> list[str]:
        """The run is over; returns the models that requests came for and nobody ever served."""
        for live in list(self._live.values()):
            self._end(live, "unfinished at the end of the run")
        return [name for name, model in self.models.items() if model.tally.input_tokens and not model.ever]

    def _end(self, live: Live, why: str, at_s: float | None = None) -> None:
        call, model = live.call, live.model
        del self._live[call.id]
        ended_s = self._agenda.now if at_s is None else at_s
        ttft_s = None if live.first_s is None else live.first_s - call.at_s
        tpot_s = 0.0
        if live.first_s is not None and at_s is not None and call.output_tokens > 1:
            tpot_s = (at_s - live.first_s) / (call.output_tokens - 1)
        if live.node is None:
            del model.waiting[call.id]
            self._looked[model.name] = model
        if live.first_s is not None:
            model.tally.left(live.first_s)
        if at_s is not None and ttft_s is not None:
            on_time = ttft_s <= live.app.ttft_s and tpot_s <= live.app.tpot_s
            model.tally.ended(call.output_tokens, tpot_s, on_time)
        self._left.append(str(call.id))
        self._ended(Outcome(call, ttft_s, tpot_s, ended_s, "" if live.node is None else live.node.spec.name, why))
