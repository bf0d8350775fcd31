"""What clients ask of a cluster under chaos, and how it ended: right, with an error, or wrong.

The same few requests again and again at a set rate, to every node by its own connections, with the client of `bench
serve`. Every answer is greedy, so that it can be compared, word for word, with what was said when nothing was wrong: a
token twice or missing is another text.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast

from .load import LoadRun
from .records import Application, Outcome, Plan, Written
from .target import Caller, make_target
from .wording import IdWording

# Of a request that a stopped node keeps waiting; beyond it nothing has ended it, which is wrong anywhere.
TIMEOUT_S: Final = 90.0
# Ids that every vocabulary has; those of printable characters where each byte has a token of its own.
_PROMPTS: Final = tuple(tuple(range(4 + number, 90, 5 + number)) for number in range(4))
# Greedy, and yet never the same few tokens over and over: among those one more or less would not be seen.
_SAMPLING: Final = MappingProxyType({"temperature": 0, "frequency_penalty": 1.0})
_MOST: Final = 100_000

Key = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Asking:
    """models are asked in turn, for `tokens` tokens each; rate is of requests a second on each node."""

    models: tuple[str, ...]
    rate: float
    tokens: int
    key: str


@dataclasses.dataclass(slots=True)
class Tally:
    """Of the requests of one node's connections. failed: those that ended with an error, other: with a wrong text."""

    begun: int = 0
    right: int = 0
    failed: int = 0
    other: int = 0
    never: int = 0
    slowest_s: float = 0.0
    reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def not_right(self) -> int:
        return self.begun - self.right

    def add(self, outcome: Outcome, expected: str) -> None:
        self.begun += 1
        text = outcome.text or ""
        if outcome.ok and text == expected:
            self.right += 1
            self.slowest_s = max(self.slowest_s, outcome.e2el_s)
        elif outcome.ok or not expected.startswith(text):
            self.other += 1
            self.reasons["another text"] += 1
        elif outcome.failure == "timeout":
            self.never += 1
            self.reasons["no end"] += 1
        else:
            self.failed += 1
            self.reasons[f"{outcome.failure}: {outcome.detail}"[:100]] += 1


class Load:
    """`begin`, then `end`; between them `right(node)` grows."""

    def __init__(self, asking: Asking, texts: Mapping[Key, str], urls: Mapping[str, str], seed: int) -> None:
        self._texts = texts
        self._runs = {
            node: _run(asking, url, _plans(asking, f"{seed}-{node}"), f"chaos-{node}-{seed}-")
            for node, url in urls.items()
        }
        self._tasks: list[asyncio.Task[list[Outcome]]] = []

    def begin(self) -> None:
        self._tasks = [asyncio.create_task(run.run()) for run in self._runs.values()]

    def right(self, node: str) -> int:
        return self._runs[node].counts.completed

    def under_way(self) -> tuple[int, int, int]:
        """Requests sent, ended as they should, and ended otherwise."""
        counts = [run.counts for run in self._runs.values()]
        return sum(c.sent for c in counts), sum(c.completed for c in counts), sum(c.failed for c in counts)

    async def end(self) -> dict[str, Tally]:
        """Send nothing more, wait for what is under way, and count; by node."""
        for run in self._runs.values():
            run.enough()
        await asyncio.gather(*self._tasks)
        found: dict[str, Tally] = {}
        for node, run in self._runs.items():
            tally = found[node] = Tally()
            for outcome in run.outcomes:
                tally.add(outcome, self._texts[_key(outcome.plan)])
        return found


async def undisturbed(asking: Asking, url: str) -> dict[Key, str]:
    """What every request is answered with when nothing is wrong; the same twice, or nothing can be compared."""
    plans = [
        Plan(0.0, Application(model, model), Written(prompt), asking.tokens)
        for _ in range(2)
        for model in asking.models
        for prompt in _PROMPTS
    ]
    found: dict[Key, str] = {}
    for outcome in await _run(asking, url, plans, "chaos-before-").run():
        if not outcome.ok:
            raise RuntimeError(f"a request failed before anything was done: {outcome.failure}: {outcome.detail}")
        text = outcome.text or ""
        if found.setdefault(_key(outcome.plan), text) != text:
            raise RuntimeError("this model does not answer the same request twice with the same text")
    return found


def together(tallies: Mapping[str, Tally], nodes: Collection[str]) -> Tally:
    """The sum over these nodes."""
    whole = Tally()
    for node in nodes:
        one = tallies[node]
        for field in ("begun", "right", "failed", "other", "never"):
            setattr(whole, field, getattr(whole, field) + getattr(one, field))
        whole.slowest_s = max(whole.slowest_s, one.slowest_s)
        whole.reasons.update(one.reasons)
    return whole


def _plans(asking: Asking, seed: str) -> Sequence[Plan]:
    """More than will be sent: whoever ends the load decides how many."""
    draw = random.Random(seed)
    apps = [Application(model, model) for model in asking.models]
    plans: list[Plan] = []
    due_s = 0.0
    for number in range(min(_MOST, int(600 * asking.rate))):
        due_s += draw.expovariate(asking.rate)
        prompt = Written(draw.choice(_PROMPTS))
        plans.append(Plan(due_s, apps[number % len(apps)], prompt, asking.tokens))
    return plans


def _run(asking: Asking, url: str, plans: Sequence[Plan], prefix: str) -> LoadRun:
    target = make_target(url, "completions", (), asking.key, insecure=False)
    caller = Caller(
        target, IdWording(5, 250, 0), sampling=_SAMPLING, ignore_eos=True, running_usage=False,
        extra_body={}, id_prefix=prefix,
    )  # fmt: skip
    return LoadRun(target, caller, plans, timeout_s=TIMEOUT_S, keep_text=True)


def _key(plan: Plan) -> Key:
    prompt = plan.prompt
    return plan.app.model, cast("tuple[int, ...]", prompt.content) if isinstance(prompt, Written) else ()
