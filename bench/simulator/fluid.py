"""A node in the `fluid` fidelity: whole stretches of equal steps at once, so that a day of a cluster takes minutes.

A model alone on its device makes the very steps of `stepwise`, but those that are alike are counted, not made. Where
several only decode, each makes its steps at the rate that turns by least slack come to (`rates`). While prompts are
computed beside other models' work, `sched.turn` itself is asked whose step is next. A call costs a few events of some
ten microseconds each, whatever its length. `devices.make` makes it, `world` drives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from janus_server.errors import Bug, require
from janus_server.orders import Busy
from janus_server.sched.outlook import SURE
from janus_server.sched.turn import Turn

from .batching import Promised, Rules, check_length, longest_tokens, promised, room_pages
from .flow import ROUNDING, Flow, Row
from .physics import Speed, page_tokens
from .rates import rates
from .records import Call, Emit, ModelSpec, NodeSpec

_NEVER: Final = math.inf


class Fluid:
    """See `records.Device`. Everything is as of `_at_s`; `_due_s` is when the next thing happens if nothing changes.

    Plans are made late (`_stale`): whatever comes at the same moment as the end of a step joins the next one.
    """

    def __init__(self, node: NodeSpec, models: Sequence[ModelSpec], promises: Sequence[Promised], rules: Rules) -> None:
        self._node, self._promises, self._rules = node, promises, rules
        self._models = {spec.known.model: spec for spec in models}
        self._speeds: dict[str, Speed] = {}
        self._turn = Turn()
        self._stepper: Flow | None = None  # whose step it is, where each one is made
        self._longest: dict[str, int] = {}
        self._flows: dict[str, Flow] = {}
        self._working: list[Flow] = []
        self._used: dict[str, float] = {}
        self._at_s = 0.0
        self._due_s = self._join_s = _NEVER
        self._full = self._stale = False
        self._factor = 1.0
        self._number = 0
        self._room_pages = node.pool_pages

    def up(self, model: str, now: float) -> None:
        require(model not in self._flows, f"{model} is up on {self._node.name} already")
        spec, rules = self._models[model], self._rules
        if model not in self._speeds:
            self._speeds[model] = Speed(spec, self._node.shape)
            self._longest[model] = longest_tokens(spec, self._node, rules)
        size = page_tokens(spec, self._node.page_bytes)
        self._turn.join(model, round(spec.shape.weight_bytes / spec.known.shards))
        flow = Flow(model, self._speeds[model], self._turn.cost(model), size, rules, now)
        flow.weight_pages, flow.floor_pages = spec.known.weight_pages, spec.known.floor_pages
        if rules.parts:
            flow.ceiling_pages = room_pages(spec, self._node, rules)
        self._room_pages -= flow.weight_pages
        require(self._room_pages >= 0, f"the weights of {model} find no {flow.weight_pages} pages on {self._node.name}")
        self._touch(now)
        self._flows[model] = flow

    def down(self, model: str, now: float) -> list[int]:
        self._touch(now)
        flow = self._flows.pop(model)
        self._stepper = None if self._stepper is flow else self._stepper
        self._turn.leave(model)
        self._room_pages += flow.weight_pages
        return [row.call.id for row in flow.all_rows()]

    def begin(self, call: Call, model: str, now: float) -> None:
        check_length(call, model, self._longest[model], self._node.name)
        flow, self._number = self._flows[model], self._number + 1
        flow.enter(Row(call, promised(self._promises, call.app), self._number))
        if not self._working:
            self._at_s, self._stale = max(now, self._at_s), True
        elif not self._stale and not flow.starved:
            self._join_s = min(self._join_s, now + self._wait_s(now))

    def advance(self, now: float) -> list[Emit]:
        emits: list[Emit] = []
        while True:
            if self._stale:
                if self._at_s >= now:
                    return emits
                self._plan()
            next_s = min(self._due_s, self._join_s)
            if next_s > now:
                self._move(now)
                return emits
            self._move(next_s)
            self._happen(emits)
            self._stale = True

    def next_s(self, now: float) -> float | None:
        if self._stale:
            self._at_s = max(now, self._at_s)
            self._plan()
        next_s = min(self._due_s, self._join_s)
        return None if next_s == _NEVER else next_s

    def slow(self, factor: float, now: float) -> None:
        require(factor > 0.0, "steps take a positive time")
        self._touch(now)
        for flow in self._working:
            flow.step_s *= factor / self._factor
        self._factor = factor

    def busy(self, now: float) -> dict[str, Busy]:
        return {name: flow.busy(now) for name, flow in self._flows.items()}

    def used(self) -> Mapping[str, float]:
        return self._used

    def check(self) -> None:
        """Raise Bug unless totals are what the sequences come to."""
        for name, flow in self._flows.items():
            decoding = [row for _, _, row in flow.marks if row.alive]
            require(len(decoding) == flow.rows, f"{name}: {flow.rows} sequences decode and {len(decoding)} are known")
            known = sum(row.base + flow.steps for row in decoding)
            require(abs(known - flow.context) < 1e-3 * max(1.0, known), f"{name}: contexts do not add up")
            require(flow.works or not flow.waiting or self._stale, f"{name}: calls wait and nothing runs")

    def _touch(self, now: float) -> None:
        """Something changes now: what comes next is planned anew. The world has advanced the device to now."""
        if now > self._at_s:
            self._move(now)
        self._stale = True

    def _move(self, now: float) -> None:
        seconds, self._at_s = now - self._at_s, now
        if seconds > 0.0:
            for flow in self._working:
                flow.move(seconds)
                self._used[flow.name] = self._used.get(flow.name, 0.0) + seconds * flow.rate * flow.step_s

    def _wait_s(self, now: float) -> float:
        """Until the step that runs has ended; where several take turns, it is of the one that comes to a whole next."""
        if self._stepper is not None:
            return _NEVER
        wait_s, passed_s = _NEVER, now - self._at_s
        for flow in self._working:
            made = flow.steps + passed_s * flow.rate
            wait_s = min(wait_s, (math.floor(made + ROUNDING) + 1.0 - made) / flow.rate)
        return wait_s

    def _happen(self, emits: list[Emit]) -> None:
        stepper = self._stepper
        for flow in self._working if stepper is None else [stepper]:
            if flow.steps >= flow.goal - ROUNDING:
                flow.steps = flow.goal
                flow.settle()
                if stepper is not None:
                    flow.drew(self._at_s)
                    flow.learn()
                    self._turn.stepped(flow.name)
                emits += flow.happen(self._at_s)
        if self._full and self._at_s >= self._due_s:
            self._preempt()

    def _plan(self) -> None:
        """Who runs what from now on, and until when."""
        self._stale, self._join_s, self._full = False, _NEVER, False
        flows = [flow for flow in self._flows.values() if flow.rows or flow.prompts or flow.waiting]
        if self._stepper is None:
            for flow in self._working:
                flow.learn_made(len(self._working) == 1)
        if len(flows) > 1 and any([flow.prompts or flow.waiting for flow in flows]):
            self._plan_turn(flows)
            return
        resumes, self._stepper = self._stepper is not None, None
        if len(flows) == 1 and len(self._working) > 1 and not resumes:
            flows[0].drew(self._at_s)
            flows[0].straighten()
        open_ = []
        for flow in flows:
            if not flow.midway:
                flow.settle()
                open_.append(flow)
            elif flow.waiting and not flow.starved:
                flow.finish_step()
        budgets = self._admit(flows, open_)
        working = self._working = [flow for flow in flows if flow.rows or flow.prompts]
        if not working:
            self._due_s = _NEVER
            return
        for flow in working:
            if flow.name in budgets:
                flow.plan(budgets[flow.name], self._factor)
        self._wait_for(self._pace(working, resumes))

    def _plan_turn(self, flows: list[Flow]) -> None:
        """Somebody's prompts are computed beside the work of others: one step, of whoever's turn it is."""
        stepper = self._stepper
        if stepper is None:
            for flow in flows:
                flow.settle()
                flow.drew(self._at_s)
                flow.straighten()
        if stepper is None or stepper.steps >= stepper.goal - ROUNDING:
            stepper = self._stepper = self._next(flows)
        self._working = [flow for flow in flows if flow.rows or flow.prompts]
        for flow in self._working:
            flow.rate = 0.0
        stepper.rate = 1.0 / stepper.step_s
        self._wait_for((stepper.goal - stepper.steps) * stepper.step_s)

    def _next(self, flows: list[Flow]) -> Flow:
        idle, free = not any([flow.works for flow in flows]), self._free_pages()
        starved = [flow.waiting[0].order for flow in flows if flow.starved and flow.waiting]
        for choice in self._turn.among([(flow.name, flow.look()) for flow in flows], self._at_s):
            flow = self._flows[choice.model]
            room = max(1, self._rules.step_tokens - flow.rows)
            budget = room if choice.prompt_tokens is None else min(room, choice.prompt_tokens)
            if flow.waiting and not any([order < flow.waiting[0].order for order in starved]):
                flow.admit(budget, free + max(0.0, flow.floor_pages - flow.held_pages), idle)
            if flow.works:
                flow.plan(budget, self._factor, 1.0)
                return flow
        raise Bug(f"calls wait on {self._node.name} and nothing can run")

    def _wait_for(self, due_s: float) -> None:
        """Until then nothing happens, unless memory is full before."""
        full_s = self._full_s()
        self._full = full_s < due_s
        self._due_s = self._at_s + min(due_s, full_s)

    def _pace(self, working: list[Flow], resumes: bool) -> float:
        """How often each steps; seconds until the first has made what it planned."""
        if len(working) == 1:
            flow = working[0]
            flow.rate = 1.0 / flow.step_s
            return (flow.goal - flow.steps) * flow.step_s
        due_s = _NEVER
        for flow, rate in zip(working, rates([(flow.step_s, flow.pace_s) for flow in working]), strict=True):
            flow.rate = rate
        if resumes:
            after_s = 0.0
            for flow in sorted(working, key=lambda flow: flow.due_s):
                after_s += flow.step_s
                flow.resume(after_s)
        for flow in working:
            due_s = min(due_s, (flow.goal - flow.steps) / flow.rate)
        return due_s

    def _admit(self, flows: list[Flow], open_: list[Flow]) -> dict[str, int]:
        """Let calls of those between two steps begin, the oldest first; how many tokens of prompts a step of each has
        room for."""
        budgets: dict[str, int] = {}
        stopped, idle, free = False, not any([flow.works for flow in flows]), 0.0
        if any([flow.waiting for flow in open_]):
            free = self._free_pages()
        if len(open_) > 1 and any([flow.waiting for flow in open_]):
            open_ = sorted(open_, key=lambda flow: flow.waiting[0].order if flow.waiting else (_NEVER, 0))
        for flow in open_:
            prompting = flow.prompts or flow.waiting
            budgets[flow.name] = flow.budget(SURE * flow.limit_s if flow.rows else _NEVER) if prompting else 0
            if flow.waiting and not stopped:
                mine = free + max(0.0, flow.floor_pages - flow.held_pages)
                left = flow.admit(budgets[flow.name], mine, idle)
                idle = idle and not flow.works
                free -= mine - left
                stopped = flow.starved and free <= flow.ceiling_pages - flow.held_pages
        return budgets

    def _free_pages(self) -> float:
        return self._room_pages - sum([max(flow.held_pages, flow.floor_pages) for flow in self._flows.values()])

    def _full_s(self) -> float:
        """Until decoding has taken the last free page; never while only the oldest sequence runs."""
        working = self._working
        growth = sum([flow.growth for flow in working])
        if not growth or (len(working) == 1 and working[0].rows + len(working[0].prompts) < 2):
            return _NEVER
        shortest = self._free_pages() / growth
        if self._rules.parts:
            for flow in working:
                if flow.rows > 1 and flow.growth:
                    shortest = min(shortest, (flow.ceiling_pages - flow.held_pages) / flow.growth)
        return max(0.0, shortest)

    def _preempt(self) -> None:
        """Memory is full: the youngest sequences that decode are put off until each of the others has its next page."""
        self._full = False
        for flow in self._working:
            while flow.rows > 1 and flow.ceiling_pages - flow.held_pages < 1.0:
                flow.settle()
                flow.preempt(max((row for _, _, row in flow.marks if row.alive), key=lambda row: row.order))
        while self._free_pages() < 1.0:
            running = [
                (row.order, flow, row)
                for flow in self._working if flow.held_pages > flow.floor_pages
                for _, _, row in flow.marks if row.alive
            ]  # fmt: skip
            if len(running) < 2:
                return
            _, flow, row = max(running, key=lambda one: one[0])
            flow.settle()
            flow.preempt(row)
