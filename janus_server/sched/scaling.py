"""How many replicas each elastic model is to have: the fast path, every half second. Pure.

`Scaler.decide` takes what was counted of each model and gives the targets that changed, with the reason; `rollout`
makes them true. The fewest replicas with which a pessimist expects the promise to be kept with the traffic that is
coming, or what a table says of its rate where nobody can predict; more where requests wait or are late now. Up at once,
down after a quiet time.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from janus_server.sched.budget import Claim, settled, share_out
from janus_server.sched.ladder import Choice, choose, ladder
from janus_server.sched.patience import Patience
from janus_server.sched.placement import Device, Model, Note
from janus_server.sched.reasons import Decider, Grounds, Target, sentence
from janus_server.sched.trend import Trend
from janus_server.units import format_seconds


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted of a model over all its replicas.

    tokens_s: of input and output, the mean of the last seconds. backlog_s: predicted work of prompts that wait. ended:
    requests of the last window, late of them over their promise. idle_for_s: since the last request.
    """

    model: str
    tokens_s: float
    backlog_s: float = 0.0
    ended: int = 0
    late: int = 0
    idle_for_s: float = 0.0


class Question(msgspec.Struct, frozen=True):
    """The attainment that a pessimist expects of a model with `factor` times its present traffic and each count."""

    model: str
    factor: float
    counts: tuple[int, ...]


Shares: TypeAlias = npt.NDArray[np.float64]
Attainment: TypeAlias = Callable[[Sequence[Question]], Sequence[Shares | None]]
"""Rising shares [counts] for each question, or None of a model that it cannot predict."""


class RateTable(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas by tokens a second: up to steps[i] i + 1 do, beyond the last one more for each per_replica."""

    steps: tuple[float, ...] = (3000, 10000, 20000, 30000, 45000, 55000, 65000, 75000)
    per_replica: float = 10702.38
    offset: float = 10285.71

    def count(self, tokens_s: float) -> int:
        for i, step in enumerate(self.steps):
            if tokens_s <= step:
                return i + 1
        return math.ceil((tokens_s + self.offset) / self.per_replica)


class ScalingRules(msgspec.Struct, frozen=True, kw_only=True):
    """ahead_s: how far is looked ahead, the time that a new replica takes; along the trend of window_s, and at most to
    growth_most times the present. A replica may have queue_most_s of prompts waiting; what waits beyond that is to be
    worked off in drain_s by more replicas.

    A target goes down to the most that was wanted within quiet_s. A change of one or two replicas waits for hold_s
    after the last change, unless the traffic changed by jump_most. margin: the part of what may miss the promise that
    must be left unused before a target goes down. late_least: requests that must have ended before late ones count.
    """

    window_s: float = 4.0
    ahead_s: float = 3.0
    growth_most: float = 2.0
    queue_most_s: float = 1.0
    drain_s: float = 4.0
    quiet_s: float = 15.0
    hold_s: float = 5.0
    jump_most: float = 0.2
    margin: float = 0.25
    late_least: int = 10


# Forecasts are asked about in steps of this factor, so that a rate that trembles asks the same question again.
_FACTOR_STEP: Final = 1.05
# What grows by less trembles.
_GROWTH_LEAST: Final = 1.25
# Beyond twice what there is, so many counts are asked about one by one.
_MORE: Final = 4
_LATE_MORE: Final = 2
# So many more replicas are never held back.
_AT_ONCE: Final = 3
_PRESSING: Final = (Decider.BACKLOG, Decider.LATE)


class Scaler:
    """Remembers targets and the traffic that led to them.

    `targets` are replicas by model. A model whose traffic stands still costs a comparison.
    """

    def __init__(self, rules: ScalingRules | None = None, table: RateTable | None = None) -> None:
        self.rules = rules or ScalingRules()
        self.table = table or RateTable()
        self.targets: dict[str, int] = {}
        self._minds: dict[str, _Mind] = {}
        self._at_s = -math.inf
        self._given: tuple[tuple[Claim, ...], int] | None = None
        self._devices: tuple[Device, ...] = ()
        self._sizes: list[int] = []
        self._noted: dict[str, str] = {}

    def decide(
        self,
        traffic: Sequence[Traffic],
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
        minds = [self._minds[t.model] for t in said]
        changed = [mind for mind, t in zip(minds, said, strict=True) if mind.hear(t, models[t.model], now)]
        self._ask(changed, len(devices), ask, now)
        for mind in changed:
            mind.settle(models[mind.model], now)
        claims = []
        for mind in minds:
            model = models[mind.model]
            why = impossible(model, self._sizes) if devices else None
            if why is not None:
                notes.append(Note(model.model, why))
            claims.append(Claim(model.model, 0 if why else mind.wish, model.shards, model.priority, mind.patience.heat))
        fresh = [note for note in notes if self._noted.get(note.subject) != note.why]
        self._noted = {note.subject: note.why for note in notes}
        return self._share(tuple(claims), minds, len(devices)), fresh

    def _sort_out(self, traffic: Sequence[Traffic], models: Mapping[str, Model], now: float) -> list[Note]:
        """Minds for those that are spoken of, and no others; notes about what makes no sense."""
        notes = []
        if now < self._at_s:
            back = format_seconds(self._at_s - now)
            notes.append(Note("clock", f"it went back by {back}: trends and waiting times start anew"))
            for mind in self._minds.values():
                mind.start_anew(now)
        self._at_s = now
        named = {t.model for t in traffic}
        for t in traffic:
            if t.model not in models:
                notes.append(Note(t.model, "its traffic is ignored: the model is unknown"))
            elif t.model not in self._minds:
                self._minds[t.model] = _Mind(t.model, self.rules, self.table, now)
        for model in [model for model in self._minds if model not in named or model not in models]:
            del self._minds[model]
            self.targets.pop(model, None)
        return notes

    def _ask(self, minds: Sequence[_Mind], devices: int, ask: Attainment, now: float) -> None:
        """One call for all whose question is new."""
        asking = []
        for mind in minds:
            question = mind.question(devices, now)
            if question is not None and question != mind.asked:
                mind.asked = question
                asking.append(mind)
        questions = [mind.asked for mind in asking if mind.asked is not None]
        for mind, said in zip(asking, ask(questions) if questions else (), strict=True):
            mind.said = said

    def _share(self, claims: tuple[Claim, ...], minds: Sequence[_Mind], devices: int) -> list[Target]:
        if self._given == (claims, devices):
            return []
        self._given = (claims, devices)
        given = settled(claims, share_out(claims, devices), self.targets, devices)
        wanted = sum(claim.replicas * claim.devices for claim in claims)
        out = []
        for mind, claim in zip(minds, claims, strict=True):
            before, count, grounds = self.targets.get(mind.model), given[mind.model], mind.grounds
            self.targets[mind.model] = count
            if count == before or (not count and not before and (not claim.replicas or before == 0)):
                continue
            short = (wanted, devices) if count < claim.replicas else None
            out.append(Target(
                model=mind.model, replicas=count, before=before or 0, wanted=mind.wish, decider=grounds.decider,
                met=grounds.met, why=sentence(mind.model, before or 0, count, mind.wish, grounds, short),
            ))  # fmt: skip
        return out


class _Mind:
    """What is known of one model, and what it would have if there were devices enough (`wish`)."""

    def __init__(self, model: str, rules: ScalingRules, table: RateTable, now: float) -> None:
        self.model, self.rules, self.table = model, rules, table
        self.traffic = Traffic(model=model, tokens_s=0.0)
        self.known: Model | None = None
        self.trend = Trend(rules.window_s)
        self.patience = Patience(rules.quiet_s, rules.hold_s, now)
        self.wish = 0
        self.asked: Question | None = None
        self.said: Shares | None = None
        self.grounds = Grounds()
        self.quiet = False

    def start_anew(self, now: float) -> None:
        self.trend = Trend(self.rules.window_s)
        self.patience = Patience(self.rules.quiet_s, self.rules.hold_s, now)
        self.quiet = False

    def hear(self, traffic: Traffic, model: Model, now: float) -> bool:
        """Whether there is anything to think about."""
        same = _same(traffic, self.traffic) and model == self.known
        if same and self.quiet and (traffic.tokens_s > 0.0 or not self.wish):
            self.trend.still(now)
            return False
        if not same:
            self.asked, self.known = None, model
        numbers = (traffic.tokens_s, traffic.backlog_s, traffic.idle_for_s)
        if all(math.isfinite(n) and n >= 0.0 for n in numbers) and 0 <= traffic.late <= traffic.ended:
            self.traffic = traffic
        # What is no number changes nothing: the last that was one holds.
        self.trend.add(now, self.traffic.tokens_s)
        self.quiet = self.trend.settled(now)
        return True

    def question(self, devices: int, now: float) -> Question | None:
        if self.traffic.tokens_s <= 0.0 or devices < 1:
            return None
        factor = self.factor(now)
        near = max(2 * self.wish, self.table.count(self.traffic.tokens_s * factor)) + _MORE
        # Up to twice what there is room for: who is short by how much decides how devices are shared out.
        return Question(self.model, factor, ladder(near, 2 * devices))

    def factor(self, now: float) -> float:
        """What the traffic grows by until a new replica could serve; never below 1."""
        if not self.trend.unusual():
            return 1.0
        growth = self.trend.ahead(now, self.rules.ahead_s) / self.traffic.tokens_s
        growth = min(growth, self.rules.growth_most)
        if growth < _GROWTH_LEAST:
            return 1.0
        return float(_FACTOR_STEP ** math.ceil(math.log(growth) / math.log(_FACTOR_STEP) - 1e-9))

    def settle(self, model: Model, now: float) -> None:
        """Make up its mind: what is wanted, and whether it is time to change to that."""
        least = 0 if self._idle(model) else 1
        want, grounds = self._wanted(model, now)
        want = max(want, least)
        if want == 0:
            grounds = msgspec.structs.replace(grounds, decider=Decider.IDLE, idle_s=self.traffic.idle_for_s)
        heat, patience = self.traffic.tokens_s, self.patience
        urgent = patience.jumped(heat, self.rules.jump_most) or want - self.wish >= _AT_ONCE or not self.wish
        decided = patience.decide(self.wish, want, urgent or grounds.decider in _PRESSING, now)
        if want == 0:  # it was quiet for longer than that already
            decided = 0
        if decided != self.wish:
            patience.moved(self.wish, decided, heat, now)
            self.wish, self.grounds = decided, grounds
        self.quiet = self.quiet and decided == want and patience.over(now)

    def _idle(self, model: Model) -> bool:
        traffic = self.traffic
        busy = traffic.tokens_s > 0.0 or traffic.backlog_s > 0.0
        return model.idle_s is not None and not busy and (traffic.idle_for_s >= model.idle_s or self.wish == 0)

    def _wanted(self, model: Model, now: float) -> tuple[int, Grounds]:
        """By prediction, and by what is the matter now if that is more."""
        traffic, rules = self.traffic, self.rules
        want, grounds = self._predicted(model, now)
        most_s = rules.queue_most_s * max(self.wish, want, 1)
        if traffic.backlog_s > most_s and self.patience.since(now) >= rules.ahead_s:
            more = math.ceil((traffic.backlog_s - most_s) / rules.drain_s)
            want = max(want, self.wish) + min(more, max(self.wish, 1))
            grounds = msgspec.structs.replace(grounds, decider=Decider.BACKLOG, backlog_s=traffic.backlog_s)
        late = traffic.late / traffic.ended if traffic.ended >= rules.late_least else 0.0
        one_more = want < self.wish + 1 <= grounds.predicted + _LATE_MORE
        if late > 1.0 - model.target and grounds.met and one_more and self.patience.held(now):
            want = self.wish + 1
            grounds = msgspec.structs.replace(grounds, decider=Decider.LATE, late=late)
        return want, grounds

    def _predicted(self, model: Model, now: float) -> tuple[int, Grounds]:
        tokens_s = self.traffic.tokens_s
        if tokens_s <= 0.0:
            return 0, Grounds()
        counts = () if self.asked is None else self.asked.counts
        factor, said = self.factor(now), self.said
        if said is None or not counts or len(said) != len(counts) or not np.isfinite(said).all():
            count = self.table.count(tokens_s * factor)
            # Down only where a tenth more would not bring it up again.
            if count < self.wish:
                count = min(self.wish, self.table.count(1.1 * tokens_s * factor))
            return count, Grounds(Decider.TABLE, predicted=count, factor=factor, ahead_s=self.rules.ahead_s,
                                  tokens_s=tokens_s)  # fmt: skip
        chosen = choose(counts, said, model.target)
        if chosen.met and chosen.count < self.wish:
            safe = choose(counts, said, model.target + self.rules.margin * (1.0 - model.target))
            fewest = min(self.wish, safe.count) if safe.met else self.wish
            chosen = Choice(fewest, safe.share, True)
        elif not chosen.met and chosen.count < self.wish <= 2 * chosen.count:
            # How many are too many is a matter of a few hundredths: it comes and goes.
            chosen = Choice(self.wish, chosen.share, False)
        share = float(said[max(0, bisect.bisect_right(counts, self.wish) - 1)])
        return chosen.count, Grounds(
            Decider.ORACLE, predicted=chosen.count, factor=factor, ahead_s=self.rules.ahead_s, tokens_s=tokens_s,
            met=chosen.met, share=share, best=chosen.share, target=model.target,
        )  # fmt: skip


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


def _same(one: Traffic, other: Traffic) -> bool:
    """But for how long it has been idle."""
    return (one.tokens_s, one.backlog_s, one.ended, one.late) == (
        other.tokens_s, other.backlog_s, other.ended, other.late
    )  # fmt: skip
