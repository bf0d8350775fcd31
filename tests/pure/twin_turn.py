"""A device on which models take turns, in simulated seconds: real batchers and turns, steps of known cost.

`run` drives arrivals to their end under a policy and returns when every token came; `attained` counts who kept its
promise. `RoundRobin` is the policy that knows no deadlines, `Scripted` one given order of steps, for exhaustive search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from twin_batcher import Node, request_of

from janus_server.sched.batcher import Batcher
from janus_server.sched.cost import Shape, shape_of
from janus_server.sched.turn import Choice, Turn
from janus_server.types import Batch, Promise, Request


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a step of a model truly takes."""

    fixed_s: float = 0.004
    decode_s: float = 0.0005
    token_s: float = 0.0005
    context_s: float = 0.0

    def of(self, shape: Shape) -> float:
        return (
            self.fixed_s
            + self.decode_s * shape.decodes
            + self.token_s * shape.prompt_tokens
            + self.context_s * shape.context_tokens
        )


@dataclasses.dataclass(frozen=True)
class Arrival:
    at_s: float
    model: int
    request: Request


class RoundRobin:
    """Least recently served first, whole steps."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._count = 0

    def choices(self, now: float, at_work: Sequence[tuple[str, Batcher]]) -> Iterator[Choice]:
        for model, _ in sorted(at_work, key=lambda one: self._last.get(one[0], 0)):
            yield Choice(model, None)

    def took(self, model: str, batch: Batch, step_s: float) -> None:
        self._count += 1
        self._last[model] = self._count


class Scripted:
    """Runs the models in a given order, then as they come; `forks` are the places where others could have run."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.options: list[int] = []

    def choices(self, now: float, at_work: Sequence[tuple[str, Batcher]]) -> Iterator[Choice]:
        step = len(self.options)
        first = self.script[step] if step < len(self.script) else 0
        self.options.append(len(at_work))
        for i in range(len(at_work)):
            yield Choice(at_work[(first + i) % len(at_work)][0], None)

    def took(self, model: str, batch: Batch, step_s: float) -> None:
        pass


Policy = Turn | RoundRobin | Scripted


@dataclasses.dataclass(frozen=True)
class Step:
    model: str
    start_s: float
    took_s: float
    shape: Shape
    at_work: tuple[str, ...]


class World:
    """One device and `speeds` models on it. Time passes while a step runs and while nothing is there to do."""

    def __init__(self, policy: Policy, speeds: Sequence[Speed], pages: int = 4000, **limits: int | bool) -> None:
        self.node = Node(pages, page_tokens=16, models=len(speeds), **limits)
        self.names = [f"m{i}" for i in range(len(speeds))]
        self.speeds = dict(zip(self.names, speeds, strict=True))
        self.batchers = dict(zip(self.names, self.node.batchers, strict=True))
        self.policy = policy
        self.now = 0.0
        self.steps: list[Step] = []
        self.tokens: dict[str, list[float]] = {}
        if isinstance(policy, Turn):
            for name in self.names:
                policy.join(name)

    def run(self, arrivals: Sequence[Arrival], until_s: float = 1e9) -> None:
        queue = sorted(arrivals, key=lambda a: a.at_s)
        while self.now < until_s:
            while queue and queue[0].at_s <= self.now:
                one = queue.pop(0)
                self.batchers[self.names[one.model]].add(one.request, one.at_s)
            if not self.step():
                if not queue:
                    return
                self.now = max(self.now, queue[0].at_s)

    def step(self) -> bool:
        at_work = [(name, batcher) for name, batcher in self.batchers.items() if not batcher.idle]
        for choice in self.policy.choices(self.now, at_work) if at_work else ():
            batcher = self.batchers[choice.model]
            batch = batcher.plan(self.now, choice.prompt_tokens)
            if batch is None:
                continue
            shape = shape_of(batch)
            took_s = self.speeds[choice.model].of(shape)
            self.steps.append(Step(choice.model, self.now, took_s, shape, tuple(name for name, _ in at_work)))
            self.now += took_s
            for emit in batcher.commit(batch, *self.node.memory.run(batch), self.now):
                if emit.token is not None:
                    self.tokens.setdefault(emit.request_id, []).append(self.now)
            self.policy.took(choice.model, batch, took_s)
            return True
        return False


def promised(
    name: str, prompt: int, max_tokens: int, ttft_s: float | None, tpot_s: float | None, priority: int = 0
) -> Request:
    """Prompts of different requests have nothing in common, so that no prefix is found."""
    tokens = tuple((i * 7 + zlib_of(name)) % 97 + 10 for i in range(prompt))
    promise = None if ttft_s is None and tpot_s is None else Promise(ttft_s, tpot_s)
    return request_of(name, tokens, max_tokens=max_tokens, promise=promise, priority=priority)


def zlib_of(name: str) -> int:
    return sum(ord(letter) * 131**i for i, letter in enumerate(name))


def attained(arrivals: Sequence[Arrival], tokens: dict[str, list[float]]) -> set[str]:
    """Requests whose first token came in time and whose mean time per further token is as promised."""
    kept = set()
    for one in arrivals:
        promise, came = one.request.promise, tokens[one.request.id]
        ttft_s = came[0] - one.at_s
        tpot_s = (came[-1] - came[0]) / (len(came) - 1) if len(came) > 1 else 0.0
        slow = promise is not None and (
            (promise.ttft_s is not None and ttft_s > promise.ttft_s + 1e-9)
            or (promise.tpot_s is not None and tpot_s > promise.tpot_s + 1e-9)
        )
        if not slow:
            kept.add(one.request.id)
    return kept
