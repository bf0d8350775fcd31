"""How often co-resident models step that only decode, when they take turns by least slack: `sched.turn` as rates.

`fluid` asks when it counts steps instead of making them. While all of them can be on time, a few turns are made in
plain floats, steps of one length each; who is late then follows from the time that is left. While prompts are computed
beside, `fluid` asks `sched.turn` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from janus_server.sched.turn import PATIENCE

# Of steps of each model, as many as its rate is taken from.
_ENOUGH: Final = 4


def rates(steps: Sequence[tuple[float, float]]) -> list[float]:
    """Steps a second of each, from what a step takes and the pace that its tokens are promised at. The device is busy
    all the time."""
    if sum([step_s / pace_s for step_s, pace_s in steps]) > 1.0:
        return _late(steps)
    return _busy(steps, _turns(steps))


def _turns(steps: Sequence[tuple[float, float]]) -> list[float]:
    """Each step is that of the model whose next token has the least slack, or of one that was passed over too often."""
    now = 0.0
    latest_s = [pace_s - step_s for step_s, pace_s in steps]  # when each would have to begin its next step
    passed, made = [0] * len(steps), [0] * len(steps)
    first_s, last_s = [0.0] * len(steps), [0.0] * len(steps)
    while min(made) <= _ENOUGH:
        chosen = max(range(len(steps)), key=passed.__getitem__)
        if passed[chosen] < PATIENCE:
            chosen = min(range(len(steps)), key=lambda i: (latest_s[i], -passed[i]))
        step_s, pace_s = steps[chosen]
        now += step_s
        latest_s[chosen] = min(now, latest_s[chosen] + step_s) + pace_s - step_s
        passed = [count + 1 for count in passed]
        passed[chosen] = 0
        made[chosen] += 1
        last_s[chosen] = now
        if made[chosen] == 1:
            first_s[chosen] = now
    return [(count - 1) / (last - first) for count, first, last in zip(made, first_s, last_s, strict=True)]


def _late(steps: Sequence[tuple[float, float]]) -> list[float]:
    """Who cannot be on time takes turns one step each in the time that the others leave, who keep their pace."""
    kept: set[int] = set()
    while True:
        late = [i for i in range(len(steps)) if i not in kept]
        left = 1.0 - sum(steps[i][0] / steps[i][1] for i in kept)
        period_s = sum(steps[i][0] for i in late) / max(left, 0.05)
        sooner = {i for i in late if period_s < steps[i][1]}
        if not sooner or len(sooner) == len(late):
            return _busy(steps, [1.0 / (pace_s if i in kept else period_s) for i, (_, pace_s) in enumerate(steps)])
        kept |= sooner


def _busy(steps: Sequence[tuple[float, float]], found: list[float]) -> list[float]:
    """The same in proportion, so that the device is just busy."""
    total = sum([rate * step_s for rate, (step_s, _) in zip(found, steps, strict=True)])
    return [rate / total for rate in found]
