"""The truth that the oracle is held against: replicas of a model simulated step by step, on a device it does not know.

The same roofline as the prior's, but run for every step of every request: arrivals in bursts, batches that grow and
shrink, prompts in chunks, queues, full memory. The device differs from its data sheet by factors that are drawn for
each model, and each step by noise. Every draw comes from the generator that is handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from janus_server.sched.oracle_prior import CHUNK_TOKENS
from janus_server.sched.oracle_records import Features, Observation, Subject
from janus_server.sched.roofline import Physics, kv_room_tokens, memory_share, physics_of, read_bytes

STEP_NOISE: Final = 0.1
# What a device reaches beside what its data sheet and the usual shares of it say, as the deviation of a logarithm.
DEVICE_NOISE: Final = 0.2
_METER_NOISE: Final = 0.03
# After the window, until its requests have ended or this has passed.
_DRAIN_S: Final = 120.0


class Requests(NamedTuple):
    """By arrival: seconds and tokens, [n]."""

    at_s: npt.NDArray[np.float64]
    inputs: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]

    def of_replica(self, replica: int, replicas: int) -> Requests:
        """Every so many-th: round robin."""
        return Requests(*(column[replica::replicas] for column in self))


class Window(NamedTuple):
    """From start_s to end_s; what comes before warms the replica up."""

    start_s: float
    end_s: float


class Measured(NamedTuple):
    """Of one replica's window: shares of its device, and requests that arrived in it and attained their SLO."""

    hbm: float
    compute: float
    bandwidth: float
    requests: int
    on_time: int


def true_physics(subject: Subject, draws: np.random.Generator) -> Physics:
    """The device as it really is, for the whole of a model's trial."""
    physics = physics_of(subject.model, subject.device, subject.shards)
    flops, moved, fixed = np.exp(DEVICE_NOISE * draws.standard_normal(3)).tolist()
    return physics._replace(
        flops_s=physics.flops_s * flops, bytes_s=physics.bytes_s * moved, fixed_s=physics.fixed_s * fixed
    )


def observe(
    subject: Subject, physics: Physics, requests: Requests, window: Window, replicas: int, watched: int, at_s: float,
    draws: np.random.Generator,
) -> Observation | None:  # fmt: skip
    """What telemetry would say at at_s of the window; None where no request arrived in it at a replica that is watched.

    `watched` of the replicas are simulated; the others would be like them.
    """
    seen = [
        simulate(subject, physics, requests.of_replica(i, replicas), window, draws)
        for i in range(min(watched, replicas))
    ]
    total, kept = sum(m.requests for m in seen), sum(m.on_time for m in seen)
    if not total:
        return None
    shares = np.array([(m.hbm, m.compute, m.bandwidth) for m in seen])
    hbm, compute, bandwidth = (shares.mean(0) * np.exp(_METER_NOISE * draws.standard_normal(3))).tolist()
    return Observation(
        at_s=at_s, features=features_of(requests, window), replicas=replicas, requests=total, on_time=kept, hbm=hbm,
        compute=compute, bandwidth=bandwidth,
    )  # fmt: skip


def features_of(requests: Requests, window: Window) -> Features:
    inside = (requests.at_s >= window.start_s) & (requests.at_s < window.end_s)
    inputs, outputs, length_s = requests.inputs[inside], requests.outputs[inside], window.end_s - window.start_s
    if not len(inputs):
        return Features(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Features(
        float(inputs.sum() + outputs.sum()) / length_s, len(inputs) / length_s, float(inputs.mean()),
        float(inputs.var()), float(outputs.mean()), float(outputs.var()),
    )  # fmt: skip


def simulate(
    subject: Subject, physics: Physics, requests: Requests, window: Window, draws: np.random.Generator
) -> Measured:
    """One replica: first come first served, prompts in chunks beside all rows that decode."""
    replica = _Replica(subject, physics, requests, window, draws)
    replica.run()
    length_s = window.end_s - window.start_s
    return Measured(
        float(memory_share(physics, replica.most_kv)), replica.flops / length_s / physics.flops_s,
        replica.bytes / length_s / physics.bytes_s, replica.requests, replica.on_time,
    )  # fmt: skip


class _Replica:
    """Rows that decode are not kept one by one: each ends a known number of steps after its first token."""

    def __init__(
        self, subject: Subject, physics: Physics, requests: Requests, window: Window, draws: np.random.Generator
    ) -> None:
        self.flops = self.bytes = self.most_kv = 0.0
        self.requests = self.on_time = 0
        self._subject, self._physics, self._window = subject, physics, window
        self._coming = deque(zip(*(column.tolist() for column in requests), strict=True))
        self._noise = np.exp(STEP_NOISE * draws.standard_normal(4096)).tolist()
        self._room = float(kv_room_tokens(physics))
        self._now = 0.0
        self._steps = 0
        self._rows = 0
        self._context = 0.0  # of the rows that decode
        self._reserved = 0.0
        self._ends: list[tuple[int, float, float, int, int]] = []  # step, arrival, first token, input, output
        self._prompts: deque[tuple[float, int, int]] = deque()  # admitted, in order
        self._done = 0  # computed tokens of the first of them

    def run(self) -> None:
        pace_s, stop_s = self._subject.pace_s, self._window.end_s + _DRAIN_S
        started_s = -pace_s
        while self._now < stop_s and (self._coming or self._prompts or self._rows):
            if self._now >= self._window.end_s and not self._open():
                break
            self._admit()
            if not self._prompts:
                due_s = started_s + pace_s if self._rows else self._coming[0][0]
                next_s = self._coming[0][0] if self._coming else due_s
                if min(due_s, next_s) > self._now:
                    self._now = min(due_s, next_s)
                    continue
            started_s = self._now
            self._step()
        self._late()

    def _open(self) -> bool:
        """Whether a request of the window has not ended."""
        end_s = self._window.end_s
        return (
            any(row[1] < end_s for row in self._ends)
            or any(prompt[0] < end_s for prompt in self._prompts)
            or bool(self._coming and self._coming[0][0] < end_s)
        )

    def _admit(self) -> None:
        while self._coming and self._coming[0][0] <= self._now:
            size = self._coming[0][1] + self._coming[0][2]
            if self._reserved and self._reserved + size > self._room:
                return
            self._reserved += size
            self._prompts.append(self._coming.popleft())

    def _step(self) -> None:
        """Roofline of one mixed step; the physics are those of `roofline.step`, in plain floats for speed."""
        p, rows, budget = self._physics, self._rows, CHUNK_TOKENS
        tokens, pairs, read = float(rows), self._context, self._context
        finished: list[tuple[float, int, int]] = []
        while self._prompts and budget > 0:
            arrival, size, output = self._prompts[0]
            part = min(budget, size - self._done)
            tokens += part
            pairs += part * (self._done + (part + 1) / 2)
            read += self._done + part
            budget -= part
            self._done += int(part)
            if self._done < size:
                break
            finished.append((arrival, size, output))
            self._prompts.popleft()
            self._done = 0
        flops = tokens * p.token_flops + pairs * p.pair_flops
        moved = float(read_bytes(p, tokens)) + read * p.kv_bytes
        work_s = max(flops / p.flops_s, moved / p.bytes_s) + p.exchange_s + tokens * p.exchange_token_s + p.fixed_s
        before_s = self._now
        self._now += work_s * self._noise[self._steps % 4096]
        self._steps += 1
        self._context += rows
        self._measure(before_s, flops, moved)
        self._finish(finished)

    def _measure(self, before_s: float, flops: float, moved: float) -> None:
        if self._window.start_s <= before_s < self._window.end_s:
            self.flops += flops
            self.bytes += moved
            held = self._context + self._done
            self.most_kv = max(self.most_kv, held)

    def _finish(self, prompts: Sequence[tuple[float, int, int]]) -> None:
        while self._ends and self._ends[0][0] <= self._steps:
            _, arrival, first_s, size, output = heappop(self._ends)
            self._rows -= 1
            self._context -= size + output
            self._reserved -= size + output
            self._judge(arrival, first_s - arrival, (self._now - first_s) / max(output - 1, 1))
        for arrival, size, output in prompts:
            if output <= 1:
                self._reserved -= size + output
                self._judge(arrival, self._now - arrival, 0.0)
                continue
            self._rows += 1
            self._context += size + 1
            heappush(self._ends, (self._steps + output - 1, arrival, self._now, size, output))

    def _judge(self, arrival: float, ttft_s: float, tpot_s: float) -> None:
        if self._window.start_s <= arrival < self._window.end_s:
            promise = self._subject.promise
            self.requests += 1
            self.on_time += ttft_s <= promise.ttft_s and tpot_s <= promise.tpot_s

    def _late(self) -> None:
        """What has not ended when the simulation stops is late."""
        start_s, end_s = self._window
        left = [row[1] for row in self._ends] + [prompt[0] for prompt in self._prompts] + [r[0] for r in self._coming]
        self.requests += sum(start_s <= arrival < end_s for arrival in left)
