"""Load of `workload62` at production volume with its bursts, and a fluid imitation of replicas, for `bench.scaling`.

Rates are those of the trace by ten minutes, times the burst profiles that it was made with, counted by a Poisson draw
each half second: thinned requests times 75 would be noise, not telemetry. A replica serves so many tokens a second;
what it cannot serve waits. Every draw comes from a seed.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from janus_server.sched.mind import Load, Question, Shares
from janus_server.sched.oracle import Ask, Oracle
from janus_server.sched.oracle_records import Features, Subject
from janus_server.sched.placement import Change, Cluster, Device, Model, Replica, Standing, Verb

from .oracle_subjects import VOLUME, read
from .traces import open_text

TICK_S: Final = 0.5
PAGE_BYTES: Final = 2 << 20
_BASE_S: Final = 600.0
_DECAY_S: Final = 20.0
# Rates are means over so many ticks, as the cluster's own telemetry has them.
_MEAN_TICKS: Final = 6
_DRAIN_S, _SINK_S = 4.0, 0.5


class Recorded(NamedTuple):
    """Of one model: requests a second [ticks] as drawn, and the means and variances of its lengths."""

    subject: Subject
    rate: npt.NDArray[np.float64]
    lengths: tuple[float, float, float, float]


def loads(folder: Path, start_s: float, seconds: float, seed: int) -> dict[str, Recorded]:
    """By model, from start_s of the day on."""
    with open_text(folder / "apps.csv") as file:
        models = [row["llm"] for row in csv.DictReader(file)]
    with open_text(folder / "bursts.csv") as file:
        bursts = [tuple(map(float, row.values())) for row in csv.DictReader(file)]
    with open_text(folder / "requests.csv.gz") as file:
        rows = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.int64)
    at = start_s + TICK_S * np.arange(math.ceil(seconds / TICK_S))
    draws = np.random.default_rng(seed)
    out: dict[str, Recorded] = {}
    recorded = read(folder)
    for name, known in recorded.items():
        rate = np.zeros(len(at))
        for app in [i for i, model in enumerate(models) if model == name]:
            mine = rows[rows[:, 1] == app, 0] / 1e3
            inside = [burst for burst in bursts if int(burst[0]) == app]
            rate += _rate(mine, inside, at)
        counted = draws.poisson(rate * VOLUME * TICK_S) / TICK_S
        day = known.requests
        lengths = (day.inputs.mean(), day.inputs.var(), day.outputs.mean(), day.outputs.var())
        mean = np.convolve(
            np.concatenate([np.full(_MEAN_TICKS - 1, counted[0]), counted]), np.ones(_MEAN_TICKS), "valid"
        )
        out[name] = Recorded(known.subject, mean / _MEAN_TICKS, tuple(map(float, lengths)))  # type: ignore[arg-type]
    return out


def _rate(arrivals: npt.NDArray[np.float64], bursts: Sequence[tuple[float, ...]],
          at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:  # fmt: skip
    """Requests a second of one application in the trace: its ten minutes' mean without bursts, times the bursts."""
    windows = (at // _BASE_S).astype(np.int64)
    counts = np.bincount((arrivals // _BASE_S).astype(np.int64), minlength=int(86_400 / _BASE_S) + 1)
    base = np.zeros(len(at))
    for window in np.unique(windows).tolist():
        grid = window * _BASE_S + np.arange(0.0, _BASE_S, 1.0)
        base[windows == window] = counts[window] / _BASE_S / _profile(grid, bursts).mean()
    return base * _profile(at, bursts)


def _profile(at: npt.NDArray[np.float64], bursts: Sequence[tuple[float, ...]]) -> npt.NDArray[np.float64]:
    """1 without a burst; in one, up along a ramp, held, and down exponentially."""
    out = np.ones(len(at))
    for _, start_s, multiple, ramp_s, hold_s in bursts:
        since = at - start_s
        up = np.clip(since / ramp_s, 0.0, 1.0)
        down = np.where(since > ramp_s + hold_s, np.exp(-np.maximum(since - ramp_s - hold_s, 0.0) / _DECAY_S), 1.0)
        inside = (since > 0.0) & (since < ramp_s + hold_s + 6 * _DECAY_S)
        out = np.maximum(out, np.where(inside, 1.0 + (multiple - 1.0) * up * down, 1.0))
    return out


def features(load: Recorded, rate: float) -> Features:
    mean_in, var_in, mean_out, var_out = load.lengths
    return Features(rate * (mean_in + mean_out), rate, mean_in, var_in, mean_out, var_out)


class Prophet:
    """The server's oracle without observations, as it expects and not as a pessimist: there is nothing to doubt yet.

    able: where one replica's requests are half in time, tokens a second.
    """

    def __init__(self, loads_: dict[str, Recorded]) -> None:
        self.oracle = Oracle()
        self.loads = loads_
        self.rate = {name: 0.0 for name in loads_}
        for name, load in loads_.items():
            self.oracle.know(name, load.subject)
        self.able = {name: self._able(name) for name in loads_}

    def ask(self, questions: Sequence[Question]) -> list[Shares | None]:
        asks = [Ask(q.model, features(self.loads[q.model], q.factor * self.rate[q.model]), q.counts) for q in questions]
        return [said.expected for said in self.oracle.attainment(asks)]

    def _able(self, name: str) -> float:
        low, high = 1e-3, 1e6
        for _ in range(40):
            middle = math.sqrt(low * high)
            expected = self.oracle.attainment([Ask(name, features(self.loads[name], middle), (1,))])[0].expected[0]
            low, high = (middle, high) if expected > 0.5 else (low, middle)
        mean_in, _, mean_out, _ = self.loads[name].lengths
        return low * (mean_in + mean_out)


def model_of(name: str, load: Recorded, target: float) -> Model:
    subject = load.subject
    weights = int(subject.model.weight_bytes / subject.shards)
    pages = -(-int(1.3 * weights) // PAGE_BYTES)
    return Model(model=name, pages=pages, weight_bytes=weights, shards=subject.shards, target=target)


class World:
    """Devices, replicas that take their time, and prompts that wait."""

    def __init__(self, devices: int, models: dict[str, Model], able: dict[str, float]) -> None:
        every = tuple(models)
        pages = int(0.9 * 64e9) // PAGE_BYTES
        self.devices = tuple(
            Device(id=f"d{i:04d}", host=f"h{i // 16:03d}", domain="d0", pages=pages, copies=every)
            for i in range(devices)
        )
        self.models, self.able = models, able
        self.held: dict[tuple[str, tuple[str, ...]], tuple[Replica, float]] = {}
        self.feeds: list[tuple[float, str, tuple[str, ...]]] = []
        self.backlog = {name: 0.0 for name in models}

    def cluster(self) -> Cluster:
        return Cluster(self.devices, tuple(replica for replica, _ in self.held.values()))

    def ready(self, name: str) -> int:
        return sum(r.standing is Standing.ACTIVE for (model, _), (r, _) in self.held.items() if model == name)

    def serve(self, name: str, tokens_s: float) -> Load:
        """Half a second of a model's traffic."""
        served = self.ready(name) * self.able[name] * TICK_S
        late = self.backlog[name] > self.able[name] * max(1, self.ready(name)) * 0.5
        self.backlog[name] = max(0.0, self.backlog[name] + tokens_s * TICK_S - served)
        ended = int(served > 0) * 100
        return Load(model=name, tokens_s=tokens_s, backlog_s=self.backlog[name] / self.able[name], ended=ended,
                       late=ended if late else 0)  # fmt: skip

    def begin(self, change: Change, now: float) -> None:
        key = (change.model, change.devices)
        replica = self.held[key][0] if key in self.held else Replica(model=change.model, devices=change.devices)
        if change.verb is Verb.DRAIN:
            self.held[key] = (_as(replica, Standing.DRAINING, running=1), now + _DRAIN_S)
        elif change.verb is Verb.SLEEP:
            self.held[key] = (_as(replica, Standing.SINKING), now + _SINK_S)
        elif change.verb is Verb.SERVE:
            self.held[key] = (_as(replica, Standing.ACTIVE), math.inf)
        elif change.verb is not None:
            self.held[key] = (_as(replica, Standing.RISING), now + change.takes_s)
            self.feeds += [(now + change.takes_s, model, on) for model, on in self.held
                           if model == change.model and change.source in on]  # fmt: skip

    def pass_time(self, now: float) -> None:
        self.feeds = [feed for feed in self.feeds if feed[0] > now]
        for key, (replica, until_s) in list(self.held.items()):
            serves = sum((model, on) == key for _, model, on in self.feeds)
            if until_s <= now:
                if replica.standing is Standing.SINKING:
                    del self.held[key]
                    continue
                risen = replica.standing is Standing.RISING
                replica = _as(replica, Standing.ACTIVE if risen else replica.standing)
            self.held[key] = (msgspec.structs.replace(replica, serves=serves), until_s)


def _as(replica: Replica, standing: Standing, running: int = 0) -> Replica:
    return msgspec.structs.replace(replica, standing=standing, running=running)
