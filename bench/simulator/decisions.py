"""What the policy decided, counted by kind, with a bounded number of its sentences spread over the run.

`recorder` tells it each action and each order begun; the report shows the sentences and how long models took to come.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from janus_server.orders import Action, Answer, Decided, Dispatch, Order, Refit, Refuse

_SLOTS: Final = 240
_IN_A_SLOT: Final = 8
# Of one kind, so that what happens often does not drive out what happens seldom.
_ALIKE: Final = 3
_LETTERS: Final = 400


class Sentence(NamedTuple):
    """One decision: about a model (or whatever was decided of), for a node where it is an order."""

    at_s: float
    kind: str
    model: str
    node: str
    why: str


class Took(NamedTuple):
    """How long orders of one verb for one model took, from their start."""

    times: int
    sum_s: float
    least_s: float
    most_s: float


class Decisions:
    """counts are by kind: the verb of an order, or what else it is. took is by verb and model."""

    def __init__(self, duration_s: float) -> None:
        self.counts: dict[str, int] = {}
        self.dispatched = 0
        self.took: dict[tuple[str, str], Took] = {}
        self.sentences: list[Sentence] = []
        self._slot_s = max(0.5, duration_s / _SLOTS)
        self._slot, self._room = -1, 0
        self._alike: dict[str, int] = {}

    def add(self, action: Action, now: float) -> None:
        if isinstance(action, Dispatch):
            self.dispatched += len(action.requests)
            self.counts["dispatch"] = self.counts.get("dispatch", 0) + 1
            return
        said = sentence(action, now)
        self.counts[said.kind] = self.counts.get(said.kind, 0) + 1
        slot = int(now / self._slot_s)
        if slot != self._slot:
            # A run far beyond its trace's time says no more than one as long.
            self._slot, self._room = slot, _IN_A_SLOT if slot < 2 * _SLOTS else 0
            self._alike = {}
        alike = self._alike.get(said.kind, 0)
        if self._room and alike < _ALIKE:
            self._room -= 1
            self._alike[said.kind] = alike + 1
            self.sentences.append(said)

    def began(self, order: Order, takes_s: float) -> None:
        key = (order.verb.value, order.model)
        took = self.took.get(key)
        if took is None:
            self.took[key] = Took(1, takes_s, takes_s, takes_s)
        else:
            self.took[key] = Took(
                took.times + 1, took.sum_s + takes_s, min(took.least_s, takes_s), max(took.most_s, takes_s)
            )


def sentence(action: Action, now: float) -> Sentence:
    """Any action as one."""
    match action:
        case Order():
            return Sentence(now, action.verb.value, action.model, action.node, _cut(action.why))
        case Dispatch():
            return Sentence(now, "dispatch", "", action.node, _cut(action.why))
        case Refuse():
            return Sentence(now, "refuse", action.model, "", _cut(action.why))
        case Answer():
            return Sentence(now, "answer", action.model, "", _cut(action.why))
        case Refit():
            return Sentence(now, "refit", action.model, "", _cut(action.why))
        case Decided():
            return Sentence(now, "decided", action.subject, "", _cut(action.why))


def _cut(text: str) -> str:
    return text if len(text) <= _LETTERS else text[: _LETTERS - 1] + "…"
