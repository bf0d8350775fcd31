"""One model on a node in the `fluid` fidelity: its sequences as totals, its steps as a number that grows.

`fluid` decides when it steps and how often. Sequences that decode are not looked at while they do: each ends when the
model has made so many steps, and a heap knows the next. Prompts share steps as the live batcher lets them.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator
from typing import Final

from janus_server.orders import Busy
from janus_server.sched.outlook import LEAST_TOKENS
from janus_server.sched.sequence import PRIORITY_S
from janus_server.sched.share import share

from .batching import Promised, Rules
from .physics import Speed
from .rates import Ask
from .records import Call, Emit

# A step or a token less than this is a matter of rounding.
ROUNDING: Final = 1e-6
_NEVER: Final = math.inf
_FORGET: Final = 0.98


class Row:
    """One call. gap: tokens of its prompt still to compute, of `known`; drawn before it was preempted, if it was.

    mark is the step of its model with which it ends, while it decodes; known less the steps made when it began is
    `base`, so that what it holds now is base and the steps made.
    """

    __slots__ = ("alive", "base", "call", "drawn", "gap", "known", "mark", "order", "promise")

    def __init__(self, call: Call, promise: Promised, number: int) -> None:
        self.call, self.promise = call, promise
        self.order = (call.at_s - PRIORITY_S * promise.priority, number)
        self.known, self.gap = call.input_tokens, float(call.input_tokens)
        self.drawn, self.base, self.mark, self.alive = 0, 0.0, 0.0, True


class Flow:
    """steps have been made since it is up, a fraction of one included; each is `step_s` long at present, and `rate` are
    made a second; decode_s was what one takes without prompts when all was planned last. shares are what each prompt
    gets of a step until `goal` steps are made."""

    __slots__ = (
        "_learnt", "_learnt_s", "_rules", "_size", "ceiling_pages", "context", "decode_s", "ended_s", "floor_pages",
        "goal", "limit_s", "marks", "name", "pace_s", "paces", "prompt_pages", "prompts", "rate", "rows", "shares",
        "since", "speed", "starved", "step_s", "steps", "waiting", "weight_pages",
    )  # fmt: skip

    def __init__(self, name: str, speed: Speed, page_tokens: int, rules: Rules, now: float) -> None:
        self.name, self.speed, self._size, self._rules = name, speed, page_tokens, rules
        self.weight_pages = self.floor_pages = self.prompt_pages = self.rows = 0
        self.ceiling_pages = _NEVER
        self.context = self.decode_s = self.steps = self.since = self.goal = self.rate = self.step_s = 0.0
        self.marks: list[tuple[float, tuple[float, int], Row]] = []
        self.prompts: list[Row] = []
        self.waiting: list[Row] = []
        self.shares: list[int] = []
        self.paces: dict[float, int] = {}
        self._learnt, self._learnt_s = 1e4, 1e4 * (speed.token_s + speed.wire_s)
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
        token_s, pair_s = self._learnt_s / self._learnt, self.speed.pair_s
        start = sum([row.known - row.gap for row in self.prompts]) / len(self.prompts) if self.prompts else 0.0
        # A chunk's tokens look at what was computed before, and at each other: c·(token + pair·(start + c/2)).
        first_s, spare_s = token_s + start * pair_s, max(0.0, budget_s - self.decode_s)
        most = 2.0 * spare_s / (first_s + math.sqrt(first_s * first_s + 2.0 * pair_s * spare_s))
        if most >= room:
            return room
        least = min((self.speed.dense_s + self.speed.fixed_s) / token_s, room // 8)
        return min(room, max(LEAST_TOKENS, int(least), int(most)))

    def plan(self, budget: int, factor: float) -> None:
        """What the next steps consist of, how long each is on average, and how many of them there are of that kind."""
        self.since = self.steps
        steps = _NEVER if not self.marks else self.marks[0][0] - self.steps
        self.shares = []
        if self.prompts:
            gaps = [max(1, math.ceil(row.gap - ROUNDING)) for row in self.prompts]
            self.shares = share(gaps, budget)
            same = min(gap // part for gap, part in zip(gaps, self.shares, strict=True) if part)
            steps = min(steps, max(1, same))
        self.goal = self.steps + steps
        half = (steps - 1.0) / 2.0 if steps > 1.0 else 0.0
        seconds = self._seconds(half)
        self.step_s = factor * seconds
        if self.shares:
            # What `sched.cost` would have learnt of such steps: prompts' tokens cost what a step takes beyond its rest.
            tokens = float(sum(self.shares))
            attended_s = self.speed.pair_s * sum(
                [part * (row.known - row.gap + part / 2.0) for row, part in zip(self.prompts, self.shares, strict=True)]
            )
            beyond_s = max(0.0, seconds - self.decode_s - attended_s)
            weight = 1.0 / (seconds * seconds)
            self._learnt_s = _FORGET * self._learnt_s + weight * tokens * beyond_s
            self._learnt = _FORGET * self._learnt + weight * tokens * tokens

    def ask(self, now: float) -> Ask:
        slack_s = waited_s = 0.0
        if self.prompts:
            due_s = min([row.call.at_s + row.promise.ttft_s for row in self.prompts])
            slack_s = due_s - now - sum([row.gap for row in self.prompts]) * self.speed.token_s
            waited_s = now - self.prompts[0].call.at_s
        least_s = self.decode_s + self.speed.fixed_s
        return Ask(self.step_s, least_s, self.pace_s, bool(self.prompts), self.rows > 0, slack_s, waited_s)

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
        self.queue(again)
        while self.marks and not self.marks[0][2].alive:
            heapq.heappop(self.marks)

    def _seconds(self, half: float) -> float:
        """Of a step in the middle of those that are alike."""
        read = pairs = self.context + self.rows * half
        tokens = self.rows
        for row, part in zip(self.prompts, self.shares, strict=True) if self.shares else ():
            start = row.known - row.gap + part * half
            tokens += part
            pairs += part * (start + (part + 1) / 2.0)
            read += start + part
        return self.speed.seconds(tokens, pairs, read)

    def _end_decoding(self, row: Row, tokens: float) -> None:
        self.rows -= 1
        self.context = self.context - tokens if self.rows else 0.0

    def _over(self, row: Row, now: float, emits: list[Emit]) -> None:
        emits.append(Emit(row.call.id, now, True))
        self.leave(row)
        self.ended_s = now


def _order(row: Row) -> tuple[float, int]:
    return row.order
