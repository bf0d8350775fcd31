"""How often co-resident models step when they take turns by least slack: `sched.turn` as rates, for `fluid`.

A device that always has work to do divides its time so that the slack of all whose tokens are due is the same: each
model's period is its pace less one number. Prompts get what decoding at its pace leaves. All are means over many turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from janus_server.sched.outlook import SURE
from janus_server.sched.turn import PATIENCE

_ROUNDS: Final = 8
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
    if not any([ask.prompts for ask in asks]):
        return _paced(asks)
    prompting, starving = turns_of(asks), _starving(asks)
    if starving:
        return Rates(_passed_over(asks, starving), 0.0, 0.0)
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
    return both + [
        i for i in prompting if not asks[i].decodes and (asks[i].slack_s < due_s or asks[i].waited_s > passed_s)
    ]


def _starving(asks: Sequence[Ask]) -> list[int]:
    """Models with nothing but prompts that are late already, whose shortest step does not fit what the streams of
    others can spare: only that they are passed over too often lets them in."""
    late = [i for i, ask in enumerate(asks) if ask.prompts and not ask.decodes and ask.slack_s < 0.0]
    if not late:
        return []
    spare_s, before_s = math.inf, 0.0
    for pace_s, step_s in sorted((ask.pace_s, ask.step_s) for ask in asks if ask.decodes):
        before_s += step_s
        spare_s = min(spare_s, pace_s - before_s)
    return [i for i in late if asks[i].least_s > SURE * spare_s]


def _passed_over(asks: Sequence[Ask], starving: Sequence[int]) -> list[float]:
    """One step of each that starves to so many of the others, which go on as if they were alone."""
    others = [ask for i, ask in enumerate(asks) if i not in starving]
    shares = iter(rates(others, 0.0).steps)
    found = [0.0 if i in starving else next(shares) for i in range(len(asks))]
    each = sum(found) / PATIENCE
    return _busy(asks, [each if i in starving else rate for i, rate in enumerate(found)])


def _paced(asks: Sequence[Ask]) -> Rates:
    """Nobody has prompts: periods of pace less x, where x makes the device just busy; where x is below 0 some are late.

    Newton's method on the inverse of how busy it is, which is straight where all paces are the same.
    """
    steps = [(ask.step_s, ask.pace_s) for ask in asks]
    round_s = sum([step_s for step_s, _ in steps])
    if sum([step_s / pace_s for step_s, pace_s in steps]) > 1.0:
        return Rates(_late(asks), 0.0, round_s)
    x, most = 0.0, min([pace_s for _, pace_s in steps]) - 1e-6
    for _ in range(_ROUNDS):
        shares = [(step_s / (pace_s - x), pace_s - x) for step_s, pace_s in steps]
        busy = sum([share for share, _ in shares])
        if abs(1.0 - busy) < 1e-4:
            break
        x = min(max(x + busy * (1.0 - busy) / sum([share / left_s for share, left_s in shares]), 0.0), most)
    return Rates(_busy(asks, [1.0 / max(pace_s - x, step_s) for step_s, pace_s in steps]), SURE * x, round_s)


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
        if ask.decodes:
            early = 0.0 if i in prompting else early_s
            found[i] = 1.0 / max(ask.pace_s - early, ask.step_s, 0.2 * ask.pace_s)
            left -= found[i] * ask.step_s
    waiting = [i for i in prompting if not asks[i].decodes]
    least = _LEAST_LEFT if waiting else 0.0
    if left < least:
        # Streams are late then, each by as much of its pace, and hold up prompts that bring no tokens yet.
        scale, left = (1.0 - least) / (1.0 - left), least
        found, prompting = [rate * scale for rate in found], waiting or prompting
    round_s = sum(asks[i].step_s for i in prompting)
    for i in prompting:
        found[i] += left / round_s
    return found


def _busy(asks: Sequence[Ask], found: list[float]) -> list[float]:
    """The same in proportion, so that the device is just busy."""
    total = sum([rate * ask.step_s for rate, ask in zip(found, asks, strict=True)])
    return [rate / total for rate in found]
