"""Which co-resident model runs the next step, and how much of its prompts: least slack first. Pure.

The device thread asks before each step and tells what the step took. A sequence's slack is the time until its next
token is due, less what the model is predicted to need for it; a model's is the least of its sequences. What can no
longer be on time is served in the time that the others can spare, so that one late request does not make all late. A
step that would take longer than the others can wait is cut short, in milliseconds, not tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from janus_server.sched.batcher import Batcher
from janus_server.sched.cost import StepCost, shape_of
from janus_server.sched.outlook import SURE, Outlook, Stand, look, stand, tokens_within
from janus_server.types import Batch

# A model that has work and was passed over so often goes first, whatever the others' slack is.
PATIENCE: Final = 12
_LATE_EVERY: Final = 4
# While a model is alone nobody asks what its steps take: only so many, and then one in so many, are learnt from.
LEARN_FIRST: Final = 64
LEARN_EVERY: Final = 16


class Choice(msgspec.Struct, frozen=True):
    """A model that may run the next step, and how many tokens of prompts at most (None: as many as it likes)."""

    model: str
    prompt_tokens: int | None


class _Candidate(msgspec.Struct, frozen=True):
    model: str
    outlook: Outlook
    stand: Stand
    passed: int

    @property
    def blocked(self) -> bool:
        """Nothing of it runs and the head of its queue found no place: only a try tells whether there is room now."""
        return self.stand.lost is None and not self.stand.slack_s


class Turn:
    """Orders the models that have work, before each step.

    1. A model that was passed over PATIENCE times goes first: with m models at work, whichever can run does so at least
       once in PATIENCE + m - 1 steps.
    2. Then one that the others can spare a step: of those with prompts and some sequence that can be on time the one
       with the least slack, else one whose sequences are all late, higher priority first, then who was passed over
       more often; every fifth step that goes first. A stream gains nothing from tokens before they are due.
    3. Then the least slack first, among those with a sequence that can be on time; but not before a model of a higher
       priority that would be late for having waited for that step. The late ones come last.

    Example: a has a token due in 30 ms and steps of 10 ms, b a token due in 25 ms and steps of 1 ms: a goes first, its
    slack is 20 ms and b's is 24. Prompts that a has beside it are computed for at most 24 ms less a reserve.
    """

    def __init__(self) -> None:
        self._costs: dict[str, StepCost] = {}
        self._outlooks: dict[str, Outlook] = {}
        self._passed: dict[str, int] = {}
        self._at_work: tuple[str, ...] = ()
        self._steps = 0

    def join(self, model: str, weight_bytes: int = 0) -> None:
        """A model takes its turns from now on. What was learnt of its steps before it left is still known."""
        self._costs.setdefault(model, StepCost(weight_bytes))

    def cost(self, model: str) -> StepCost:
        """What is known of its steps."""
        return self._costs[model]

    def leave(self, model: str) -> None:
        self._outlooks.pop(model, None)

    def choices(self, now: float, at_work: Sequence[tuple[str, Batcher]]) -> Iterator[Choice]:
        """The models in the order in which to try them: one may find that it has no room for anything it has to do.

        at_work are those that have joined and are not idle. Alone, a model costs nothing here, unless its own streams
        were promised a pace that its prompts could break.
        """
        if len(at_work) == 1:
            ((model, batcher),) = at_work
            self._at_work = (model,)
            yield Choice(model, self._alone(model, batcher, now) if batcher.paced else None)
            return
        yield from self.among([(model, self._outlook(model, batcher)) for model, batcher in at_work], now)

    def among(self, at_work: Sequence[tuple[str, Outlook]], now: float) -> Iterator[Choice]:
        """As `choices`, of several models that have been looked at."""
        self._at_work = tuple(model for model, _ in at_work)
        candidates = [
            _Candidate(model, outlook, stand(outlook, self._costs[model], now), self._passed.get(model, 0))
            for model, outlook in at_work
        ]
        for one in _ranked(candidates):
            others = [other.stand for other in candidates if other is not one]
            bears_s = min((other.bears_s for other in others), default=math.inf)
            budget_s = min(_spare_s(others), bears_s, SURE * max(0.0, one.stand.own_s))
            yield Choice(one.model, tokens_within(one.outlook, self._costs[one.model], budget_s))

    def took(self, model: str, batch: Batch, step_s: float) -> None:
        """The model ran that step, of those that `choices` gave last."""
        self._steps += 1
        contested = len(self._at_work) > 1
        cost = self._costs[model]
        if contested or cost.observed < LEARN_FIRST or self._steps % LEARN_EVERY == 0:
            cost.observe(shape_of(batch), step_s)
        self.stepped(model)

    def stepped(self, model: str) -> None:
        """As `took`, where nothing is to be learnt from the step."""
        passed = self._passed if len(self._at_work) > 1 else {}
        self._passed = {other: passed.get(other, 0) + 1 for other in self._at_work if other != model}

    def _outlook(self, model: str, batcher: Batcher) -> Outlook:
        """Only the model that ran last, and who got or lost requests since, is looked at again."""
        known = self._outlooks.get(model)
        if known is None or known.batcher is not batcher or known.changes != batcher.changes:
            known = self._outlooks[model] = look(batcher)
        return known

    def _alone(self, model: str, batcher: Batcher, now: float) -> int | None:
        outlook, cost = self._outlook(model, batcher), self._costs[model]
        if not outlook.prompts:
            return None
        return tokens_within(outlook, cost, SURE * max(0.0, stand(outlook, cost, now).own_s))


def _ranked(candidates: list[_Candidate]) -> list[_Candidate]:
    """Ties go to who was passed over more often, then to who was given first."""
    overdue = [one for one in candidates if one.passed >= PATIENCE]
    overdue.sort(key=lambda one: -one.passed)
    rest = [one for one in candidates if one.passed < PATIENCE]
    blocked = [one for one in rest if one.blocked]
    kept = [one for one in rest if one.stand.slack_s]
    late = [one for one in rest if not one.stand.slack_s and not one.blocked]
    kept.sort(key=lambda one: (one.stand.least_s, -one.passed))
    late.sort(key=lambda one: (-(one.stand.lost or 0), -one.passed))
    _let_before(kept)
    return [*overdue, *blocked, *_fitting(kept, late), *kept, *late]


def _fitting(kept: list[_Candidate], late: list[_Candidate]) -> list[_Candidate]:
    """Take out the first that the others can spare a step: of those with prompts, and of those that are late.

    What is late goes before prompts now and then: it would wait for ever beside some that are due in an hour.
    """
    prompts, waited = [one for one in kept if one.outlook.prompts], [one for one in late if one.passed >= _LATE_EVERY]
    for one in (*waited, *prompts, *late):
        if one.stand.step_s <= _spare_s([other.stand for other in kept if other is not one]):
            (late if one in late else kept).remove(one)
            return [one]
    return []


def _let_before(kept: list[_Candidate]) -> None:
    """Move to the front the model of the highest priority that would be late if the first one ran its step now."""
    if len(kept) < 2:
        return
    first = kept[0].stand
    highest = max(first.slack_s)
    urgent = [
        (-priority, slack_s, at)
        for at, one in enumerate(kept)
        for priority, slack_s in one.stand.slack_s.items()
        if at and priority > highest and slack_s < first.step_s
    ]
    if urgent:
        kept.insert(0, kept.pop(min(urgent)[2]))


def _spare_s(stands: Sequence[Stand]) -> float:
    """How long the device may do something else so that each of these still has its next token on time.

    They run one after the other, the earliest due first; a part is kept back for what predictions are wrong by.
    """
    spare_s, before_s = math.inf, 0.0
    for due_s, need_s in sorted((one.least_s + one.need_s, one.need_s) for one in stands if one.slack_s):
        before_s += need_s
        spare_s = min(spare_s, due_s - before_s)
    return max(0.0, SURE * spare_s)
