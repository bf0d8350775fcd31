"""What this device reaches with a model, from the first steps of that model: the numbers that the roofline needs.

`telemetry` tells it of steps until it knows enough. No data sheet says what one's CPU does with one's weights; the
steps do. Once known it stays as it is: whatever changes later is the oracle's to learn. Pure.
"""

from __future__ import annotations

from typing import Final

from janus_server.sched.cost import Shape, StepCost
from janus_server.sched.shapes import DeviceShape, ModelShape

# Steps until the four numbers of a step's cost are known well enough, and of them such with part of a prompt.
STEPS: Final = 48
PROMPT_STEPS: Final = 4
_PROMPT_TOKENS: Final = 8
# A prompt's token takes at least this part of a step, so that the device's speed stays finite.
_LEAST_PART: Final = 1e-4


class Calibration:
    """One model on this device, as long as its steps are watched."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._cost = StepCost(int(shape.weight_bytes))
        self._prompt_steps = self._prompt_tokens = 0

    def step(self, rows: int, prompt_tokens: int, took_s: float) -> None:
        """A step with so many sequences that drew a token, and so many tokens of prompts beside."""
        self._cost.observe(Shape(decodes=rows, prompt_tokens=prompt_tokens), took_s)
        if prompt_tokens >= _PROMPT_TOKENS:
            self._prompt_steps += 1
            self._prompt_tokens += prompt_tokens

    def device(self, memory_bytes: float) -> DeviceShape | None:
        """The device as this model sees it, with so much memory for weights and KV; None while too little is known.

        Its bandwidth is that at which a step of one row is as long as it was, its FLOPs those at which one with a
        prompt of the usual length is: reading and arithmetic overlap in the roofline, so that all of such a step is
        arithmetic. Nothing else of a step is told apart, and all of it is reached.
        """
        if self._cost.observed < STEPS or self._prompt_steps < PROMPT_STEPS:
            return None
        one_s, usual = self._cost.seconds(Shape(decodes=1)), self._prompt_tokens // self._prompt_steps
        token_s = max(self._cost.seconds(Shape(prompt_tokens=usual)) / usual, one_s * _LEAST_PART)
        bytes_s = self._shape.weight_bytes / max(one_s, 1e-7)
        return DeviceShape(
            name="this machine", flops=2.0 * self._shape.active_parameters / token_s, memory_bytes=memory_bytes,
            bandwidth_bytes_s=bytes_s, link_bytes_s=bytes_s, flops_reached=1.0, bandwidth_reached=1.0, link_reached=1.0,
            memory_reached=1.0, step_s=0.0, activation_bytes=0.0,
        )  # fmt: skip
