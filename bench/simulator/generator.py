"""A workload from numbers alone: rates that follow the day, bursts, irregular arrivals and lengths, drawn from a seed.

`scenario` makes a `Profile`, by default the 62 applications of `shape62.toml`, and `blocks` draws it: a stream in
order of time, the same for the same seed, however long. Load is raised by more requests, never by squeezing time.
Arrivals are a gamma renewal process carried through the inverse of the cumulative rate; an application's draws depend
on the seed and its index alone, so that a slice of a day is that part of the day.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .blocks import Block, Blocks, Floats, Ints, joined
from .lengths import Lengths, of_logs

DAY_S: Final = 86_400.0
REQUESTS: Final = 603_000
# Of popularity: rank i has requests as i^-s, which gives the first 12 % of 62 applications 80 %.
EXPONENT: Final = 1.4838
SHAPE: Final = Path(__file__).with_name("shape62.toml")
_BURST_GAP_S: Final = 5400.0
_DECAY_S, _DECAYS = 20.0, 6.0
_WOBBLE_S: Final = 600.0
_BLOCK: Final = 20_000
_DRAWN: Final = 512
_SKIPPED: Final = 100_000


class Burst(NamedTuple):
    """The rate times `multiple`: up along a ramp, held, and down exponentially."""

    at_s: float
    multiple: float
    ramp_s: float
    hold_s: float

    @property
    def end_s(self) -> float:
        return self.at_s + self.ramp_s + self.hold_s + _DECAYS * _DECAY_S


class Tide(NamedTuple):
    """A sinusoid on the rate: so many cycles in span_s, each application at a phase of its own."""

    cycles: float
    amplitude: float
    span_s: float


class AppLoad(NamedTuple):
    """One application. per_second is the mean over a day, bursts included. hours: a daily curve of mean 1, or empty.

    bursts: given, or drawn where it is None. ttft_s and tpot_s are what it is promised by default.
    """

    name: str
    model: str
    per_second: float
    input: Lengths
    output: Lengths
    cv: float = 1.0
    hours: tuple[float, ...] = ()
    wobble: float = 0.0
    bursts: tuple[Burst, ...] | None = ()
    tide: Tide | None = None
    ttft_s: float = 1.0
    tpot_s: float = 0.05


Profile = tuple[AppLoad, ...]


def shape62(requests: float = REQUESTS) -> Profile:
    """62 applications with so many requests a day, as in the trace workload62."""
    shape = tomllib.loads(SHAPE.read_text(encoding="utf-8"))
    rows = shape["apps"]["rows"]
    weights = np.arange(1, len(rows) + 1) ** -EXPONENT
    rates = requests / DAY_S * weights / weights.sum()
    return tuple(_app(i, row, float(rate), shape) for i, (row, rate) in enumerate(zip(rows, rates, strict=True)))


def _app(number: int, row: Sequence[Any], per_second: float, shape: Mapping[str, Any]) -> AppLoad:
    model, kind, in_mean, in_spread, out_mean, out_spread, cv, wobble, ttft_s, tpot_s, bursty = row
    known = shape["classes"][kind]
    return AppLoad(
        f"app{number:02d}", model, per_second,
        of_logs(shape["quantiles"], known["input"], in_mean, in_spread, 32_768),
        of_logs(shape["quantiles"], known["output"], out_mean, out_spread, 8192),
        cv, tuple(known["hours"]), wobble, None if bursty else (), None, ttft_s, tpot_s,
    )  # fmt: skip


def blocks(profile: Profile, seed: int, start_s: float, duration_s: float) -> Blocks:
    """The requests of [start_s, start_s + duration_s) of the workload, with times from 0."""
    end_s = start_s + duration_s
    streams = [_Stream(app, i, seed, end_s) for i, app in enumerate(profile) if app.per_second > 0.0]
    per_second = sum(app.per_second for app in profile)
    step_s = float(np.clip(round(_BLOCK / max(per_second, 1e-9)), 5.0, 3600.0))
    # Rates are known at whole seconds: a slice that starts or ends between two is cut there.
    at_s, last_s = float(math.floor(start_s)), float(math.ceil(end_s))
    for stream in streams:
        stream.skip(at_s)
    while at_s < last_s:
        at_s = min(at_s + step_s, last_s)
        block = joined([part for stream in streams if (part := stream.until(at_s)).n]).ordered()
        block = block.part(slice(*np.searchsorted(block.at_s, [start_s, end_s]).tolist()))
        if block.n:
            yield block._replace(at_s=block.at_s - start_s)


def rate(app: AppLoad, number: int, seed: int, at_s: Floats, end_s: float = DAY_S) -> Floats:
    """Requests a second at these times."""
    return _Rate(app, number, seed, max(end_s, DAY_S)).at(at_s)


class _Rate:
    """An application's rate over time. Curves repeat each day; drawn bursts do not."""

    def __init__(self, app: AppLoad, number: int, seed: int, end_s: float) -> None:
        draws = np.random.default_rng([seed, number, 0])
        hours = np.array(app.hours or (1.0,))
        windows = int(DAY_S / _WOBBLE_S)
        wobble = np.exp(app.wobble * draws.standard_normal(windows)) if app.wobble else np.ones(windows)
        base = np.repeat(hours, windows // len(hours)) * wobble
        base = np.clip(base / base.mean(), 0.05, 4.0)
        # A window's centre is where its rate holds; between centres it is interpolated, over midnight too.
        self._centres = (np.arange(-1, windows + 1) + 0.5) * _WOBBLE_S
        self._base = np.concatenate([base[-1:], base, base[:1]])
        self._phase = draws.uniform(0.0, 2.0 * math.pi)
        self._tide = app.tide
        self.bursts = drawn_bursts(draws, end_s) if app.bursts is None else app.bursts
        day = self._shape(np.arange(0.0, DAY_S, 1.0), drawn=app.bursts is None)
        self._factor = app.per_second / float(day.mean())

    def at(self, at_s: Floats) -> Floats:
        return self._factor * self._shape(at_s, drawn=True)

    def _shape(self, at_s: Floats, *, drawn: bool) -> Floats:
        """drawn: with bursts. Those that were given come on top of the mean, those that were drawn are part of it."""
        out = np.interp(at_s % DAY_S, self._centres, self._base)
        if self._tide is not None:
            turn = 2.0 * math.pi * self._tide.cycles / self._tide.span_s
            out = out * (1.0 + self._tide.amplitude * np.sin(turn * at_s + self._phase))
        return np.asarray(out * burst_factor(self.bursts, at_s) if drawn and self.bursts else out)


def drawn_bursts(draws: np.random.Generator, end_s: float) -> tuple[Burst, ...]:
    """Gaps, multiples, ramps and holds as in workload62."""
    found, at_s = [], 0.0
    while (at_s := at_s + draws.exponential(_BURST_GAP_S)) < end_s:
        multiple, ramp_s = draws.uniform(5.0, 10.0), draws.uniform(2.0, 5.0)
        found.append(Burst(at_s, multiple, ramp_s, float(np.clip(draws.lognormal(math.log(30.0), 0.7), 8.0, 150.0))))
    return tuple(found)


def burst_factor(bursts: Sequence[Burst], at_s: Floats) -> Floats:
    """1 without a burst; of bursts that overlap the larger counts. at_s rises."""
    out = np.ones(len(at_s))
    for burst in bursts:
        low, high = np.searchsorted(at_s, [burst.at_s, burst.end_s])
        if high > low:
            since = at_s[low:high] - burst.at_s
            up = np.clip(since / burst.ramp_s, 0.0, 1.0)
            down = np.exp(-np.maximum(since - burst.ramp_s - burst.hold_s, 0.0) / _DECAY_S)
            out[low:high] = np.maximum(out[low:high], 1.0 + (burst.multiple - 1.0) * up * down)
    return out


class _Stream:
    """The requests of one application, as far as they have been drawn. marks are arrivals in expected requests."""

    def __init__(self, app: AppLoad, number: int, seed: int, end_s: float) -> None:
        self._app, self._number = app, number
        self._rate = _Rate(app, number, seed, max(end_s, DAY_S))
        self._times = np.random.default_rng([seed, number, 1])
        self._sizes = np.random.default_rng([seed, number, 2])
        self._marks: Floats = np.zeros(0)
        self._at_s = self._expected = self._last = 0.0

    def until(self, to_s: float) -> Block:
        """The next requests, from where it stands."""
        grid, reached = self._grid(to_s)
        self._draw(float(reached[-1]))
        count = int(np.searchsorted(self._marks, reached[-1]))
        at_s = np.interp(self._marks[:count], reached, grid)
        self._marks = self._marks[count:]
        self._at_s, self._expected = to_s, float(reached[-1])
        return self._sized(at_s)

    def skip(self, to_s: float) -> None:
        """As `until`, where nobody wants the requests: their lengths are passed over without being drawn."""
        if to_s <= self._at_s:
            return
        expected = float(self._grid(to_s)[1][-1])
        passed = 0
        while self._last < expected:
            self._draw(min(expected, self._last + _SKIPPED))
            count = int(np.searchsorted(self._marks, expected))
            passed += count
            self._marks = self._marks[count:]
        self._sizes.bit_generator.advance(2 * passed)  # type: ignore[attr-defined]
        self._at_s, self._expected = to_s, expected

    def _grid(self, to_s: float) -> tuple[Floats, Floats]:
        """Times a second apart, and the requests expected until then."""
        grid = np.arange(self._at_s, to_s + 0.5, 1.0)
        rates = self._rate.at(grid)
        steps = 0.5 * (rates[1:] + rates[:-1])
        return grid, self._expected + np.concatenate([[0.0], np.cumsum(steps)])

    def _draw(self, until: float) -> None:
        shape = 1.0 / self._app.cv**2
        parts = [self._marks]
        while self._last < until:
            gaps = self._times.gamma(shape, 1.0 / shape, max(_DRAWN, int(until - self._last)))
            parts.append(self._last + np.cumsum(gaps))
            self._last = float(parts[-1][-1])
        self._marks = np.concatenate(parts)

    def _sized(self, at_s: Floats) -> Block:
        draws = self._sizes.random((len(at_s), 2))
        numbers: Ints = np.full(len(at_s), self._number)
        return Block(at_s, numbers, self._app.input.at(draws[:, 0]), self._app.output.at(draws[:, 1]))
