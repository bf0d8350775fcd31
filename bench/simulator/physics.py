"""What steps, copies and memory take on an imaginary device: the roofline in plain floats, and paths by their links.

The devices ask it for every step, `world` for tickets' work, load times and shares of a device. The formulas are
`sched.roofline`'s (a test holds the two against each other), the numbers `constants`' and the data sheets'. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from janus_server.errors import BadConfig, require
from janus_server.sched.oracle_records import Features
from janus_server.sched.roofline import physics_of
from janus_server.sched.shapes import DeviceShape
from janus_server.sched.source import Link, Origin

from .constants import KV_LINK_REACHED, KV_MESSAGE_S, LEAST_SPEED, LINKS, PROCESS_START_S, STEP_TOKENS
from .records import ModelSpec


class Speed:
    """One shard of a model on its device: `roofline.step` without arrays, since every simulated step asks.

    All are seconds: of a new token's arithmetic, of a pair of tokens that attend, of reading the weights that every
    step reads, all routed experts, and one token's KV. unchosen is the share of experts that one token passes over.
    """

    __slots__ = ("dense_s", "expert_s", "fixed_s", "kv_s", "pair_s", "token_s", "unchosen", "wire_s")

    def __init__(self, model: ModelSpec, device: DeviceShape) -> None:
        physics = physics_of(model.shape, device, model.known.shards)
        self.token_s = float(physics.token_flops / physics.flops_s)
        self.pair_s = float(physics.pair_flops / physics.flops_s)
        self.dense_s = float(physics.dense_bytes / physics.bytes_s)
        self.expert_s = float(physics.expert_bytes / physics.bytes_s)
        self.kv_s = float(physics.kv_bytes / physics.bytes_s)
        self.unchosen = float(physics.unchosen_share)
        self.wire_s = float(physics.exchange_token_s)
        self.fixed_s = float(physics.fixed_s + physics.exchange_s)

    def seconds(self, tokens: float, pairs: float, kv_tokens: float) -> float:
        """A step: new tokens, (token, token looked at) pairs, and tokens whose KV is read."""
        computed_s = tokens * self.token_s + pairs * self.pair_s
        read_s = self.dense_s + kv_tokens * self.kv_s
        if self.expert_s:
            read_s += self.expert_s * (1.0 - self.unchosen**tokens)
        return (computed_s if computed_s > read_s else read_s) + self.fixed_s + tokens * self.wire_s

    def decode_s(self, rows: float, context_tokens: float) -> float:
        """One token for each of `rows` sequences, of context_tokens in all."""
        return self.seconds(rows, context_tokens, context_tokens)

    def prefill_s(self, tokens: int, step_tokens: int = STEP_TOKENS) -> float:
        """A prompt with the device to itself, in steps of so many tokens."""
        total_s = 0.0
        for start in range(0, tokens, step_tokens):
            n = min(step_tokens, tokens - start)
            total_s += self.seconds(n, n * (start + (n + 1) / 2), start + n)
        return total_s


class Shares(NamedTuple):
    """Of one device, in use by one shard: memory, FLOPs and bandwidth. The order is that of the oracle's OUTPUTS."""

    hbm: float
    compute: float
    bandwidth: float


class Predictor:
    """What the world tells its policy of prompts and devices: one kind of device, all models."""

    def __init__(self, models: Sequence[ModelSpec], device: DeviceShape) -> None:
        self._physics = {spec.known.model: physics_of(spec.shape, device, spec.known.shards) for spec in models}
        self._speeds: Mapping[str, Speed] = {spec.known.model: Speed(spec, device) for spec in models}

    def work_s(self, model: str, tokens: int) -> float:
        """What a prompt is predicted to take: with the device to itself."""
        return self._speeds[model].prefill_s(tokens)

    def shares(self, model: str, features: Features, busy_share: float) -> Shares:
        """Of a device that spends busy_share of its time on a model with this traffic to one replica.

        Arithmetic follows from the traffic alone, and so does the KV that is read; what is left of the busy time read
        weights. The scarcer of the two was in use all the time that steps took, as a live node counts it.
        """
        physics, speed, t = self._physics[model], self._speeds[model], features
        context = t.input_mean + t.output_mean / 2.0
        rows_s = t.request_rate * t.output_mean
        pairs = t.request_rate * (t.input_variance + t.input_mean**2) / 2.0 + rows_s * context
        compute = t.token_rate * speed.token_s + pairs * speed.pair_s
        kv = (t.request_rate * t.input_mean + rows_s * context) * speed.kv_s
        prompts = t.request_rate * speed.prefill_s(max(1, round(t.input_mean)))
        steps_s = max(0.0, busy_share - prompts - kv) * speed.dense_s / (speed.dense_s + speed.fixed_s)
        most = max(compute, kv + steps_s, 1e-9)
        scale = min(busy_share, 1.0) / most
        rows = _rows(speed, rows_s, context)
        tokens = (rows + 2.0 * math.sqrt(rows)) * (t.input_mean + t.output_mean)
        held = physics.weight_bytes + physics.activation_bytes + tokens * physics.kv_bytes
        return Shares(min(1.0, float(held / physics.memory_bytes)), compute * scale, (kv + steps_s) * scale)


def page_tokens(model: ModelSpec, page_bytes: int) -> int:
    """Tokens whose KV one page of a shard holds, all layers of them."""
    token_bytes = model.shape.kv_bytes / model.known.shards
    if token_bytes > page_bytes:
        raise BadConfig(
            f"{model.known.model}: a page of {page_bytes} bytes holds not one token's keys and values "
            f"({token_bytes:.0f} bytes a shard); give larger pages"
        )
    return max(1, int(page_bytes // max(token_bytes, 1.0)))


def shard_bytes(model: ModelSpec) -> float:
    """Weights on each device of a replica."""
    return model.shape.weight_bytes / model.known.shards


def kv_bytes(model: ModelSpec, tokens: float) -> float:
    """Keys and values of so many tokens on each device of a replica."""
    return model.shape.kv_bytes / model.known.shards * tokens


def load_s(model: ModelSpec, origin: Origin, sharing: int = 1) -> float:
    """From an order to a model that can answer, while `sharing` devices in all use what the path shares."""
    link: Link = LINKS.of(origin)
    return link.seconds(round(shard_bytes(model)), sharing)


def start_s(model: ModelSpec, sharing: int = 1) -> float:
    """The classic way: a new process, which then reads the checkpoint."""
    return PROCESS_START_S + load_s(model, Origin.DISK, sharing)


def handover_s(model: ModelSpec, tokens: int, device: DeviceShape) -> float:
    """From a device that computed a prompt to one that decodes: its keys and values, written layer by layer, each
    device of a replica to its counterpart."""
    layers = model.shape.layers
    return layers * KV_MESSAGE_S + kv_bytes(model, tokens) / (device.link_bytes_s * KV_LINK_REACHED)


def slowdown(device: DeviceShape, rate: float) -> float:
    """How much longer steps take on a device while so many bytes a second are read of its memory."""
    reached = device.bandwidth_bytes_s * device.bandwidth_reached
    require(rate >= 0.0, "a copy reads a positive number of bytes a second")
    return 1.0 / max(1.0 - rate / reached, LEAST_SPEED)


def _rows(speed: Speed, tokens_s: float, context: float) -> float:
    """Sequences that decode at once on average, where tokens_s are drawn a second: as many as the step that they make
    is long (Little), which grows with them; at most a hundred steps' worth where it never settles."""
    rows = 1.0
    for _ in range(6):
        rows = min(tokens_s * speed.decode_s(rows, rows * context), tokens_s)
    return rows
