"""One model on a node in the `fluid` fidelity: its sequences as totals, its steps as a number that grows.

`fluid` decides when it steps and how often. Sequences that decode are not looked at while they do: each ends when the
model has made so many steps, and a heap knows the next. Prompts share steps as the live batcher lets them.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator
from typing import Final, cast

from janus_server.orders import Busy
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.cost import Shape, StepCost
from janus_server.sched.outlook import AHEAD, LEAST_TOKENS, Outlook, Prompt, Streams, works_of
from janus_server.sched.sequence import OWED_TOKENS, PRIORITY_S, Lane
from janus_server.sched.share import share
from janus_server.sched.turn import LEARN_EVERY, LEARN_FIRST

from .batching import Promised, Rules
from .physics import Speed
from .records import Call, Emit

# A step or a token less than this is a matter of rounding.
ROUNDING: Final = 1e-6
_NEVER: Final = math.inf
# Steps are alike that take no more than this longer than the first one.
_ALIKE: Final = 0.1


class Row:
    """One call. gap: tokens of its prompt still to compute, of `known`; drawn before it was preempted, if it was.

    mark is the step of its model with which it ends, while it decodes; known less the steps made when it began is
    `base`, so that what it holds now is base and the steps made. due_s is when its first token is promised; late_s is
    how far what it draws is behind.
    """

    __slots__ = ("alive", "base", "call", "drawn", "due_s", "gap", "known", "lane", "late_s", "mark", "order",
                 "promise")  # fmt: skip

    def __init__(self, call: Call, promise: Promised, number: int) -> None:
        self.call, self.promise = call, promise
        self.lane = Lane(promise.priority, promise.tpot_s, promise.paced)
        self.due_s, self.late_s = call.at_s + promise.ttft_s, 0.0
        self.order = (call.at_s - PRIORITY_S * promise.priority, number)
        self.known, self.gap = call.input_tokens, float(call.input_tokens)
        self.drawn, self.base, self.mark, self.alive = 0, 0.0, 0.0, True

    @property
    def tokens(self) -> int:
        """Of its prompt that are still to be computed."""
        return max(1, math.ceil(self.gap - ROUNDING))


class Flow:
    """steps have been made since it is up, a fraction of one included; each is `step_s` long at present, and `rate` are
    made a second. shares are what each prompt gets of a step until `goal` steps are made. cost is what the device has
    learnt of this model's steps.

    limits and changes are for `sched.turn`, to which a Flow that has been looked at is what its batcher would be.
    """

    __slots__ = (
        "_cost", "_drawn", "_drawn_s", "_learnt", "_made", "_outlook", "_rules", "_shape", "_size", "ceiling_pages",
        "changes", "context", "ended_s", "floor_pages", "goal", "limit_s", "limits", "marks", "name",
        "pace_s", "paces", "prompt_pages", "prompts", "rate", "rows", "shares", "since", "speed", "starved", "step_s",
        "steps", "waiting", "weight_pages",
    )  # fmt: skip

    def __init__(self, name: str, speed: Speed, cost: StepCost, page_tokens: int, rules: Rules, now: float) -> None:
        self.name, self.speed, self._size, self._rules, self._cost = name, speed, page_tokens, rules, cost
        self.weight_pages = self.floor_pages = self.prompt_pages = self.rows = 0
        self.ceiling_pages = _NEVER
        self.context = self.steps = self.since = self.goal = self.rate = self.step_s = 0.0
        self.marks: list[tuple[float, tuple[float, int], Row]] = []
        self.prompts: list[Row] = []
        self.waiting: list[Row] = []
        self.shares: list[int] = []
        self.paces: dict[float, int] = {}
        self._made = self.changes = 0
        self._shape = Shape()
        self._outlook: Outlook | None = None
        self._drawn = self._drawn_s = 0.0  # steps made when the rows drew last, as far as was counted, and when
        self._learnt = 0.0  # steps that something was learnt of, as far as was looked
        self.limits = BatcherLimits(
            context_tokens=1, capacity_pages=1, step_tokens=rules.step_tokens, sequences=rules.sequences,
            shared_prompts=rules.shared_prompts, one_prompt_at_a_time=rules.one_prompt_at_a_time,
        )  # fmt: skip
        self.pace_s, self.limit_s, self.ended_s, self.starved = _NEVER, _NEVER, now, False

    @property
    def works(self) -> bool:
        return bool(self.rows or self.prompts)

    @property
    def held_pages(self) -> float:
        """Of KV. A page is half full on average where a sequence ends in it."""
        return self.prompt_pages + (self.context + 0.5 * self.rows * (self._size - 1)) / self._size

    @property
    def growth(self) -> float:
        """Pages a second that decoding takes."""
        return self.rows * self.rate / self._size

    def busy(self, now: float) -> Busy:
        running, waiting = self.rows + len(self.prompts), len(self.waiting)
        return Busy(running, waiting, 0.0 if running or waiting else now - self.ended_s)

    def all_rows(self) -> Iterator[Row]:
        yield from (row for _, _, row in self.marks if row.alive)
        yield from self.prompts
        yield from self.waiting

    def queue(self, row: Row) -> None:
        self._outlook = None
        bisect.insort(self.waiting, row, key=_order)

    def enter(self, row: Row) -> None:
        pace_s = row.promise.tpot_s
        self.paces[pace_s] = self.paces.get(pace_s, 0) + 1
        self.pace_s = min(self.paces)
        self.limit_s = self.limit_s if not row.promise.paced else min(self.limit_s, pace_s)
        self.queue(row)

    def leave(self, row: Row) -> None:
        pace_s = row.promise.tpot_s
        self.paces[pace_s] -= 1
        if not self.paces[pace_s]:
            del self.paces[pace_s]
            self.pace_s = min(self.paces, default=_NEVER)
            self.limit_s = self.pace_s if row.promise.paced else self.limit_s

    def move(self, seconds: float) -> None:
        """So much time passed with everything as it is."""
        self.steps += seconds * self.rate
        self.context += seconds * self.rate * self.rows

    def admit(self, budget: int, free_pages: float, idle: bool) -> float:
        """Let those that wait begin their prompts as the batcher would; the free pages that are left.

        Where nothing runs on the whole node (idle), the first one has its room.
        """
        self._outlook = None
        rules, wanted = self._rules, sum(row.gap for row in self.prompts)
        most = min(rules.sequences, rules.step_tokens)
        self.starved = False
        while self.waiting and self.rows + len(self.prompts) < most:
            unfinished = len(self.prompts)
            if unfinished and (rules.one_prompt_at_a_time or (wanted >= budget and unfinished >= rules.shared_prompts)):
                break
            row = self.waiting[0]
            pages = -(-row.known // self._size)
            room = min(free_pages, self.ceiling_pages - self.held_pages)
            running = self.rows + unfinished
            if pages + running > room and not idle:
                self.starved = True
                break
            idle = False
            del self.waiting[0]
            bisect.insort(self.prompts, row, key=_order)
            self.prompt_pages += pages
            free_pages -= pages
            wanted += row.gap
        return free_pages

    def budget(self, budget_s: float) -> int:
        """Tokens of prompts in a step of at most so long, as far as a token's cost is known from earlier steps; never
        less than the smallest chunk."""
        room = max(1, self._rules.step_tokens - self.rows)
        if budget_s == _NEVER:
            return room
        most = self._cost.tokens_within(budget_s, self._start_tokens(), Shape(self.rows, 0, self.context))
        if most >= room:
            return room
        least = min(self._cost.least_tokens(), room // 8)
        return min(room, max(LEAST_TOKENS, int(least), int(most)))

    def plan(self, budget: int, factor: float, most_steps: float = _NEVER) -> None:
        """What the next steps consist of, how long each is on average, and how many of them there are of that kind."""
        self.since = self._learnt = self.steps
        steps = most_steps if not self.marks else min(most_steps, self.marks[0][0] - self.steps)
        self.shares = []
        if self.prompts:
            gaps = [row.tokens for row in self.prompts]
            self.shares = share(gaps, budget)
            same = min(gap // part for gap, part in zip(gaps, self.shares, strict=True) if part)
            steps = min(steps, max(1, same))
            if steps > 1.0 and sum(self.shares) < sum(gaps):
                # A cut prompt is cut anew where its tokens have more to look at.
                more_s = self.speed.pair_s * sum([part * part for part in self.shares])
                alike = _ALIKE * self.speed.seconds(*self._middle(0.0)) / max(more_s, 1e-12)
                steps = min(steps, max(1.0, math.floor(alike)))
        self.goal = self.steps + steps
        half = (steps - 1.0) / 2.0 if steps > 1.0 else 0.0
        tokens, pairs, read = self._middle(half)
        self.step_s = factor * self.speed.seconds(tokens, pairs, read)
        self._shape = Shape(self.rows, round(tokens) - self.rows, pairs)

    def learn_made(self, alone: bool) -> None:
        """Of the steps made since they were planned the device looks at each, but alone at the first ones and then at
        few."""
        made = math.floor(self.steps - self._learnt + ROUNDING)
        if made <= 0:
            return
        self._learnt += made
        before, self._made = self._made, self._made + made
        if alone:
            first = min(made, LEARN_FIRST - self._cost.observed)
            made = max(first, self._made // LEARN_EVERY - before // LEARN_EVERY)
        if made > 0:
            self.learn(made)

    def learn(self, times: int = 1) -> None:
        """What the steps that were planned last take is known now."""
        self._cost.observe(self._shape, self.step_s, times)

    def look(self) -> Outlook:
        """What `sched.outlook.look` would find in a batcher: as long as nothing changed, the same."""
        if self._outlook is None:
            dues: dict[Lane, list[float]] = {}
            for _, _, row in self.marks:
                if row.alive:
                    dues.setdefault(row.lane, []).append(self._drawn_s - row.late_s + row.lane.pace_s)
            streams = tuple(Streams(lane, sorted(due_s)) for lane, due_s in dues.items())
            asked = self.prompts if self.starved else [*self.prompts, *self.waiting[:AHEAD]]
            works = works_of([row.tokens for row in asked], self._rules.one_prompt_at_a_time)
            prompts = tuple(
                Prompt(row.lane.priority, row.due_s, OWED_TOKENS * row.lane.pace_s if row.drawn else 0.0,
                       row.known - row.tokens, work)
                for row, work in zip(asked, works, strict=True)
            )  # fmt: skip
            beside = Shape(self.rows, 0, self.context)
            batcher = cast("Batcher", self)
            self._outlook = Outlook(batcher, self.changes, streams, prompts, beside, self._start_tokens())
        return self._outlook

    def drew(self, now: float) -> None:
        """Rows have drawn a token with each of the steps made since this was called last: how late is each now?"""
        steps = self.steps - self._drawn
        if steps >= 1.0 - ROUNDING:
            whole = math.floor(steps + ROUNDING)
            step_s = (now - self._drawn_s) / steps
            for _, _, row in self.marks:
                pace_s, own = row.lane.pace_s, row.base + self.steps - row.known - 1.0
                late_s = row.late_s + min(whole, own) * (step_s - pace_s)
                row.late_s = min(max(late_s, 0.0), OWED_TOKENS * pace_s)
            self._drawn_s, self._drawn = now - (steps - whole) * step_s, self._drawn + whole
        self._outlook = None

    def straighten(self) -> None:
        """Between two steps of the device: what was counted of a step, where they are rates, is how long ago the last
        one ended."""
        part = self.steps - math.floor(self.steps + ROUNDING)
        self.context -= part * self.rows
        self.steps -= part
        self.steps = self.goal = self.since = float(round(self.steps))
        self._drawn = self.steps

    @property
    def due_s(self) -> float:
        """When the next token of its streams is promised, were they on time."""
        return self._drawn_s + self.pace_s

    def resume(self, in_s: float) -> None:
        """The other way round, when steps become a rate: the next one ends then."""
        part = max(0.0, 1.0 - in_s * self.rate)
        self.context += part * self.rows
        self.steps += part

    @property
    def midway(self) -> bool:
        """A step with prompts has begun and not ended: nobody joins it, and what it takes was settled."""
        made = self.steps - self.since
        return bool(self.shares) and self.steps < self.goal - ROUNDING and abs(made - round(made)) > ROUNDING

    def finish_step(self) -> None:
        """Let the step that has begun be the last of its kind: somebody waits to join the next."""
        self.goal = min(self.goal, self.since + math.ceil(self.steps - self.since))

    def settle(self) -> None:
        """Count what prompts got since `plan`."""
        done, self.since = self.steps - self.since, self.steps
        if self.shares:
            for row, part in zip(self.prompts, self.shares, strict=True):
                row.gap -= part * done
            self.shares = []

    def happen(self, now: float) -> list[Emit]:
        """The step `goal` is made: who ends with it, and whose prompt is computed."""
        self._outlook = None
        emits: list[Emit] = []
        while self.marks and (not self.marks[0][2].alive or self.marks[0][0] <= self.steps + ROUNDING):
            mark, _, row = heapq.heappop(self.marks)
            if row.alive:
                self._end_decoding(row, row.base + mark)
                self._over(row, now, emits)
        if not self.prompts:
            return emits
        for row in [row for row in self.prompts if row.gap <= 1e-3]:
            self.prompts.remove(row)
            self.prompt_pages -= -(-row.known // self._size)
            if not row.drawn:
                emits.append(Emit(row.call.id, now, False))
            left = row.call.output_tokens - row.drawn - 1
            if left <= 0:
                self._over(row, now, emits)
                continue
            if not self.rows:
                self._drawn, self._drawn_s = self.steps, now
            row.mark, row.base = self.steps + left, row.known + 1 - self.steps
            self.rows += 1
            self.context += row.known + 1
            heapq.heappush(self.marks, (row.mark, row.order, row))
        return emits

    def preempt(self, row: Row) -> None:
        """A sequence that decodes gives its pages up and computes everything anew."""
        row.alive = False
        self._end_decoding(row, row.base + self.steps)
        drawn = int(row.call.output_tokens - (row.mark - self.steps) + ROUNDING)
        again = Row(row.call, row.promise, row.order[1])
        again.drawn = min(max(drawn, row.drawn + 1), row.call.output_tokens - 1)
        again.known = row.call.input_tokens + again.drawn
        again.gap = float(again.known)
        again.due_s = self._drawn_s - row.late_s + row.lane.pace_s
        self.queue(again)
        while self.marks and not self.marks[0][2].alive:
            heapq.heappop(self.marks)

    def _middle(self, half: float) -> tuple[float, float, float]:
        """Of a step in the middle of those that are alike: new tokens, pairs that attend, tokens whose KV is read."""
        read = pairs = self.context + self.rows * half
        tokens = float(self.rows)
        for row, part in zip(self.prompts, self.shares, strict=True) if self.shares else ():
            start = row.known - row.gap + part * half
            tokens += part
            pairs += part * (start + (part + 1) / 2.0)
            read += start + part
        return tokens, pairs, read

    def _start_tokens(self) -> float:
        """Of the prompts that are computed, how much of them is on average."""
        return sum([row.known - row.gap for row in self.prompts]) / len(self.prompts) if self.prompts else 0.0

    def _end_decoding(self, row: Row, tokens: float) -> None:
        self.rows -= 1
        self.context = self.context - tokens if self.rows else 0.0

    def _over(self, row: Row, now: float, emits: list[Emit]) -> None:
        emits.append(Emit(row.call.id, now, True))
        self.leave(row)
        self.ended_s = now


def _order(row: Row) -> tuple[float, int]:
    return row.order
