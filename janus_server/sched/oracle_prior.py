"""What a model is expected to need and to attain before anything has been observed: the GPs' prior mean.

A steady-state estimate from the roofline: batches by Little's law, prompts that share replicas as processors are
shared, one queue for all replicas by Sakasegawa's approximation, lengths as if log-normal. `oracle` asks for many
models and replica counts at once. Rough on purpose, never a simulation: it must be right within a factor of two and
finite for any traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from janus_server.sched.oracle_arrays import Array, within
from janus_server.sched.oracle_records import Features, Subject
from janus_server.sched.roofline import Numbers, Physics, Work, memory_share, physics_of, read_bytes, step, wide

# Tokens of prompts that one step computes at most.
CHUNK_TOKENS = 2048.0
# Shares and odds are kept off the ends, where logarithms have none. A share of 1e-4 is nothing to a packer.
LEAST_SHARE = 1e-4
_MOST_LOG_ODDS = 7.0
_ROUNDS = 8
# Arrivals are burstier than Poisson's: half the sum of 1 and the squared variation, at a variation of 1.7.
_BURSTS = 2.0
# What a prompt's time scatters by that is no matter of its length, as the deviation of a logarithm.
_CHANCE = 0.25
# Of a replica's time for prompts: more than this is never asked of it at once.
_FULL = 0.7
_TINY = 1e-9


class Traffic(NamedTuple):
    """Of one replica among `replicas`, arrays [m, k]; squares are mean squares, not variances."""

    replicas: Numbers
    rate: Numbers
    input: Numbers
    input_square: Numbers
    output: Numbers
    output_square: Numbers


class Limits(NamedTuple):
    """What the models promise, arrays [m, 1]."""

    ttft_s: Numbers
    tpot_s: Numbers
    pace_s: Numbers


class Prior(NamedTuple):
    """shares [m, k, 3] in the order of OUTPUTS, and log_odds [m, k] of attaining."""

    shares: Array
    log_odds: Array


class _Flow(NamedTuple):
    """The steady state: rows that decode on average, seconds between a row's tokens, steps a second, and the seconds
    of a mean prompt's own work."""

    rows: Numbers
    token_s: Numbers
    steps: Numbers
    prompt_s: Numbers


def numbers_of(subject: Subject) -> tuple[float, ...]:
    """What `expect` needs of a model, the same for as long as it is served so."""
    physics = physics_of(subject.model, subject.device, subject.shards)
    return (*physics, subject.promise.ttft_s, subject.promise.tpot_s, subject.pace_s)


def physics_and_limits(numbers: Sequence[tuple[float, ...]], columns: int = 1) -> tuple[Physics, Limits]:
    """Of models by their `numbers_of`, for so many counts of replicas: arrays [m, columns]."""
    table = wide(np.array(numbers, dtype=np.float64), columns)
    return Physics(*table[: len(Physics._fields)]), Limits(*table[len(Physics._fields) :])


def traffic_of(table: Array, replicas: Array) -> Traffic:
    """table [m, 6] in the order of Features, replicas [m, k]: each replica gets its even part."""
    _, rate, mean_in, var_in, mean_out, var_out = wide(table, replicas.shape[1])
    return Traffic(replicas, rate / replicas, mean_in, var_in + mean_in**2, mean_out, var_out + mean_out**2)


def table_of(features: list[Features]) -> Array:
    """[m, 6], with what is not a number, or negative, as 0: a report is never worth an exception."""
    rows = [(f.token_rate, f.request_rate, f.input_mean, f.input_variance, f.output_mean, f.output_variance)
            for f in features]  # fmt: skip
    return np.asarray(np.fmin(np.fmax(np.array(rows, dtype=np.float64).reshape(-1, 6), 0.0), 1e12))


def expect(physics: Physics, limits: Limits, traffic: Traffic) -> Prior:
    """For each model and replica count."""
    flow = _flow(physics, limits, traffic)
    return Prior(_shares(physics, traffic, flow), _log_odds(physics, limits, traffic, flow))


def _flow(physics: Physics, limits: Limits, t: Traffic) -> _Flow:
    """A fixed point: more rows make longer steps, and longer steps leave more rows at work. Prompts stand between a
    row's tokens by what a step with a chunk takes longer than one without."""
    context = t.input + t.output / 2.0
    room = np.maximum((physics.memory_bytes - physics.weight_bytes) / physics.kv_bytes, context)
    prompt_s = _prompt_s(physics, t)
    token_s = np.maximum(limits.pace_s, physics.fixed_s)
    rows = np.zeros_like(t.rate)
    chunks = np.ceil(np.maximum(t.input, 1.0) / CHUNK_TOKENS)
    chunk, pairs, half = t.input / chunks, t.input_square / chunks / 2.0, t.input / 2.0
    comes_not, drawn, most = -np.maximum(t.rate, 1e-6), t.rate * t.output, room / np.maximum(context, 1.0)
    for _ in range(_ROUNDS):
        held = rows * context
        step_s = step(physics, Work(rows, held, held)).seconds
        mixed_s = step(physics, Work(rows + chunk, held + pairs, held + half)).seconds
        longer_s = chunks * np.maximum(mixed_s - step_s, 0.0)
        # A device that shares itself steps when a decode is due, or at once when a prompt has come meanwhile.
        spare_s = np.maximum(limits.pace_s - step_s, 0.0)
        token_s = step_s + np.exp(comes_not * step_s) * np.expm1(comes_not * spare_s) / comes_not
        token_s = token_s / np.maximum(1.0 - t.rate * longer_s, 0.02)
        rows = np.minimum(drawn * token_s, most)
    busy = -np.expm1(-rows)
    alone = t.rate * np.ceil(np.maximum(t.input, 1.0) / CHUNK_TOKENS) / (1.0 + t.rate * prompt_s)
    return _Flow(rows, token_s, busy / token_s + (1.0 - busy) * alone, prompt_s)


def _prompt_s(physics: Physics, t: Traffic) -> Numbers:
    """Seconds of prefill work of the mean prompt; its weights are read once a chunk."""
    flops = t.input * physics.token_flops + t.input_square / 2.0 * physics.pair_flops
    reads = read_bytes(physics, t.input) / physics.bytes_s * np.ceil(np.maximum(t.input, 1.0) / CHUNK_TOKENS)
    exchange_s = physics.exchange_s + t.input * physics.exchange_token_s
    return np.maximum(flops / physics.flops_s, reads) + exchange_s + physics.fixed_s


def _shares(physics: Physics, t: Traffic, flow: _Flow) -> Array:
    context = t.input + t.output / 2.0
    pairs = t.input_square / 2.0 + t.input * t.output + t.output_square / 2.0
    compute = t.rate * ((t.input + t.output) * physics.token_flops + pairs * physics.pair_flops) / physics.flops_s
    # Steps with a prompt beside the rows, and those without: experts are not read in proportion to tokens.
    mixed = np.minimum(t.rate * np.ceil(np.maximum(t.input, 1.0) / CHUNK_TOKENS), flow.steps)
    rows = flow.rows / np.maximum(-np.expm1(-flow.rows), _TINY)
    moved = (flow.steps - mixed) * read_bytes(physics, rows) + t.rate * t.output * context * physics.kv_bytes
    moved += mixed * read_bytes(physics, flow.rows + t.rate * t.input / np.maximum(mixed, _TINY))
    # KV held: Poisson arrivals that each hold a growing context, so that the variance is the mean of its square.
    held_s = t.output * flow.token_s + flow.prompt_s
    mean = t.rate * (t.input * held_s + t.output_square / 2.0 * flow.token_s)
    spread = t.output_square / np.maximum(t.output, 1.0) ** 2
    # Of the third moment: exact for lengths of two kinds, near it for exponential ones.
    cube = t.output**3 * spread**2 * np.minimum(spread, 1.5)
    square = flow.token_s * (t.input_square * t.output + t.input * t.output_square + cube / 3.0)
    most = mean + 2.0 * np.sqrt(t.rate * square)
    hbm = memory_share(physics, np.where(t.rate > 0.0, np.maximum(most, np.minimum(t.input + t.output, 1e6)), 0.0))
    shares = np.empty((*t.rate.shape, 3))
    shares[..., 0], shares[..., 1], shares[..., 2] = hbm, compute, moved / physics.bytes_s
    return np.asarray(np.maximum(shares, LEAST_SHARE))


def _log_odds(physics: Physics, limits: Limits, t: Traffic, flow: _Flow) -> Array:
    """Of keeping both TTFT and TPOT, as if they were independent."""
    context = t.input + t.output / 2.0
    room = np.maximum(physics.memory_bytes - physics.weight_bytes, 0.0) / physics.kv_bytes
    decode_s = flow.rows * context * physics.kv_bytes / physics.bytes_s
    turns = decode_s / np.maximum(flow.token_s, _TINY)
    full = t.rate * t.output * flow.token_s * context / np.maximum(room, 1.0)
    use = np.maximum(t.rate * flow.prompt_s / np.maximum(1.0 - turns, 0.1), full)
    spread = np.maximum(t.input_square / np.maximum(t.input, 1.0) ** 2, 1.0)
    # Prompts share a replica in chunks, so that a long one makes the others slower rather than wait for it: by how
    # much does not depend on how lengths scatter. A burst finds all replicas busy the more seldom the more there are.
    # Beyond _FULL prompts that would be late are put last, so that the others meet no more than that.
    fair = np.minimum(use, _FULL)
    queue = fair ** (np.sqrt(2.0 * (t.replicas + 1.0)) - 1.0) / (t.replicas * (1.0 - fair))
    slower = 1.0 + _BURSTS * queue
    # The longest prompt that can be on time, in standard deviations of the lengths' logarithm from its median. First it
    # waits for the step that runs.
    scatter = np.log(spread)
    slack_s = np.maximum(limits.ttft_s - flow.token_s / 2.0, _TINY)
    room_s = np.log(slack_s / np.maximum(flow.prompt_s * slower, _TINY)) + scatter / 2.0
    first = _logistic(1.7 * room_s / (np.sqrt(scatter) + _CHANCE)) * fair / np.maximum(use, _TINY)
    # A row's mean time between tokens differs from the average by how many prompts happen to come beside it. Most
    # tokens are of long answers, and one of a single token has no time between tokens.
    tokens = np.maximum(t.output_square / np.maximum(t.output, _TINY), 2.0)
    beside_s = flow.prompt_s * np.sqrt(t.rate * tokens * flow.token_s * spread * _BURSTS)
    sure = 1.7 * tokens * (limits.tpot_s - flow.token_s) / np.maximum(beside_s, _TINY)
    ratio = np.log(np.maximum(limits.tpot_s, _TINY) / np.maximum(flow.token_s, _TINY))
    several = within(t.output - 1.0, 0.0, 1.0)
    later = 1.0 - several * (1.0 - _logistic(np.minimum(10.0 * ratio, sure)))
    both = within(first * later, 1e-9, 1.0 - 1e-9)
    odds = within(np.log(both / (1.0 - both)), -_MOST_LOG_ODDS, _MOST_LOG_ODDS)
    return np.where(t.rate > 0.0, odds, _MOST_LOG_ODDS)


def _logistic(x: Numbers) -> Numbers:
    return 1.0 / (1.0 + np.exp(-within(x, -50.0, 50.0)))
