"""The story of one request: its scenario runs again until the request has ended, and what concerned it is told.

A run is the same each time, so nothing of it need have been kept. The recorder here keeps the requests that wait or run
at the moment, and the decisions about one model; both are bounded by what is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from janus_server.errors import BadConfig
from janus_server.orders import Action, Answer, Decided, Dispatch, Order, Refit, Refuse, Stage

from .batching import Rules
from .columns import seconds
from .decisions import Sentence, sentence
from .records import AppSpec, Call, Device, NodeSpec, Outcome, Policy, Scenario
from .run import run

_DECISIONS: Final = 40
_NAMED: Final = 5


class Begun(NamedTuple):
    """A dispatch of the request, when, and who was ahead of it: on the node, and begun since it came."""

    at_s: float
    node: str
    why: str
    running: int
    running_of_model: int
    passed: tuple[int, ...]
    overtook: int


class Told(Exception):
    """The request has ended: nothing more of the run is needed."""


def explain(
    scenario: Scenario,
    policy: Callable[[], Policy],
    device: Callable[[NodeSpec], Device],
    request: int,
    rules: Rules = Rules(),  # noqa: B008 - frozen
) -> list[str]:
    """Sentences, in order of time. BadConfig where the trace has no such request."""
    witness = Witness(scenario, request)
    try:
        run(scenario, policy, device, witness, rules)
    except Told:
        pass
    return story(witness)


class Witness:
    """A Recorder for one request. waiting are ids of its model's requests that came and were not begun."""

    def __init__(self, scenario: Scenario, request: int) -> None:
        self.scenario, self.request = scenario, request
        self.call = _find(scenario, request)
        self.app: AppSpec = scenario.apps[self.call.app]
        self.ahead: tuple[int, ...] = ()
        self.active_then: tuple[str, ...] = ()
        self.decided: list[Sentence] = []
        self.more = 0
        self.begun: list[Begun] = []
        self.stages: list[tuple[float, str, Stage]] = []
        self.outcome_: Outcome | None = None
        self._calls: Iterator[Call] = iter(scenario.calls)
        self._next: Call | None = next(self._calls, None)
        self._waiting: dict[int, float] = {}
        self._running: dict[int, tuple[str, str]] = {}
        self._active: dict[str, None] = {}
        self._passed: list[int] = []
        self._overtook = 0
        self._arrived = False

    def outcome(self, outcome: Outcome) -> None:
        self._pass(outcome.ended_s)
        self._waiting.pop(outcome.call.id, None)
        self._running.pop(outcome.call.id, None)
        if outcome.call.id == self.request:
            self.outcome_ = outcome
            raise Told

    def decision(self, action: Action, now: float) -> None:
        self._pass(now)
        if isinstance(action, Dispatch):
            self._dispatch(action, now)
        elif self._arrived and self._concerns(action):
            if len(self.decided) < _DECISIONS:
                self.decided.append(sentence(action, now))
            else:
                self.more += 1

    def began(self, order: Order, now: float, takes_s: float) -> None:
        """The decision has been told already."""

    def stage(self, node: str, model: str, stage: Stage, now: float) -> None:
        if model != self.app.model:
            return
        self._pass(now)
        if stage is Stage.ACTIVE:
            self._active[node] = None
        else:
            self._active.pop(node, None)
        if self._arrived and len(self.stages) < _DECISIONS:
            self.stages.append((now, node, stage))

    def moment(self, now: float, active: Sequence[str]) -> None:
        self._pass(now)

    def closed(self, now: float) -> None:
        """Its outcome has come, or never will."""

    def _pass(self, now: float) -> None:
        """Who came up to now."""
        while self._next is not None and self._next.at_s <= now:
            call = self._next
            if call.id == self.request:
                self._arrived = True
                self.ahead = tuple(self._waiting)
                self.active_then = tuple(sorted(self._active))
            if self.scenario.apps[call.app].model == self.app.model:
                self._waiting[call.id] = call.at_s
            self._next = next(self._calls, None)

    def _dispatch(self, action: Dispatch, now: float) -> None:
        for word in action.requests:
            id = int(word)
            if id == self.request:
                running = list(self._running.values())
                here = [model for node, model in running if node == action.node]
                self.begun.append(Begun(now, action.node, action.why, len(here), here.count(self.app.model),
                                        tuple(self._passed), self._overtook))  # fmt: skip
                self._passed, self._overtook = [], 0
            elif self._arrived and not self.begun and id in self._waiting:
                if len(self._passed) < 1000:
                    self._passed.append(id)
                self._overtook += self._waiting[id] > self.call.at_s
            own = self._waiting.pop(id, None) is not None
            self._running[id] = (action.node, self.app.model if own else "")

    def _concerns(self, action: Action) -> bool:
        match action:
            case Order() | Refuse() | Answer() | Refit():
                return action.model == self.app.model
            case Decided():
                return action.subject == self.app.model
            case Dispatch():
                return False


def story(witness: Witness) -> list[str]:
    """What a witness saw, in sentences."""
    call, app = witness.call, witness.app
    lines = [
        f"Request {call.id} of {app.name} came at {_at(call.at_s)} for {app.model}, with a prompt of "
        f"{call.input_tokens:,} tokens; its answer has {call.output_tokens:,}.",
        f"It was promised its first token within {seconds(app.ttft_s)} and {seconds(app.tpot_s)} a token after that"
        + (f", at priority {app.priority}." if app.priority else "."),
        f"{app.model} was Active on {_some(witness.active_then, 'device')} then; {_queue(witness.ahead)}",
    ]
    events = [(s.at_s, 0, _decision(s)) for s in witness.decided]
    events += [(at_s, 1, f"{app.model} was {stage.value} on {node}.") for at_s, node, stage in witness.stages]
    events += [(b.at_s, 2, _begun(witness, i)) for i, b in enumerate(witness.begun)]
    ended = witness.outcome_
    if ended is not None and ended.ttft_s is not None:
        events.append((call.at_s + ended.ttft_s, 3, _first_token(ended, app)))
    end_s = float("inf") if ended is None else ended.ended_s
    lines += [f"{_at(at_s)}: {text}" for at_s, _, text in sorted(events, key=lambda e: e[:2]) if at_s <= end_s]
    if witness.more:
        lines.append(f"{witness.more:,} more decisions about {app.model} were made meanwhile.")
    lines.append("The run ended without a word of it." if ended is None else _end(ended, app))
    return lines


def _decision(said: Sentence) -> str:
    if not said.node:
        return f"{said.kind}: {said.why}"
    return f"decided to {said.kind} {said.model} on {said.node}: {said.why}"


def _begun(witness: Witness, which: int) -> str:
    b = witness.begun[which]
    waited_s = b.at_s - witness.call.at_s
    again = "begun" if not which else "begun anew"
    text = f"{again} on {b.node} after {seconds(waited_s)}: {b.why}"
    if b.passed:
        text += f"; {len(b.passed):,} of its model's requests were begun before it meanwhile"
        text += f", {b.overtook:,} of which had come later" if b.overtook else ""
    others = b.running - b.running_of_model
    text += f"; {b.running_of_model:,} of its model ran there already" + (
        f", and {others:,} of others" if others else ""
    )
    return text + "."


def _first_token(ended: Outcome, app: AppSpec) -> str:
    ttft_s = ended.ttft_s or 0.0
    spare_s = app.ttft_s - ttft_s
    how = f"{seconds(spare_s)} to spare" if spare_s >= 0 else f"{seconds(-spare_s)} late"
    return f"its first token, after {seconds(ttft_s)}: {how}."


def _end(ended: Outcome, app: AppSpec) -> str:
    if ended.why:
        had = "all its tokens" if ended.ttft_s is not None else "a token"
        return f"{_at(ended.ended_s)}: it ended without {had}: {ended.why}."
    text = f"{_at(ended.ended_s)}: it ended"
    if ended.call.output_tokens > 1:
        spare_s = app.tpot_s - ended.tpot_s
        text += f", with {seconds(ended.tpot_s)} a token: " + (
            "in time" if spare_s >= 0 else f"{seconds(-spare_s)} too long"
        )
    kept = ended.ttft_s is not None and ended.ttft_s <= app.ttft_s and ended.tpot_s <= app.tpot_s
    return f"{text}. Its promise was {'kept' if kept else 'broken'}."


def _queue(ahead: Sequence[int]) -> str:
    if not ahead:
        return "nobody else waited for it."
    named = ", ".join(str(id) for id in ahead[:_NAMED])
    more = f" and {len(ahead) - _NAMED:,} more" if len(ahead) > _NAMED else ""
    return f"{len(ahead):,} of its requests waited already: {named}{more}."


def _some(names: Sequence[str], what: str) -> str:
    if not names:
        return f"no {what}"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''} ({', '.join(names[:_NAMED])}{more})"


def _at(at_s: float) -> str:
    minutes, rest_s = divmod(at_s, 60.0)
    return f"{int(minutes) // 60:02d}:{int(minutes) % 60:02d}:{rest_s:06.3f}"


def _find(scenario: Scenario, request: int) -> Call:
    last = None
    for call in scenario.calls:
        if call.id == request:
            return call
        last = call.id
    known = "it has no request at all" if last is None else f"the last one is {last}"
    raise BadConfig(f"scenario {scenario.name} has no request {request}: {known}")
