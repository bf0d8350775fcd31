"""What one model's sequences need of the device, and by when: the view that `turn` has of a batcher. Pure.

`Outlook` is taken once for every change of a batcher; `stand` asks it how the model stands at a moment, by a few
searches by halves. Neither changes anything.
"""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Final

import msgspec

from janus_server.sched.batcher import Batcher
from janus_server.sched.cost import Shape, StepCost
from janus_server.sched.sequence import OWED_TOKENS, Lane, Sequence

# Of those that wait, so many are looked at: who stands behind them is not admitted in this step.
AHEAD: Final = 4
# A prompt is given up once it would be late even if it took that part of what is predicted.
SURE: Final = 0.8
LEAST_TOKENS: Final = 8


class Streams(msgspec.Struct, frozen=True):
    """Sequences of one lane that are one token behind: when their tokens are due, earliest first."""

    lane: Lane
    due_s: list[float]


class Prompt(msgspec.Struct, frozen=True):
    """work_tokens is what the model computes until this prompt is done, the others' share of its steps included.

    late_s is how late it may be and still be worth a hurry: a stream that was preempted makes up for a few tokens.
    """

    priority: int
    due_s: float
    late_s: float
    start: int
    work_tokens: int


class Stand(msgspec.Struct, frozen=True):
    """How a model stands at a moment.

    slack_s is the least of those sequences that can still be on time, for each priority among them, and `least_s` the
    least of all, need_s the time that one's work takes; infinite where there is none. lost is the highest priority of
    those that cannot be on time, bears_s how long a step of another these are to bear at most. own_s is what a step of
    its own may take before one of its streams with a promise is late. step_s is its shortest step.
    """

    slack_s: dict[int, float]
    least_s: float
    need_s: float
    lost: int | None
    bears_s: float
    own_s: float
    step_s: float


class Outlook(msgspec.Struct, frozen=True):
    """A batcher's sequences as of its `changes`. beside is what each of its steps has to do apart from prompts."""

    batcher: Batcher
    changes: int
    streams: tuple[Streams, ...]
    prompts: tuple[Prompt, ...]
    beside: Shape
    start: float

    @property
    def step_tokens(self) -> int:
        """Room for prompts in a step."""
        return max(1, self.batcher.limits.step_tokens - self.beside.decodes)


def look(batcher: Batcher) -> Outlook:
    """Go through a batcher's sequences once."""
    dues: dict[Lane, list[float]] = {}
    prompts: list[Sequence] = []
    context = count = 0
    for seq in batcher.running:
        known = len(seq.tokens)
        if known - seq.computed == 1:
            dues.setdefault(seq.lane, []).append(seq.due_s)
            context += known
            count += 1
        else:
            prompts.append(seq)
    start = sum(seq.computed for seq in prompts) / len(prompts) if prompts else 0.0
    if batcher.admits:
        prompts += batcher.waiting[:AHEAD]
    return Outlook(
        batcher,
        batcher.changes,
        tuple(Streams(lane, sorted(due_s)) for lane, due_s in dues.items()),
        _prompts(prompts, batcher.limits.one_prompt_at_a_time),
        Shape(count, 0, context),
        start,
    )


def stand(outlook: Outlook, cost: StepCost, now: float) -> Stand:
    """How the model stands now, by what its steps are predicted to take."""
    decode_s = cost.seconds(outlook.beside)
    slacks: dict[int, float] = {}
    least_s = need_s = bears_s = own_s = math.inf
    lost: list[int] = []
    for group in outlook.streams:
        priority, pace_s, paced = group.lane
        at = bisect.bisect_left(group.due_s, now + decode_s - OWED_TOKENS * pace_s)
        if at:
            lost.append(priority)
            bears_s = min(bears_s, pace_s)
        if at < len(group.due_s):
            slack_s = group.due_s[at] - now - decode_s
            slacks[priority] = min(slack_s, slacks.get(priority, math.inf))
            own_s = min(own_s, group.due_s[at] - now) if paced else own_s
            if slack_s < least_s:
                least_s, need_s = slack_s, decode_s
    for prompt in outlook.prompts:
        work_s = cost.prompt_s(prompt.work_tokens, prompt.start, outlook.step_tokens, outlook.beside)
        left_s = prompt.due_s - now
        if left_s + prompt.late_s < SURE * work_s:
            lost.append(prompt.priority)
            continue
        slacks[prompt.priority] = min(left_s - work_s, slacks.get(prompt.priority, math.inf))
        if left_s - work_s < least_s:
            least_s, need_s = left_s - work_s, work_s
    chunk_s = 0.0
    if outlook.prompts:
        chunk_s = cost.prompt_s(least_tokens(outlook, cost), outlook.start, outlook.step_tokens, outlook.beside)
    return Stand(
        slacks, least_s, need_s, max(lost, default=None), bears_s, own_s, max(decode_s, chunk_s)
    )  # fmt: skip


def least_tokens(outlook: Outlook, cost: StepCost) -> int:
    """The smallest chunk that a step of the model is cut to: an eighth of a whole step at most."""
    least = min(cost.least_tokens(), outlook.step_tokens // 8)
    return min(max(LEAST_TOKENS, int(least)), outlook.step_tokens)


def tokens_within(outlook: Outlook, cost: StepCost, budget_s: float) -> int | None:
    """How many tokens of prompts a step may compute so that it takes budget_s, but never less than the smallest chunk.

    None where that is no bound.
    """
    most = cost.tokens_within(budget_s, outlook.start, outlook.beside)
    if most >= outlook.step_tokens:
        return None
    return max(least_tokens(outlook, cost), int(most))


def works_of(gaps: list[int], one_at_a_time: bool) -> list[int]:
    """What is computed until each of these prompts is. Where they share steps equally, one is done when each of the
    others has computed as much, or all it has."""
    works = list(itertools.accumulate(gaps))
    if not one_at_a_time:
        done = 0
        for place, i in enumerate(sorted(range(len(gaps)), key=gaps.__getitem__)):
            works[i] = done + gaps[i] * (len(gaps) - place)
            done += gaps[i]
    return works


def _prompts(sequences: list[Sequence], one_at_a_time: bool) -> tuple[Prompt, ...]:
    if not sequences:
        return ()
    works = works_of([seq.gap for seq in sequences], one_at_a_time)
    return tuple(
        Prompt(
            seq.lane.priority, seq.due_s, OWED_TOKENS * seq.lane.pace_s if seq.generated else 0.0, seq.computed, work
        )
        for seq, work in zip(sequences, works, strict=True)
    )
