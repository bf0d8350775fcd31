"""How long a step of one model will take, learnt from the steps that it ran. Pure; `turn` asks it and tells it.

A step costs something however little is in it (the weights are read once), something for every sequence that decodes,
for every token of a prompt, and for every cached token that a row attends to: four numbers, none below zero, fitted by
recursive least squares. Nothing here knows of deadlines.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from janus_server.types import Batch

# Before the first step: a machine that reads 10 GB/s of weights and does a row in two fifths of the time that takes.
_FIXED_S: Final = 200e-6
_READ_BYTES_S: Final = 10e9
_ROW_S: Final = 20e-6
_ROW_PART: Final = 0.4
_CONTEXT_PART: Final = 1e-3  # of a row's time, for each token it attends to
# The guess may be wrong by a factor of twenty in each number: it only decides what no step has told yet.
_GUESS_WEIGHT: Final = 0.002
# What was learnt of a part counts 2 % less with each step that has that part: the last 50 such steps decide. When a
# step is off by half, the machine may have changed its speed, as a shared one does within seconds: then 10 %.
_FORGET: Final = 0.98
_FORGET_OFF: Final = 0.9
_OFF: Final = 1.5
# A step that took longer by more than this factor was held up by something else; the same the other way round.
_OUTLIER: Final = 3.0
_SURE_AFTER: Final = 32
_RIDGE: Final = 1e-7
# What is beyond these is no time of a step.
_SHORTEST_S: Final = 1e-7
_LONGEST_S: Final = 1e5


class Shape(msgspec.Struct, frozen=True):
    """What is in a step: sequences that compute one token, tokens of longer chunks, and pairs of row and token that it
    attends to.
    """

    decodes: int = 0
    prompt_tokens: int = 0
    context_tokens: float = 0.0


def shape_of(batch: Batch) -> Shape:
    """Example: chunks of one token at position 99 and of ten from position 0 on attend to 100 + 55 tokens."""
    decodes = prompt = context = 0
    for chunk in batch.chunks:
        n = len(chunk.tokens)
        if n == 1:
            decodes += 1
        else:
            prompt += n
        context += n * (2 * chunk.start + n + 1)
    return Shape(decodes, prompt, context / 2)


class PromptCost(msgspec.Struct, frozen=True):
    """What was learnt of prompts of one model, for those who plan elsewhere: seconds of a step, of a token, and of a
    token for each one before it; a step has step_tokens at most."""

    fixed_s: float
    token_s: float
    context_s: float
    step_tokens: int

    @property
    def sound(self) -> bool:
        """Its numbers are numbers, and times of steps."""
        parts = (self.fixed_s, self.token_s, self.context_s)
        return self.step_tokens > 0 and all(0.0 <= part < _LONGEST_S for part in parts)

    def work_s(self, tokens: int) -> float:
        """A prompt of so many tokens, alone."""
        return -(-tokens // self.step_tokens) * self.fixed_s + tokens * (self.token_s + self.context_s * tokens / 2)


class StepCost:
    """Predicts the seconds of a step from its shape. `observe` a measured one and the next prediction is better.

    Example: where a step takes 2 ms and 0.5 ms for each decode, and steps of 1 to 8 decodes were observed, one of 20
    is predicted to take 12 ms. What a prompt's token takes is then still the guess, in proportion to those.

    weight_bytes sets the first guess. The first observation sets the speed of the machine, all four numbers at once.
    """

    def __init__(self, weight_bytes: int = 0) -> None:
        row_s = _ROW_S + _ROW_PART * weight_bytes / _READ_BYTES_S
        self._theta = [_FIXED_S + weight_bytes / _READ_BYTES_S, row_s, row_s, _CONTEXT_PART * row_s]
        # How sure the numbers are: the inverse of their covariance, relative to what a step takes.
        self._precision = [[0.0] * 4 for _ in range(4)]
        self.observed = 0

    @property
    def fixed_s(self) -> float:
        """What a step takes before anything is in it."""
        return self._theta[0]

    def seconds(self, shape: Shape) -> float:
        fixed, decode, token, context = self._theta
        return fixed + decode * shape.decodes + token * shape.prompt_tokens + context * shape.context_tokens

    def prompt(self, step_tokens: int) -> PromptCost | None:
        """What it takes to compute prompts in steps of so many tokens; None before anything was observed."""
        fixed_s, _, token_s, context_s = self._theta
        return PromptCost(fixed_s, token_s, context_s, step_tokens) if self.observed else None

    def prompt_s(self, tokens: int, start: float, step_tokens: int, beside: Shape) -> float:
        """Seconds until that many prompt tokens from position `start` on are computed, in steps with room for
        step_tokens of them, each beside the decodes of `beside`.
        """
        steps = -(-tokens // step_tokens)
        return steps * self.seconds(beside) + tokens * (self._theta[2] + self._theta[3] * (start + tokens / 2))

    def tokens_within(self, budget_s: float, start: float, beside: Shape) -> float:
        """How many prompt tokens from position `start` on fit a step of budget_s beside `beside`; infinite where they
        cost nothing. The inverse of `prompt_s` for one step.
        """
        if budget_s == math.inf:
            return math.inf
        spare_s = max(0.0, budget_s - self.seconds(beside))
        token_s = self._theta[2] + self._theta[3] * start
        root = token_s + math.sqrt(token_s * token_s + 2 * self._theta[3] * spare_s)
        return 2 * spare_s / root if root > 0 else math.inf

    def least_tokens(self) -> float:
        """A chunk whose rows take as long as what every step takes: cutting to it at most doubles a prompt's time."""
        token_s = self._theta[2]
        return self._theta[0] / token_s if token_s > 0 else math.inf

    def observe(self, shape: Shape, took_s: float, times: int = 1) -> None:
        """Learn from a step, or from `times` of them that were alike. What cannot be the time of one (zero, negative,
        not finite) teaches nothing."""
        if not _SHORTEST_S < took_s < _LONGEST_S:
            return
        expected_s = max(self.seconds(shape), _SHORTEST_S)
        if self.observed == 0:
            self._scale(took_s / expected_s)
            expected_s = took_s
        elif self.observed >= _SURE_AFTER:
            took_s = min(max(took_s, expected_s / _OUTLIER), expected_s * _OUTLIER)
        self.observed += times
        self._learn(shape, expected_s, took_s, times)

    def _scale(self, factor: float) -> None:
        self._theta = [factor * value for value in self._theta]
        for i, value in enumerate(self._theta):
            self._precision[i][i] = _GUESS_WEIGHT / (value * value)

    def _learn(self, shape: Shape, expected_s: float, took_s: float, times: int) -> None:
        """One step of least squares on relative errors. What would fall below zero is put there, the rest fitted anew.

        Only what is in the step is forgotten a little: after a thousand steps without a prompt, the first one does not
        find that nothing is known of prompts.
        """
        x = (1.0, float(shape.decodes), float(shape.prompt_tokens), shape.context_tokens)
        weight = 1 / (took_s * expected_s)
        off = took_s > expected_s * _OFF or took_s * _OFF < expected_s
        forget = _FORGET_OFF if off else _FORGET
        if times > 1:  # the first of them counts less when the last is in
            weight *= (1.0 - forget**times) / (1.0 - forget)
            forget **= times
        kept = [forget**0.5 if value else 1.0 for value in x]
        precision = self._precision
        pulls = [weight * value for value in x]
        for row, keep, part in zip(precision, kept, pulls, strict=True):
            row[:] = [old * keep * by + part * value for old, by, value in zip(row, kept, x, strict=True)]
        pull = [part * (took_s - expected_s) for part in pulls]
        free = [0, 1, 2, 3]
        while free:
            changes = _solved(precision, pull, free)
            below = [i for i, change in zip(free, changes, strict=True) if self._theta[i] + change < 0]
            if not below:
                for i, change in zip(free, changes, strict=True):
                    self._theta[i] += change
                return
            for i in below:
                free.remove(i)
                for j in free:
                    pull[j] += precision[j][i] * self._theta[i]
                self._theta[i] = 0.0


def _solved(precision: list[list[float]], pull: list[float], free: list[int]) -> list[float]:
    """The x with precision · x = pull over the rows and columns in `free`: elimination, made solvable by a small ridge
    on the scaled diagonal, since steps that all look alike say nothing of their parts.
    """
    size = len(free)
    scale = [precision[i][i] ** -0.5 for i in free]
    rows = [
        [precision[i][j] * a * b for j, b in zip(free, scale, strict=True)] for i, a in zip(free, scale, strict=True)
    ]
    x = [pull[i] * a for i, a in zip(free, scale, strict=True)]
    for k in range(size):
        rows[k][k] += _RIDGE
    for k, first in enumerate(rows):
        for i in range(k + 1, size):
            row = rows[i]
            factor = row[k] / first[k]
            for j in range(k + 1, size):
                row[j] -= factor * first[j]
            x[i] -= factor * x[k]
    for k in reversed(range(size)):
        for j in range(k + 1, size):
            x[k] -= rows[k][j] * x[j]
        x[k] /= rows[k][k]
    return [value * a for value, a in zip(x, scale, strict=True)]
