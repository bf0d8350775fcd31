"""How many replicas each elastic model is to have: the fast path, every half second. Pure.

`Scaler.decide` takes what was counted of each model and gives the targets that changed, with the reason; `rollout`
makes them true. The fewest replicas with which a pessimist expects the promise to be kept with the traffic that is
coming, or what a table says of its rate where nobody can predict; more where requests wait or are late now. Up at once,
down after a quiet time.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from janus_server.sched.budget import Claim, settled, share_out
from janus_server.sched.mind import Load, Mind, Question, RateTable, ScalingRules, Shares, Thought
from janus_server.sched.placement import Device, Model, Note
from janus_server.sched.reasons import Target, sentence
from janus_server.units import LONG_AGO_S, format_seconds

Attainment: TypeAlias = Callable[[Sequence[Question]], Sequence[Shares | None]]
"""Rising shares [counts] for each question, or None of a model that it cannot predict."""


class ScalerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Scaler` remembers at one moment."""

    targets: dict[str, int] = {}
    minds: dict[str, Mind] = {}
    at_s: float = LONG_AGO_S
    given: tuple[tuple[Claim, ...], int] | None = None
    noted: dict[str, str] = {}


class Scaler:
    """Remembers targets and the traffic that led to them.

    `targets` are replicas by model. A model whose traffic stands still costs a comparison.
    """

    def __init__(
        self, rules: ScalingRules | None = None, table: RateTable | None = None, known: ScalerMemory | None = None
    ) -> None:
        """With what another one knew (`memory`), this one goes on."""
        known = copy.deepcopy(known or ScalerMemory())
        self.rules = rules or ScalingRules()
        self.table = table or RateTable()
        self.targets = known.targets
        self._minds = {name: Thought(name, self.rules, self.table, mind) for name, mind in known.minds.items()}
        self._at_s = known.at_s
        self._given = known.given
        self._devices: tuple[Device, ...] = ()
        self._sizes: list[int] = []
        self._noted = known.noted

    def memory(self) -> ScalerMemory:
        """What it knows now, as a copy."""
        minds = {name: thought.mind for name, thought in self._minds.items()}
        return copy.deepcopy(ScalerMemory(targets=self.targets, minds=minds, at_s=self._at_s, given=self._given,
                                          noted=self._noted))  # fmt: skip

    def decide(
        self,
        traffic: Sequence[Load],
        models: Mapping[str, Model],
        devices: tuple[Device, ...],
        ask: Attainment,
        now: float,
    ) -> tuple[list[Target], list[Note]]:
        """Targets that differ from the last ones, by model; and what is not done or not believed, where that is new.

        devices are those of the elastic pool.
        """
        if devices is not self._devices:
            self._devices, self._sizes = devices, sorted(device.pages for device in devices)
        notes = self._sort_out(traffic, models, now)
        said = sorted({t.model: t for t in traffic if t.model in models}.values(), key=lambda t: t.model)
        thoughts = [self._minds[t.model] for t in said]
        changed = [thought for thought, t in zip(thoughts, said, strict=True) if thought.hear(t, models[t.model], now)]
        self._ask(changed, len(devices), ask, now)
        for thought in changed:
            thought.settle(models[thought.model], now)
        claims = []
        for thought in thoughts:
            model, mind = models[thought.model], thought.mind
            why = impossible(model, self._sizes) if devices else None
            if why is not None:
                notes.append(Note(model.model, why))
            claims.append(Claim(model.model, 0 if why else mind.wish, model.shards, model.priority, mind.patience.heat))
        fresh = [note for note in notes if self._noted.get(note.subject) != note.why]
        self._noted = {note.subject: note.why for note in notes}
        return self._share(tuple(claims), thoughts, len(devices)), fresh

    def _sort_out(self, traffic: Sequence[Load], models: Mapping[str, Model], now: float) -> list[Note]:
        """Minds for those that are spoken of, and no others; notes about what makes no sense."""
        notes = []
        if now < self._at_s:
            back = format_seconds(self._at_s - now)
            notes.append(Note("clock", f"it went back by {back}: trends and waiting times start anew"))
            for thought in self._minds.values():
                thought.start_anew()
        self._at_s = now
        named = {t.model for t in traffic}
        for t in traffic:
            if t.model not in models:
                notes.append(Note(t.model, "its traffic is ignored: the model is unknown"))
            elif t.model not in self._minds:
                self._minds[t.model] = Thought(t.model, self.rules, self.table, Mind.new(t.model, self.rules))
        for model in [model for model in self._minds if model not in named or model not in models]:
            del self._minds[model]
            self.targets.pop(model, None)
        return notes

    def _ask(self, thoughts: Sequence[Thought], devices: int, ask: Attainment, now: float) -> None:
        """One call for all whose question is new."""
        asking = []
        for thought in thoughts:
            question = thought.question(devices, now)
            if question is not None and question != thought.mind.asked:
                thought.mind.asked = question
                asking.append(thought.mind)
        questions = [mind.asked for mind in asking if mind.asked is not None]
        for mind, said in zip(asking, ask(questions) if questions else (), strict=True):
            mind.said = None if said is None else tuple(map(float, said))

    def _share(self, claims: tuple[Claim, ...], thoughts: Sequence[Thought], devices: int) -> list[Target]:
        if self._given == (claims, devices):
            return []
        self._given = (claims, devices)
        given = settled(claims, share_out(claims, devices), self.targets, devices)
        wanted = sum(claim.replicas * claim.devices for claim in claims)
        out = []
        for thought, claim in zip(thoughts, claims, strict=True):
            model, wish, grounds = thought.model, thought.mind.wish, thought.mind.grounds
            before, count = self.targets.get(model), given[model]
            self.targets[model] = count
            if count == before or (not count and not before and (not claim.replicas or before == 0)):
                continue
            short = (wanted, devices) if count < claim.replicas else None
            out.append(Target(
                model=model, replicas=count, before=before or 0, wanted=wish, decider=grounds.decider,
                met=grounds.met, why=sentence(model, before or 0, count, wish, grounds, short),
            ))  # fmt: skip
        return out


def impossible(model: Model, sizes: Sequence[int]) -> str | None:
    """Why no replica can ever start on devices of so many pages (rising), if so."""
    if model.shards < 1 or model.pages < 0:
        return f"it cannot start: {model.shards} shards of {model.pages} pages are no replica"
    if len(sizes) - bisect.bisect_left(sizes, model.pages) >= model.shards:
        return None
    if not sizes or sizes[-1] < model.pages:
        has = f"the largest has {sizes[-1]}" if sizes else "there are none"
        return f"it cannot start: it needs devices of {model.pages} pages, and {has}"
    return f"it cannot start: it needs {model.shards} devices of {model.pages} pages, and there are not as many"
