"""How far the oracle can be trusted, and what it costs: the prior before any observation, the band after thirty, times.

    janus bench oracle                          the 14 models of workload62, recorded and drawn traffic; minutes
    janus bench oracle --models Qwen3-8B        some of them
    janus bench oracle --speed --plot DIR       fits and ticks alone

Truths come from replicas simulated step by step (`oracle_world`) on devices that differ from their data sheets. Prints
tables; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from janus_server.bounded import Workers  # house: exempt — what is measured is the fit as the server starts it
from janus_server.errors import BadConfig, require
from janus_server.sched import oracle_records
from janus_server.sched.oracle import Ask, Oracle, OracleSettings
from janus_server.sched.oracle_prior import expect, numbers_of, physics_and_limits, table_of, traffic_of
from janus_server.sched.oracle_records import OUTPUTS, Features, FitRequest, Fitted, Observation, Subject

from .oracle_plots import draw
from .oracle_speed import Speed, measure, print_speed
from .oracle_subjects import WINDOW_S, Recorded, drawn_window, read, recorded_window
from .oracle_world import features_of, observe, true_physics

SCENARIOS: Final = ("recorded", "drawn")
COUNTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Of the replicas of a window: the others would be like them.
_WATCHED: Final = 3
_BAND_SIGMAS: Final = 1.645
FIT_PROGRAM: Final = Path(oracle_records.__file__).with_name("oracle_fit.py")


class Trial(NamedTuple):
    """One model under one kind of traffic. Of the prior: the median over windows of truth over prediction, and the
    part of windows within a factor of two. Of the fits: the part of held-out truths inside the 90 % band, and the
    median factor by which the prediction misses; attainment's error is a mean of absolute differences."""

    model: str
    scenario: str
    windows: int
    replicas: float
    on_time: float
    prior_ratio: list[float]
    prior_within: list[float]
    covered: list[float]
    attainment_covered: float
    factor: list[float]
    attainment_error_prior: float
    attainment_error: float
    fit_s: float


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}; seed {options.seed}")
    fits = Workers(FIT_PROGRAM, workers=1, cpu_s=60.0, memory_bytes=8 << 30, answer_bytes=64 << 20)
    try:
        trials = [] if options.speed else list(_trials(options, fits))
        speed = measure(lambda request: fit(fits, request), options.seed)
    finally:
        fits.close()
    if trials:
        _print_summary(trials)
    print_speed(speed)
    if options.json is not None:
        options.json.write_text(_as_json(options, trials, speed))
    if options.plot is not None:
        for path in draw(options.plot, trials, speed):
            print(f"wrote {path}")
    return 0


def fit(fits: Workers, request: FitRequest) -> Fitted:
    """By the helper process."""
    answer = fits.ask(msgspec.to_builtins(request))
    require(answer is not None, "the fit gave no answer within its bounds")
    return msgspec.convert(answer, Fitted)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="janus bench oracle", description="prior, calibration and cost of the oracle")
    default = Path(__file__).resolve().parents[2] / "shared" / "traces" / "workload62"
    parser.add_argument("--traces", type=Path, default=default, help="the folder workload62; --speed needs none")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="some of its 14 models")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--train", type=int, default=30, help="observations before a fit")
    parser.add_argument("--repeats", type=int, default=3, help="fits of a model, each to observations of its own")
    parser.add_argument("--held", type=int, default=100, help="windows that no fit sees")
    parser.add_argument("--speed", action="store_true", help="fits and ticks alone; no trace needed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def _trials(options: argparse.Namespace, fits: Workers) -> Iterator[Trial]:
    models = read(options.traces)
    unknown = [name for name in options.models or [] if name not in models]
    if unknown:
        raise BadConfig(f"--models {unknown[0]}: not in the trace; there are: {', '.join(models)}")
    for scenario in options.scenario:
        print(
            f"\n{scenario} traffic: truth/prior before any observation, then after {options.train} observations\n"
            f"{'model':17} {'n':>5} {'kept':>5}   {'median HBM comp bandw':^22} {'within 2x, %':^14}"
            f"   {'in 90% band: HBM comp bandw att':^32} {'off by, %':^14} {'att. error':^13}"
        )
        for index, name in enumerate(models):
            if options.models and name not in options.models:
                continue
            draws = np.random.default_rng([options.seed, index, SCENARIOS.index(scenario)])
            trial = _trial(name, scenario, models[name], options, fits, draws)
            _print_trial(trial)
            yield trial


def _trial(
    name: str, scenario: str, recorded: Recorded, options: argparse.Namespace, fits: Workers,
    draws: np.random.Generator,
) -> Trial:  # fmt: skip
    subject = recorded.subject
    wanted = options.train * options.repeats + options.held
    seen = _observations(recorded, scenario, wanted, draws)
    held, rest = seen[: options.held], seen[options.held :]
    before = _judge(_oracle(subject), held, draws)
    after, took = [], []
    for repeat in range(options.repeats):
        oracle = _oracle(subject)
        part = rest[repeat * options.train : (repeat + 1) * options.train]
        for i, observation in enumerate(part):
            oracle.observe("m", msgspec.structs.replace(observation, at_s=i * WINDOW_S))
        request = oracle.next_fit(len(part) * WINDOW_S)
        if request is None:
            continue
        fitted = fit(fits, request)
        took.append(fitted.took_s)
        oracle.learn(fitted)
        after.append(_judge(oracle, held, draws))
    kept, total = sum(o.on_time for o in seen), sum(o.requests for o in seen)
    return Trial(
        name, scenario, len(held), float(np.mean([o.replicas for o in seen])), kept / total,
        np.exp(np.median(before.errors, 0)).tolist(), (np.abs(before.errors) <= np.log(2.0)).mean(0).tolist(),
        np.mean([j.inside for j in after], 0).tolist(), float(np.mean([j.attained_inside for j in after])),
        np.exp(np.mean([np.median(np.abs(j.errors), 0) for j in after], 0)).tolist(),
        before.attained_error, float(np.mean([j.attained_error for j in after])), float(np.mean(took)),
    )  # fmt: skip


def _oracle(subject: Subject) -> Oracle:
    oracle = Oracle(OracleSettings(window_s=WINDOW_S))
    oracle.know("m", subject)
    return oracle


def _observations(recorded: Recorded, scenario: str, wanted: int, draws: np.random.Generator) -> list[Observation]:
    """Windows in random order, so that those that are held out are like those that are not. Replica counts: about what
    the prior asks for where traffic is recorded; 1 to 4, over all loads up to beyond saturation, where it is drawn."""
    subject, seen = recorded.subject, list[Observation]()
    physics, prior, busiest = true_physics(subject, draws), _oracle(subject), _busiest(recorded)
    for _ in range(4 * wanted):
        if scenario == "drawn":
            replicas = int(draws.integers(1, 5))
            load = float(np.exp(draws.uniform(np.log(0.08), np.log(1.2))))
            requests, window = drawn_window(recorded, replicas * busiest * load, draws)
        else:
            requests, window = recorded_window(recorded, draws)
            replicas = _replicas(prior, features_of(requests, window), draws)
        observation = observe(subject, physics, requests, window, replicas, _WATCHED, 0.0, draws)
        if observation is not None:
            seen.append(observation)
        if len(seen) == wanted:
            return seen
    raise BadConfig(f"{subject.model.name}: too few windows of the trace hold a request of it")


def _replicas(prior: Oracle, features: Features, draws: np.random.Generator) -> int:
    chosen = prior.smallest(Ask("m", features, COUNTS), 0.9).replicas
    return max(1, round(chosen * float(np.exp(draws.uniform(-0.5, 0.3)))))


def _busiest(recorded: Recorded) -> float:
    """Requests a second at which the prior expects half of one replica's to be on time."""
    inputs, outputs = recorded.requests.inputs, recorded.requests.outputs
    features = Features(0.0, 1.0, *(float(x) for x in (inputs.mean(), inputs.var(), outputs.mean(), outputs.var())))
    rates = np.exp(np.linspace(np.log(1e-3), np.log(2e3), 300))
    physics, limits = physics_and_limits([numbers_of(recorded.subject)])
    odds = expect(physics, limits, traffic_of(table_of([features]), 1.0 / rates[None])).log_odds[0]
    above = np.flatnonzero(odds > 0.0)
    return float(rates[above[-1]]) if len(above) else float(rates[0])


class _Judged(NamedTuple):
    """errors [n, 3]: logarithms of truth over prediction; inside [3] and attained_inside: parts within the band."""

    errors: npt.NDArray[np.float64]
    inside: npt.NDArray[np.float64]
    attained_inside: float
    attained_error: float


def _judge(oracle: Oracle, held: Sequence[Observation], draws: np.random.Generator) -> _Judged:
    asks = [Ask("m", o.features, (o.replicas,)) for o in held]
    demands = [oracle.demand([ask])[0] for ask in asks]
    truths = np.maximum([(o.hbm or 0.0, o.compute or 0.0, o.bandwidth or 0.0) for o in held], 1e-4)
    errors = np.log(truths) - np.log([d.median[0] for d in demands])
    inside = (np.abs(errors) <= _BAND_SIGMAS * np.array([d.sigma[0] for d in demands])).mean(0)
    said = [oracle.attainment([ask])[0] for ask in asks]
    ranks = [_rank(float(a.expected[0]), float(a.sigma[0]), o, draws) for a, o in zip(said, held, strict=True)]
    missed = [abs(float(a.expected[0]) - o.on_time / o.requests) for a, o in zip(said, held, strict=True)]
    return _Judged(errors, inside, float(np.mean([0.05 < r < 0.95 for r in ranks])), float(np.mean(missed)))


def _rank(expected: float, sigma: float, seen: Observation, draws: np.random.Generator) -> float:
    """Where a window's count lies in its predicted distribution, 0 to 1: binomial over normal log odds.

    Counts are whole: within one, the place is drawn, so that a right prediction gives evenly spread ranks.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    odds = np.log(expected / (1.0 - expected)) + sigma * nodes
    chance = np.clip(1.0 / (1.0 + np.exp(-odds)), 1e-12, 1.0 - 1e-12)
    counts = np.arange(seen.requests + 1)
    log_ways = np.concatenate(([0.0], np.cumsum(np.log((seen.requests - counts[:-1]) / counts[1:]))))
    tables = np.exp(
        log_ways[:, None] + counts[:, None] * np.log(chance) + (seen.requests - counts[:, None]) * np.log1p(-chance)
    )
    mass = tables @ (weights / weights.sum())
    return float(mass[: seen.on_time].sum() + draws.random() * mass[seen.on_time])


def _print_trial(t: Trial) -> None:
    percent = [100 * x for x in (*t.prior_within, *t.covered, t.attainment_covered)]
    print(
        f"{t.model:17} {t.replicas:5.1f} {t.on_time:5.2f}   " + " ".join(f"{x:6.2f}" for x in t.prior_ratio)
        + "   " + " ".join(f"{x:4.0f}" for x in percent[:3]) + "   " + " ".join(f"{x:7.1f}" for x in percent[3:])
        + "   " + " ".join(f"{100 * (x - 1):4.0f}" for x in t.factor)
        + f"   {t.attainment_error_prior:.3f} {t.attainment_error:.3f}", flush=True,
    )  # fmt: skip


def _print_summary(trials: Sequence[Trial]) -> None:
    names = (*OUTPUTS, "attainment")
    for scenario in dict.fromkeys(t.scenario for t in trials):
        these = [t for t in trials if t.scenario == scenario]
        ratios = np.array([t.prior_ratio for t in these])
        good = (ratios <= 2.0) & (ratios >= 0.5)
        inside = np.array([[*t.covered, t.attainment_covered] for t in these])
        counts = ", ".join(f"{name} {n} of {len(these)}" for name, n in zip(OUTPUTS, good.sum(0), strict=True))
        print(f"\n{scenario}: models whose median demand the prior has within 2x: {counts}")
        for k, name in enumerate(names):
            column = 100 * inside[:, k]
            right = int(((column >= 85.0) & (column <= 95.0)).sum())
            print(f"  in the 90 % band, {name:11} mean {column.mean():5.1f} %, worst {column.min():5.1f} %, "
                  f"most {column.max():5.1f} %; {right} of {len(these)} models between 85 and 95 %")  # fmt: skip


def _as_json(options: argparse.Namespace, trials: Sequence[Trial], speed: Speed) -> str:
    figures = {
        "seed": options.seed, "train": options.train, "held": options.held, "repeats": options.repeats,
        "trials": [t._asdict() for t in trials], "speed": speed.as_builtins(),
    }  # fmt: skip
    return json.dumps(figures, indent=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
