"""What one step of a model takes on a device, from their shapes alone: time, work, bytes and memory. Pure arithmetic.

`oracle_prior` predicts models with it that nobody has measured, and the simulator's imaginary devices run by it. Every
function takes numbers or numpy arrays that broadcast, so that 62 models are one call. It knows no scheduler, no clock
and no noise: whoever measures real devices corrects it (`oracle`), it is never fitted here.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from janus_server.errors import require
from janus_server.sched.shapes import DeviceShape as DeviceShape
from janus_server.sched.shapes import ModelShape as ModelShape

Numbers: TypeAlias = Any
"""A float, or an array of float64."""


class Physics(NamedTuple):
    """One shard of a model on its device, as `step` needs it: numbers, or arrays of many models (`stack`).

    flops_s and bytes_s are what the device reaches; memory_bytes is what models may have of it.
    """

    token_flops: Numbers
    pair_flops: Numbers
    dense_bytes: Numbers
    expert_bytes: Numbers
    unchosen_share: Numbers
    kv_bytes: Numbers
    weight_bytes: Numbers
    exchange_token_s: Numbers
    exchange_s: Numbers
    flops_s: Numbers
    bytes_s: Numbers
    memory_bytes: Numbers
    activation_bytes: Numbers
    fixed_s: Numbers


class Work(NamedTuple):
    """A step: new tokens that are computed, (token, token looked at) pairs, and tokens whose KV is read."""

    tokens: Numbers
    pairs: Numbers
    kv_tokens: Numbers


class Cost(NamedTuple):
    """Of a step, for one shard."""

    seconds: Numbers
    flops: Numbers
    bytes: Numbers


ASCEND_910C: Final = DeviceShape(
    name="Ascend 910C die", flops=376e12, memory_bytes=64e9, bandwidth_bytes_s=1.49e12, link_bytes_s=163.6e9
)
DEVICES: Final = (
    ASCEND_910C,
    DeviceShape(name="H100 SXM", flops=989e12, memory_bytes=80e9, bandwidth_bytes_s=3.35e12, link_bytes_s=450e9),
    DeviceShape(name="H200 SXM", flops=989e12, memory_bytes=141e9, bandwidth_bytes_s=4.8e12, link_bytes_s=450e9),
    DeviceShape(name="A100 SXM", flops=312e12, memory_bytes=80e9, bandwidth_bytes_s=2.0e12, link_bytes_s=300e9),
    DeviceShape(name="H800", flops=989e12, memory_bytes=80e9, bandwidth_bytes_s=3.43e12, link_bytes_s=180e9),
    DeviceShape(name="H20", flops=148e12, memory_bytes=96e9, bandwidth_bytes_s=4.0e12, link_bytes_s=450e9),
    DeviceShape(name="L40S", flops=362e12, memory_bytes=48e9, bandwidth_bytes_s=0.864e12, link_bytes_s=32e9),
)
# A shard's weights take this part of what models may have at most; the rest is for KV.
_WEIGHT_SHARE: Final = 0.75


def step(physics: Physics, work: Work) -> Cost:
    """Compute and memory overlap, the exchange between shards does not."""
    flops = work.tokens * physics.token_flops + work.pairs * physics.pair_flops
    moved = read_bytes(physics, work.tokens) + work.kv_tokens * physics.kv_bytes
    exchange_s = physics.exchange_s + work.tokens * physics.exchange_token_s
    seconds = np.maximum(flops / physics.flops_s, moved / physics.bytes_s) + exchange_s + physics.fixed_s
    return Cost(seconds, flops, moved)


def read_bytes(physics: Physics, tokens: Numbers) -> Numbers:
    """Of weights, in a step of so many tokens: the dense ones, and the experts that any of the tokens chose."""
    return physics.dense_bytes + physics.expert_bytes * (1.0 - physics.unchosen_share**tokens)


def prefill(start: Numbers, tokens: Numbers) -> Work:
    """The next `tokens` of a prompt whose first `start` are computed."""
    pairs = tokens * (start + (tokens + 1.0) / 2.0)
    return Work(tokens, pairs, start + tokens)


def decode(rows: Numbers, context_tokens: Numbers) -> Work:
    """One token for each of `rows` sequences, of context_tokens tokens in all."""
    return Work(rows, context_tokens, context_tokens)


def memory_share(physics: Physics, kv_tokens: Numbers) -> Numbers:
    """Of what models may have of a device: weights, activations and the KV of so many tokens. May exceed 1."""
    return (physics.weight_bytes + physics.activation_bytes + kv_tokens * physics.kv_bytes) / physics.memory_bytes


def kv_room_tokens(physics: Physics) -> Numbers:
    """Tokens whose KV a device holds beside the weights; 0 where these do not fit."""
    room = physics.memory_bytes - physics.weight_bytes - physics.activation_bytes
    return np.maximum(room, 0.0) / physics.kv_bytes


def physics_of(model: ModelShape, device: DeviceShape, shards: int) -> Physics:
    """A shard of a model cut into `shards`, each on a device of its own. KV is cut with the heads."""
    require(shards >= 1, f"{model.name} is cut into {shards} shards")
    width, experts = model.parameter_bytes / shards, max(model.experts, 1)
    crossing = 0.0 if shards == 1 else 2.0 * model.layers * 2.0 * (shards - 1) / shards
    return Physics(
        token_flops=2.0 * model.active_parameters / shards,
        pair_flops=model.pair_flops / shards,
        dense_bytes=(model.parameters - model.expert_parameters) * width,
        expert_bytes=model.expert_parameters * width,
        unchosen_share=1.0 - min(model.experts_per_token / experts, 1.0),
        kv_bytes=model.kv_bytes / shards,
        weight_bytes=model.weight_bytes / shards,
        exchange_token_s=crossing * model.hidden * 2.0 / (device.link_bytes_s * device.link_reached),
        exchange_s=0.0 if shards == 1 else 2.0 * model.layers * device.message_s,
        flops_s=device.flops * device.flops_reached,
        bytes_s=device.bandwidth_bytes_s * device.bandwidth_reached,
        memory_bytes=device.memory_bytes * device.memory_reached,
        activation_bytes=device.activation_bytes,
        fixed_s=device.step_s,
    )


def wide(table: npt.NDArray[np.float64], columns: int) -> npt.NDArray[np.float64]:
    """[m, n] as n arrays [m, columns] in one: m models as one, by their numbers. All have all columns, as numpy is
    slower by half where small arrays differ in shape."""
    return np.repeat(table.T[:, :, None], columns, axis=2)


def shards_needed(model: ModelShape, device: DeviceShape) -> int:
    """The fewest, in powers of two, that leave room for KV beside their part of the weights."""
    shards, room = 1, _WEIGHT_SHARE * device.memory_bytes * device.memory_reached
    while model.weight_bytes / shards > room and shards < 1024:
        shards *= 2
    return shards
