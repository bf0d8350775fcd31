"""From data and a rate to plans: which request of which application is sent when, with how many tokens.

`serve` calls `make_plans` once. Pure given the seed: the same options give the same plans, byte for byte.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from janus_server.errors import BadConfig
from janus_server.suggest import nearest

from .arrivals import Ramp, check_rate, gamma_times, ramp_times, replay_times
from .prompts import Sample
from .records import Application, Drawn, Plan, Segment
from .traces import MOONCAKE_BLOCK_TOKENS, TraceRow

# Keys of a prompt's segments (records.Segment): one space each, so that nothing is shared by accident.
_OWN: Final = 1 << 48
_PREFIX: Final = 2 << 48
_BLOCK: Final = 3 << 48
_WARMUP: Final = 4 << 48


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How requests are spread over time, for data without times of its own."""

    request_rate_rps: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Prompt and answer lengths of `random`: uniform in length·(1 ± range_ratio), after a shared prefix."""

    input_tokens: int = 1024
    output_tokens: int = 128
    range_ratio: float = 0.0
    prefix_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Caps:
    """The longest prompt and answer that the served models take; longer ones of a trace are cut to it."""

    input_tokens: int | None = None
    output_tokens: int | None = None


def random_plans(
    apps: Sequence[Application], count: int, sizes: Sizes, pace: Pace, rng: np.random.Generator
) -> list[Plan]:
    """`count` prompts of drawn sizes for the applications, in order of time."""
    if not 0 <= sizes.range_ratio < 1:
        raise BadConfig(f"--random-range-ratio: {sizes.range_ratio:g} is not in 0 … 1 (below 1)")
    plans = []
    for due_s, app, number in _spread(apps, count, pace, rng):
        own = _size(app.input_tokens or sizes.input_tokens, sizes.range_ratio, rng)
        output = _size(app.output_tokens or sizes.output_tokens, sizes.range_ratio, rng)
        prefix = (Segment(_PREFIX + apps.index(app), sizes.prefix_tokens),) if sizes.prefix_tokens else ()
        plans.append(Plan(due_s, app, Drawn((*prefix, Segment(_OWN + number, own))), output))
    return plans


def written_plans(
    apps: Sequence[Application], samples: Sequence[Sample], count: int | None, pace: Pace, rng: np.random.Generator,
    *, shuffle: bool,
) -> list[Plan]:  # fmt: skip
    """Prompts of a file, from its beginning again when more are wanted than it has."""
    order = rng.permutation(len(samples)).tolist() if shuffle else range(len(samples))
    chosen = [samples[i] for i in itertools.islice(itertools.cycle(order), count or len(samples))]
    by_name = {app.name: app for app in apps}
    plans = []
    for (due_s, app, _), sample in zip(_spread(apps, len(chosen), pace, rng), chosen, strict=True):
        # A file that names known applications decides; names of models that are not served here mean nothing.
        owner = by_name.get(sample.app, app)
        plans.append(Plan(due_s, owner, sample.prompt, owner.output_tokens or sample.output_tokens))
    return plans


def trace_plans(
    apps: Sequence[Application], rows: Sequence[TraceRow], when: float | Pace, caps: Caps, rng: np.random.Generator
) -> list[Plan]:
    """A trace's requests, at its own times (`when` is the speed) or at a pace; rows without an application go to one
    by share.
    """
    if isinstance(when, Pace):
        times_s = _times(when, len(rows), rng)
    else:
        times_s = replay_times(np.array([row.t_s for row in rows]), when)
    by_name = {app.name: app for app in apps}
    common = _owners(apps, len(rows), rng)
    plans = []
    for number, (row, due_s) in enumerate(zip(rows, times_s.tolist(), strict=True)):
        owner = by_name.get(row.app) if row.app else common[number]
        if owner is None:
            raise BadConfig(
                f"the trace has the application {row.app!r}, which --apps does not name{nearest(row.app, by_name)}"
            )
        tokens = min(row.input_tokens, caps.input_tokens or row.input_tokens)
        output = min(row.output_tokens, caps.output_tokens or row.output_tokens)
        plans.append(Plan(due_s, owner, Drawn(_segments(row, tokens, number)), output))
    return plans


def apps_of_trace(rows: Sequence[TraceRow], apps: Sequence[Application]) -> list[Application]:
    """Applications for a trace that names its own when no file described them: the models are dealt out in turn."""
    names = sorted({row.app for row in rows if row.app}, key=lambda name: (len(name), name))
    if not names:
        return list(apps)
    return [dataclasses.replace(apps[i % len(apps)], name=name) for i, name in enumerate(names)]


def warmup_plans(apps: Sequence[Application], count: int, like: Sequence[Plan]) -> list[Plan]:
    """`count` requests for each model before the run, shaped like its first one."""
    first: dict[str, Plan] = {}
    for plan in like:
        first.setdefault(plan.app.model, plan)
    plans = []
    for number, plan in enumerate(first.values()):
        for i in range(count):
            prompt = plan.prompt
            if isinstance(prompt, Drawn):
                prompt = Drawn((Segment(_WARMUP + number * count + i, prompt.tokens),))
            plans.append(dataclasses.replace(plan, due_s=0.0, prompt=prompt, warmup=True))
    return plans


def cut_counts(rows: Sequence[TraceRow], caps: Caps) -> tuple[int, int]:
    """How many prompts and answers of the trace are longer than the caps."""
    return (
        sum(caps.input_tokens is not None and row.input_tokens > caps.input_tokens for row in rows),
        sum(caps.output_tokens is not None and row.output_tokens > caps.output_tokens for row in rows),
    )


def _segments(row: TraceRow, tokens: int, number: int) -> tuple[Segment, ...]:
    """The blocks as far as the prompt reaches; what no block covers is the request's own."""
    found = []
    left = tokens
    for block in row.blocks:
        if left <= 0:
            break
        found.append(Segment(_BLOCK + block, min(left, MOONCAKE_BLOCK_TOKENS)))
        left -= MOONCAKE_BLOCK_TOKENS
    if left > 0:
        found.append(Segment(_OWN + number, left))
    return tuple(found)


def _spread(
    apps: Sequence[Application], count: int, pace: Pace, rng: np.random.Generator
) -> list[tuple[float, Application, int]]:
    """(time, application, number) of `count` requests; an application with a rate has a process, others share one."""
    if count < 1:
        raise BadConfig(f"--num-prompts: {count} is not a number above 0")
    own = [app for app in apps if app.request_rate is not None]
    common = [app for app in apps if app.request_rate is None]
    rates = [app.request_rate or 0.0 for app in own]
    if own and common and math.isinf(pace.request_rate_rps):
        raise BadConfig(
            "some applications have a request_rate and others none: give the others one with --request-rate"
        )
    counts = _split(count, [*rates, pace.request_rate_rps] if common and own else rates if own else [1.0])
    found: list[tuple[float, Application]] = []
    for app, size in zip(own, counts, strict=False):
        check_rate(app.request_rate or 0.0, pace.burstiness)
        times_s = gamma_times(size, app.request_rate or 0.0, pace.burstiness, rng)
        found += [(t, app) for t in times_s.tolist()]
    if common:
        size = counts[-1]
        found += zip(_times(pace, size, rng).tolist(), _owners(common, size, rng), strict=True)
    found.sort(key=lambda item: item[0])
    return [(due_s, app, number) for number, (due_s, app) in enumerate(found)]


def _times(pace: Pace, count: int, rng: np.random.Generator) -> np.ndarray:
    """[count] f64."""
    if pace.ramp is not None:
        return ramp_times(count, pace.ramp, pace.burstiness, rng)
    return gamma_times(count, pace.request_rate_rps, pace.burstiness, rng)


def _owners(apps: Sequence[Application], count: int, rng: np.random.Generator) -> list[Application]:
    shares = np.array([app.share for app in apps])
    return [apps[i] for i in rng.choice(len(apps), size=count, p=shares / shares.sum()).tolist()]


def _split(count: int, weights: Sequence[float]) -> list[int]:
    """`count` in parts like the weights: cumulative rounding, so that the parts add up."""
    edges = np.rint(np.cumsum(weights) / sum(weights) * count).astype(int).tolist()
    return [high - low for low, high in zip([0, *edges], edges, strict=False)]


def _size(tokens: int, ratio: float, rng: np.random.Generator) -> int:
    if ratio == 0:
        return tokens
    return int(rng.integers(max(1, math.floor(tokens * (1 - ratio))), math.ceil(tokens * (1 + ratio)) + 1))
