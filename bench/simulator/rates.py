"""How often co-resident models step when they take turns by least slack: `sched.turn` as rates, for `fluid`.

A device that always has work to do divides its time so that the slack of all whose tokens are due is the same: each
model's period is its pace less one number. Prompts get what decoding at its pace leaves. All are means over many turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from janus_server.sched.outlook import LEAST_TOKENS, SURE
from janus_server.sched.turn import PATIENCE

from .physics import Speed

_ROUNDS: Final = 24
# Who is passed over too often goes first whatever is due: prompts never get less of the time.
_LEAST_LEFT: Final = 0.1


class Ask(NamedTuple):
    """A model with work: what its step takes, between which its tokens are due, and whether prompts are in it.

    slack_s: of its prompts, by when the first is promised less what they need; decodes: some sequence of it decodes.
    least_s: its shortest step that goes on with prompts; waited_s: how long ago the first of them came.
    """

    step_s: float
    least_s: float
    pace_s: float
    prompts: bool
    decodes: bool
    slack_s: float
    waited_s: float


class Rates(NamedTuple):
    """steps a second of each, and how much slack tokens have at least when the device turns to them: so long can all
    that decodes wait for prompts to come, once. round_s: all of them have made a step."""

    steps: list[float]
    spare_s: float
    round_s: float


def rates(asks: Sequence[Ask], spare_s: float) -> Rates:
    """The device is busy all the time. spare_s: what is left of how long all that decodes can wait for prompts."""
    if len(asks) == 1:
        ask = asks[0]
        return Rates([1.0 / ask.step_s], SURE * max(0.0, ask.pace_s - ask.step_s), ask.step_s)
    if not any(ask.prompts for ask in asks):
        return _paced(asks)
    prompting = turns_of(asks)
    if spare_s > 0.0:
        round_s = sum(asks[i].step_s for i in prompting)
        return Rates([1.0 / round_s if i in prompting else 0.0 for i in range(len(asks))], 0.0, 0.0)
    return Rates(_beside_prompts(asks, prompting), 0.0, 0.0)


def turns_of(asks: Sequence[Ask]) -> list[int]:
    """Whose prompts are gone on with, in turn: of models that decode too, whose tokens are due before other models'
    prompts are; where there is none, of the model whose prompts have the least slack."""
    prompting = [i for i, ask in enumerate(asks) if ask.prompts]
    both = [i for i in prompting if asks[i].decodes]
    if not both:
        return [min(prompting, key=lambda i: asks[i].slack_s)]
    if len(both) == len(prompting):
        return both
    passed_s = PATIENCE * sum(asks[i].step_s for i in both) / len(both)
    due_s = min(asks[i].pace_s for i in both)
    return both + [i for i in prompting if not asks[i].decodes and (asks[i].slack_s < due_s or asks[i].waited_s > passed_s)]


def chunk_tokens(speed: Speed, rows: int, context: float, start: float, budget_s: float, step_tokens: int) -> int:
    """Tokens of prompts that a step of at most budget_s has room for, but never less than the smallest chunk."""
    room = max(1, step_tokens - rows)
    if budget_s == math.inf:
        return room
    spare_s = budget_s - speed.fixed_s - rows * (speed.token_s + speed.wire_s) - context * speed.pair_s
    most = spare_s / (speed.token_s + speed.wire_s + start * speed.pair_s)
    if most >= room:
        return room
    least = min((speed.dense_s + speed.fixed_s) / speed.token_s, room // 8)
    return min(room, max(LEAST_TOKENS, int(least), int(most)))


def _paced(asks: Sequence[Ask]) -> Rates:
    """Nobody has prompts: periods of pace less x, where x makes the device just busy; where x is below 0 some are late."""
    round_s = sum(ask.step_s for ask in asks)
    if sum(ask.step_s / ask.pace_s for ask in asks) > 1.0:
        return Rates(_late(asks), 0.0, round_s)
    low, high = 0.0, min(ask.pace_s for ask in asks)
    for _ in range(_ROUNDS):
        x = (low + high) / 2.0
        busy = sum(ask.step_s / max(ask.pace_s - x, 1e-9) for ask in asks)
        low, high = (x, high) if busy <= 1.0 else (low, x)
    found = [1.0 / max(ask.pace_s - low, ask.step_s) for ask in asks]
    return Rates(_busy(asks, found), SURE * low, round_s)


def _late(asks: Sequence[Ask]) -> list[float]:
    """Who cannot be on time takes turns one step each in the time that the others leave, who keep their pace."""
    kept: set[int] = set()
    while True:
        late = [i for i in range(len(asks)) if i not in kept]
        left = 1.0 - sum(asks[i].step_s / asks[i].pace_s for i in kept)
        period_s = sum(asks[i].step_s for i in late) / max(left, 0.05)
        sooner = {i for i in late if period_s < asks[i].pace_s}
        if not sooner or len(sooner) == len(late):
            found = [1.0 / (ask.pace_s if i in kept else period_s) for i, ask in enumerate(asks)]
            return _busy(asks, found)
        kept |= sooner


def _beside_prompts(asks: Sequence[Ask], prompting: Sequence[int]) -> list[float]:
    """Decoding goes just in time, prompts in all that is left."""
    early_s = max(asks[i].least_s for i in prompting) * (1.0 / SURE - 0.5)
    found, left = [0.0] * len(asks), 1.0
    for i, ask in enumerate(asks):
        if i not in prompting and ask.decodes:
            found[i] = 1.0 / max(ask.pace_s - early_s, ask.step_s, 0.2 * ask.pace_s)
            left -= found[i] * ask.step_s
    if left <= _LEAST_LEFT:
        period_s = sum(ask.step_s for i, ask in enumerate(asks) if i in prompting or ask.decodes)
        return [1.0 / period_s if i in prompting or ask.decodes else 0.0 for i, ask in enumerate(asks)]
    round_s = sum(asks[i].step_s for i in prompting)
    for i in prompting:
        found[i] = left / round_s
    return found


def _busy(asks: Sequence[Ask], found: list[float]) -> list[float]:
    """The same in proportion, so that the device is just busy."""
    total = sum(rate * ask.step_s for rate, ask in zip(found, asks, strict=True))
    return [rate / total for rate in found]
