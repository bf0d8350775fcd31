"""One model's mind in the fast path: what it has to do, what that takes by prediction or by a table, and what it has.

`scaling` keeps a `Thought` for each elastic model and shares the devices out among them. A mind only says what its
model would have if there were devices enough. Pure.
"""

from __future__ import annotations

import bisect
import math
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from janus_server.sched.ladder import Choice, choose, ladder
from janus_server.sched.patience import Patience
from janus_server.sched.placement import Model
from janus_server.sched.reasons import Decider, Grounds
from janus_server.sched.trend import Trend


class Load(msgspec.Struct, frozen=True, kw_only=True):
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


class Mind(msgspec.Struct, eq=False, kw_only=True):
    """What is known of one model, and what it would have if there were devices enough (`wish`), on which grounds.

    asked is the question that was put last, said its answer. quiet: nothing is going on that time could change.
    """

    traffic: Load
    trend: Trend
    patience: Patience
    known: Model | None = None
    wish: int = 0
    asked: Question | None = None
    said: tuple[float, ...] | None = None
    grounds: Grounds = Grounds()
    quiet: bool = False

    @classmethod
    def new(cls, model: str, rules: ScalingRules) -> Mind:
        """Of a model that nothing is known of."""
        patience = Patience.new(rules.quiet_s, rules.hold_s)
        return cls(traffic=Load(model=model, tokens_s=0.0), trend=Trend(rules.window_s), patience=patience)


class Thought:
    """Making up one model's mind."""

    def __init__(self, model: str, rules: ScalingRules, table: RateTable, mind: Mind) -> None:
        self.model, self.rules, self.table, self.mind = model, rules, table, mind

    def start_anew(self) -> None:
        fresh = Mind.new(self.model, self.rules)
        self.mind.trend, self.mind.patience, self.mind.quiet = fresh.trend, fresh.patience, False

    def hear(self, traffic: Load, model: Model, now: float) -> bool:
        """Whether there is anything to think about."""
        same = _same(traffic, self.mind.traffic) and model == self.mind.known
        if same and self.mind.quiet and (traffic.tokens_s > 0.0 or not self.mind.wish):
            self.mind.trend.still(now)
            return False
        if not same:
            self.mind.asked, self.mind.known = None, model
        numbers = (traffic.tokens_s, traffic.backlog_s, traffic.idle_for_s)
        if all(math.isfinite(n) and n >= 0.0 for n in numbers) and 0 <= traffic.late <= traffic.ended:
            self.mind.traffic = traffic
        # What is no number changes nothing: the last that was one holds.
        self.mind.trend.add(now, self.mind.traffic.tokens_s)
        self.mind.quiet = self.mind.trend.settled(now)
        return True

    def question(self, devices: int, now: float) -> Question | None:
        if self.mind.traffic.tokens_s <= 0.0 or devices < 1:
            return None
        factor = self.factor(now)
        near = max(2 * self.mind.wish, self.table.count(self.mind.traffic.tokens_s * factor)) + _MORE
        # Up to twice what there is room for: who is short by how much decides how devices are shared out.
        return Question(self.model, factor, ladder(near, 2 * devices))

    def factor(self, now: float) -> float:
        """What the traffic grows by until a new replica could serve; never below 1."""
        if not self.mind.trend.unusual():
            return 1.0
        growth = self.mind.trend.ahead(now, self.rules.ahead_s) / self.mind.traffic.tokens_s
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
            grounds = msgspec.structs.replace(grounds, decider=Decider.IDLE, idle_s=self.mind.traffic.idle_for_s)
        heat, patience = self.mind.traffic.tokens_s, self.mind.patience
        urgent = patience.jumped(heat, self.rules.jump_most) or want - self.mind.wish >= _AT_ONCE or not self.mind.wish
        decided = patience.decide(self.mind.wish, want, urgent or grounds.decider in _PRESSING, now)
        if want == 0:  # it was quiet for longer than that already
            decided = 0
        if decided != self.mind.wish:
            patience.moved(self.mind.wish, decided, heat, now)
            self.mind.wish, self.mind.grounds = decided, grounds
        self.mind.quiet = self.mind.quiet and decided == want and patience.over(now)

    def _idle(self, model: Model) -> bool:
        traffic = self.mind.traffic
        busy = traffic.tokens_s > 0.0 or traffic.backlog_s > 0.0
        return model.idle_s is not None and not busy and (traffic.idle_for_s >= model.idle_s or self.mind.wish == 0)

    def _wanted(self, model: Model, now: float) -> tuple[int, Grounds]:
        """By prediction, and by what is the matter now if that is more."""
        traffic, rules = self.mind.traffic, self.rules
        want, grounds = self._predicted(model, now)
        most_s = rules.queue_most_s * max(self.mind.wish, want, 1)
        if traffic.backlog_s > most_s and self.mind.patience.since(now) >= rules.ahead_s:
            more = math.ceil((traffic.backlog_s - most_s) / rules.drain_s)
            want = max(want, self.mind.wish) + min(more, max(self.mind.wish, 1))
            grounds = msgspec.structs.replace(grounds, decider=Decider.BACKLOG, backlog_s=traffic.backlog_s)
        late = traffic.late / traffic.ended if traffic.ended >= rules.late_least else 0.0
        one_more = want < self.mind.wish + 1 <= grounds.predicted + _LATE_MORE
        if late > 1.0 - model.target and grounds.met and one_more and self.mind.patience.held(now):
            want = self.mind.wish + 1
            grounds = msgspec.structs.replace(grounds, decider=Decider.LATE, late=late)
        return want, grounds

    def _predicted(self, model: Model, now: float) -> tuple[int, Grounds]:
        tokens_s = self.mind.traffic.tokens_s
        if tokens_s <= 0.0:
            return 0, Grounds()
        counts = () if self.mind.asked is None else self.mind.asked.counts
        factor, said = self.factor(now), self.mind.said
        if said is None or not counts or len(said) != len(counts) or not all(map(math.isfinite, said)):
            count = self.table.count(tokens_s * factor)
            # Down only where a tenth more would not bring it up again.
            if count < self.mind.wish:
                count = min(self.mind.wish, self.table.count(1.1 * tokens_s * factor))
            return count, Grounds(Decider.TABLE, predicted=count, factor=factor, ahead_s=self.rules.ahead_s,
                                  tokens_s=tokens_s)  # fmt: skip
        chosen = choose(counts, said, model.target)
        if chosen.met and chosen.count < self.mind.wish:
            safe = choose(counts, said, model.target + self.rules.margin * (1.0 - model.target))
            fewest = min(self.mind.wish, safe.count) if safe.met else self.mind.wish
            chosen = Choice(fewest, safe.share, True)
        elif not chosen.met and chosen.count < self.mind.wish <= 2 * chosen.count:
            # How many are too many is a matter of a few hundredths: it comes and goes.
            chosen = Choice(self.mind.wish, chosen.share, False)
        share = float(said[max(0, bisect.bisect_right(counts, self.mind.wish) - 1)])
        return chosen.count, Grounds(
            Decider.ORACLE, predicted=chosen.count, factor=factor, ahead_s=self.rules.ahead_s, tokens_s=tokens_s,
            met=chosen.met, share=share, best=chosen.share, target=model.target,
        )  # fmt: skip


def _same(one: Load, other: Load) -> bool:
    """But for how long it has been idle."""
    return (one.tokens_s, one.backlog_s, one.ended, one.late) == (
        other.tokens_s, other.backlog_s, other.ended, other.late
    )  # fmt: skip
