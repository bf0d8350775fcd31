"""Small workloads run by both fidelities of a device: do they tell the same TTFT and TPOT?

`bench.simulate_devices` prints them, tests hold them to a tolerance. Each device has its calls begun as they arrive:
nothing waits elsewhere, so that what differs is the batching alone. Every draw comes from a seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from janus_server.orders import KnownModel
from janus_server.sched.roofline import ASCEND_910C
from janus_server.sched.shapes import ModelShape

from .batching import Rules
from .devices import make
from .records import AppSpec, Call, Device, ModelSpec, NodeSpec

PAGE_BYTES: Final = 2 << 20
_LONGEST: Final = 32_768  # tokens of a prompt
_MODEL_BYTES: Final = 58_000_000_000  # of 64 GB a device; see facts of the published cluster


class Case(NamedTuple):
    """rate: calls a second of each model; lengths are means, log-normal. burst: so many times the rate, now and then.

    pages: of the pool, where the device is to run short of memory.
    """

    name: str
    models: tuple[str, ...]
    rate: float
    input_mean: float
    output_mean: float
    tpot_s: tuple[float, ...] = (0.05,)
    ttft_s: float = 1.0
    burst: float = 1.0
    pages: int = 0
    rules: Rules = Rules()


class Run(NamedTuple):
    """Means over calls, a share of the device's time that is used, and what the run cost: calls that ended, processor
    seconds."""

    ttft_s: float
    tpot_s: float
    ttft_p99_s: float
    on_time: float
    used: float
    ended: int
    took_s: float


SHAPES: Final = {
    "0.6B": ModelShape(name="Qwen3-0.6B", parameters=0.6e9, layers=28, hidden=1024, kv_bytes=114_688,
                       pair_flops=4.0 * 28 * 16 * 128),
    "1.7B": ModelShape(name="Qwen3-1.7B", parameters=1.72e9, layers=28, hidden=2048, kv_bytes=114_688,
                       pair_flops=4.0 * 28 * 16 * 128),
    "4B": ModelShape(name="Qwen3-4B", parameters=4.02e9, layers=36, hidden=2560, kv_bytes=147_456,
                     pair_flops=4.0 * 36 * 32 * 128),
    "8B": ModelShape(name="Qwen3-8B", parameters=8.19e9, layers=36, hidden=4096, kv_bytes=147_456,
                     pair_flops=4.0 * 36 * 32 * 128),
    "30B-A3B": ModelShape(name="Qwen3-30B-A3B", parameters=30.53e9, layers=48, hidden=2048, kv_bytes=98_304,
                          pair_flops=4.0 * 48 * 32 * 128, parameter_bytes=1.0, expert_parameters=28.99e9, experts=128,
                          experts_per_token=8),
}  # fmt: skip

CASES: Final = (
    Case("alone, prompts", ("8B",), 6.0, 1500.0, 30.0),
    Case("alone, decode", ("8B",), 3.0, 150.0, 300.0),
    Case("alone, light", ("8B",), 0.5, 600.0, 200.0),
    Case("alone, bursts", ("4B",), 6.0, 800.0, 100.0, burst=8.0),
    Case("alone, experts", ("30B-A3B",), 2.0, 500.0, 150.0),
    Case("alone, long prompts", ("8B",), 0.6, 12_000.0, 200.0, ttft_s=4.0),
    Case("alone, little memory", ("8B",), 4.0, 500.0, 300.0, pages=10_500),
    Case("alone, a prompt a step", ("8B",), 5.0, 1200.0, 60.0, rules=Rules(one_prompt_at_a_time=True)),
    Case("four, light", ("1.7B",) * 4, 1.0, 500.0, 100.0),
    Case("four, prompts", ("1.7B",) * 4, 5.0, 1500.0, 20.0),
    Case("four, decode", ("1.7B",) * 4, 2.5, 150.0, 300.0),
    Case("four, mixed paces", ("0.6B", "1.7B", "4B", "8B"), 1.5, 500.0, 120.0, tpot_s=(0.03, 0.03, 0.05, 0.08)),
    Case("four, bursts", ("1.7B",) * 4, 3.0, 700.0, 100.0, burst=8.0),
    Case("two, short of time", ("8B", "8B"), 4.0, 500.0, 200.0, tpot_s=(0.03, 0.05)),
)  # fmt: skip


def run(case: Case, fidelity: str, seed: int = 7, length_s: float = 60.0) -> Run:
    node, specs, apps = world(case)
    device = make(fidelity, node, specs, apps=apps, rules=case.rules)
    return drive(device, [spec.known.model for spec in specs], calls(case, seed, length_s), apps)


def world(case: Case) -> tuple[NodeSpec, list[ModelSpec], list[AppSpec]]:
    """One device, the models of a case, and an application of each."""
    pages = case.pages or _MODEL_BYTES // PAGE_BYTES
    node = NodeSpec(
        name="n0", host="h0", domain="d0", shape=ASCEND_910C, pool_pages=pages, page_bytes=PAGE_BYTES, host_bytes=0
    )
    specs = [_spec(f"m{i}", SHAPES[name], pages) for i, name in enumerate(case.models)]
    paces = case.tpot_s
    apps = [
        AppSpec(name=f"a{i}", model=f"m{i}", ttft_s=case.ttft_s, tpot_s=paces[i % len(paces)])
        for i in range(len(specs))
    ]
    return node, specs, apps


def calls(case: Case, seed: int, length_s: float) -> list[Call]:
    """Poisson arrivals for each model; with bursts, a fifth of each twenty seconds is so many times as busy."""
    draws = np.random.default_rng(seed)
    found: list[tuple[float, int, int, int]] = []
    for model in range(len(case.models)):
        at_s, offset_s = 0.0, 5.0 * model
        while True:
            busy = case.burst > 1.0 and (at_s + offset_s) % 20.0 < 2.0
            at_s += float(draws.exponential(1.0 / (case.rate * (case.burst if busy else 1.0))))
            if at_s >= length_s:
                break
            sizes = [
                mean * math.exp(0.6 * draws.standard_normal() - 0.18) for mean in (case.input_mean, case.output_mean)
            ]
            found.append((at_s, model, max(1, min(_LONGEST, round(sizes[0]))), max(1, round(sizes[1]))))
    found.sort()
    return [Call(i, *one) for i, one in enumerate(found)]


def drive(device: Device, models: Sequence[str], coming: Sequence[Call], apps: Sequence[AppSpec]) -> Run:
    """Each call begins when it comes; until all have ended. `app` of a call is the index of its model."""
    for model in models:
        device.up(model, 0.0)
    first: dict[int, float] = {}
    ttfts, tpots, on_time, at, now = [], [], 0, 0, 0.0
    start_s = time.process_time()
    while True:
        due_s = device.next_s(now)
        coming_s = coming[at].at_s if at < len(coming) else math.inf
        if due_s is None and coming_s == math.inf:
            break
        now = min(coming_s, math.inf if due_s is None else due_s)
        for emit in device.advance(now):
            call = coming[emit.call]
            if not emit.ended:
                first[call.id] = emit.at_s
                continue
            ttft_s = first[call.id] - call.at_s
            tpot_s = (emit.at_s - first.pop(call.id)) / max(call.output_tokens - 1, 1)
            ttfts.append(ttft_s)
            tpots.extend([tpot_s] if call.output_tokens > 1 else [])
            on_time += ttft_s <= apps[call.app].ttft_s and tpot_s <= apps[call.app].tpot_s
        while at < len(coming) and coming[at].at_s <= now:
            device.begin(coming[at], models[coming[at].app], now)
            at += 1
    took_s = time.process_time() - start_s
    return Run(
        float(np.mean(ttfts)), float(np.mean(tpots)), float(np.quantile(ttfts, 0.99)), on_time / len(ttfts),
        sum(device.used().values()) / now, len(ttfts), took_s,
    )  # fmt: skip


def _spec(name: str, shape: ModelShape, pool_pages: int) -> ModelSpec:
    weights = math.ceil(shape.weight_bytes / PAGE_BYTES)
    longest = min(math.ceil(40_960 / int(PAGE_BYTES // shape.kv_bytes)), pool_pages - weights)
    known = KnownModel(
        model=name, weight_pages=weights, host_bytes=round(shape.weight_bytes), longest_pages=longest, floor_pages=0
    )
    return ModelSpec(known=known, shape=shape)
