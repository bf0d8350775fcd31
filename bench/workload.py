"""What the simulator's load looks like beside what was published: popularity, bursts, and how fast it streams.

    janus bench workload                             the built-in generator beside the trace workload62
    janus bench workload --requests 45600000 --speed a day at production's volume, streamed: speed and peak memory
    janus bench workload --plot DIR                  pictures
    janus bench workload --derive                    the generator's table, from the trace

A burst is a time in which an application's rate over 10 s is at least five times that of the two minutes before, and
beyond what irregular arrivals do by chance. Prints tables; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from janus_server.sched.state import BrainSettings

from .serve_options import Described, Parser, above_zero, count
from .simulator import generator, scenario
from .simulator.blocks import Blocks, Calls
from .workload_plots import draw
from .workload_shape import derive
from .writable import check_file, check_folder

_BURST, _TWICE = 5.0, 2.0
_NEAR_S, _BEFORE_S = 10, 120
# Fewer requests in ten seconds are too few to tell a burst from chance; so are fewer than five standard deviations
# above what came before, of arrivals whose coefficient of variation is 2.
_LEAST: Final = 20
_MOST_REQUESTS: Final = 1e9
_CHANCE: Final = 5.0 * 2.0


class Bursts(NamedTuple):
    """How many times the rate of the two minutes before each burst's ten best seconds had, and the seconds from twice
    that rate to five times. apps are those with any, of those with enough requests for any to be seen."""

    apps: tuple[int, ...]
    seen: int
    multiples: tuple[float, ...]
    rises_s: tuple[float, ...]


class Load(NamedTuple):
    """A day. requests and tokens [apps]; counts [apps, seconds]."""

    name: str
    requests: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int32]
    bursts: Bursts


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    check_file(options.json)
    check_folder(options.plot)
    if options.derive:
        print(derive(options.traces, options.traces.parent / "servegen" / "clients.csv"), end="")
        return 0
    print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}; seed {options.seed}")
    if options.speed:
        _print_speed(options)
        return 0
    profile = generator.shape62(options.requests)
    loads = [measure("generator", generator.blocks(profile, options.seed, 0.0, generator.DAY_S), len(profile))]
    if (options.traces / "requests.csv.gz").exists():
        recorded = {"workload.source": "workload62", "workload.folder": json.dumps(str(options.traces))}
        calls = scenario.read("day62", options.seed, recorded).calls
        if isinstance(calls, Calls):
            loads.append(measure("workload62", calls.blocks(), 62))
    else:
        print(f"{options.traces} is not there: the generator alone")
    _print_rows(loads, {i for i, app in enumerate(profile) if app.bursts is None})
    if options.json is not None:
        options.json.write_text(json.dumps([figures(load) for load in loads], indent=1))
    if options.plot is not None:
        for path in draw(options.plot, loads):
            print(f"wrote {path}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench workload", __doc__ or "")
    parser.formatter_class = Described
    parser.add_argument("--traces", type=Path, default=scenario.FOLDER, help="the folder workload62")
    parser.add_argument("--requests", type=above_zero, default=generator.REQUESTS, help="of the generator's day")
    parser.add_argument("--speed", action="store_true", help="stream the day as calls; speed and peak memory alone")
    parser.add_argument("--derive", action="store_true", help="print the generator's table from the trace")
    parser.add_argument("--seed", type=count, default=0, help="of the generator")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write pictures there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse(arguments)
    if options.requests > _MOST_REQUESTS:
        parser.error(f"--requests: at most {_MOST_REQUESTS:.0g} a day")
    return options


def measure(name: str, blocks: Blocks, apps: int) -> Load:
    """Count a day, in one pass."""
    seconds = int(generator.DAY_S)
    requests, tokens = np.zeros(apps), np.zeros(apps)
    counts = np.zeros(apps * seconds, dtype=np.int32)
    for block in blocks:
        requests += np.bincount(block.app, minlength=apps)
        tokens += np.bincount(block.app, weights=block.inputs + block.outputs, minlength=apps)
        np.add.at(counts, block.app * seconds + np.minimum(block.at_s.astype(np.int64), seconds - 1), 1)
    table = counts.reshape(apps, seconds)
    return Load(name, requests, tokens, table, bursts_of(table))


def share_of(values: npt.NDArray[np.float64], part: float) -> float:
    """Of the whole, what the first `part` of the applications have; between two it is interpolated."""
    reached = np.concatenate([[0.0], np.cumsum(np.sort(values)[::-1])])
    return float(np.interp(part * len(values), np.arange(len(reached)), reached) / reached[-1])


def bursts_of(counts: npt.NDArray[np.int32]) -> Bursts:
    """counts [apps, seconds]."""
    apps, multiples, rises = [], [], []
    seen = 0
    for app, row in enumerate(counts):
        reached = np.concatenate([[0], np.cumsum(row, dtype=np.int64)])
        at = np.arange(_BEFORE_S + _NEAR_S, len(row) + 1)
        near = reached[at] - reached[at - _NEAR_S]
        before = (reached[at - _NEAR_S] - reached[at - _NEAR_S - _BEFORE_S]) * _NEAR_S / _BEFORE_S
        seen += bool(near.max(initial=0) >= _LEAST)
        least = np.maximum(_LEAST, before + _CHANCE * np.sqrt(before))
        ratio = np.where(near >= least, near / np.maximum(before, 1.0), 0.0)
        found = _events(np.flatnonzero(ratio >= _BURST))
        apps += [app] if found else []
        for low, high in found:
            multiples.append(float(ratio[low : high + 1].max()))
            rises.append(_rise_s(row, int(at[low]), float(before[low]) / _NEAR_S))
    return Bursts(tuple(apps), seen, tuple(multiples), tuple(rises))


def _events(at: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """First and last of each, where less than two minutes of quiet belong to the burst."""
    if not len(at):
        return []
    cuts = np.flatnonzero(np.diff(at) > _BEFORE_S)
    return list(zip(at[np.r_[0, cuts + 1]].tolist(), at[np.r_[cuts, len(at) - 1]].tolist(), strict=True))


def _rise_s(row: npt.NDArray[np.int32], at: int, before: float) -> float:
    """From the last second below twice the rate before to the first at five times, each over three seconds."""
    low = max(0, at - 3 * _NEAR_S)
    smooth = np.convolve(row[low : at + _NEAR_S], np.ones(3) / 3, "valid")
    high = np.flatnonzero(smooth >= _BURST * before)
    if not len(high):
        return float(_NEAR_S)
    quiet = np.flatnonzero(smooth[: high[0]] < _TWICE * before)
    return float(high[0] - (quiet[-1] if len(quiet) else -1))


def figures(load: Load) -> dict[str, float | int | str]:
    many = np.array(load.bursts.multiples or (0.0,))
    low, middle, high = np.quantile(many, [0.1, 0.5, 0.9]).tolist()
    return {
        "load": load.name, "requests": int(load.requests.sum()), "tokens": int(load.tokens.sum()),
        "requests_of_12_percent": share_of(load.requests, 0.12), "tokens_of_30_percent": share_of(load.tokens, 0.30),
        "apps": len(load.requests), "apps_seen": load.bursts.seen, "bursting_apps": len(load.bursts.apps),
        "bursts": len(load.bursts.multiples), "multiple_p10": low, "multiple_p50": middle, "multiple_p90": high,
        "rise_s_p50": float(np.median(load.bursts.rises_s or (0.0,))),
    }  # fmt: skip


def _print_rows(loads: Sequence[Load], planted: set[int]) -> None:
    """planted: the applications that both loads give bursts to; the others' are clumps of irregular arrivals."""
    said = [figures(load) for load in loads]
    rows = [
        ("requests a day", "603,000 replayed", [f"{s['requests']:,}" for s in said]),
        ("tokens a day, millions", "-", [f"{int(s['tokens']) / 1e6:.0f}" for s in said]),
        ("A17 requests of 12 % of apps", "80 %", [f"{100 * float(s['requests_of_12_percent']):.1f} %" for s in said]),
        ("A17 tokens of 30 % of apps", "80 %", [f"{100 * float(s['tokens_of_30_percent']):.1f} %" for s in said]),
        ("A16 apps that burst", "a few", [f"{s['bursting_apps']} of {s['apps']}" for s in said]),
        ("A16 of these, given bursts", "-", [f"{len(planted.intersection(load.bursts.apps))} of {len(planted)}"
                                             for load in loads]),
        ("A16 bursts seen, p10/50/90", "5-10 x", [
            f"{s['bursts']}: {s['multiple_p10']:.1f}/{s['multiple_p50']:.1f}/{s['multiple_p90']:.1f}" for s in said]),
        ("A16 seconds from 2 to 5 times", "seconds", [f"{s['rise_s_p50']:.0f}" for s in said]),
    ]  # fmt: skip
    fleet = BrainSettings().fleet
    rows.append(("A24 decisions every", "30 s and 0.5 s", [f"{fleet.slow_s:g} s and {fleet.fast_s:g} s"] * len(said)))
    print(f"\n{'row':34}{'published':>20}" + "".join(f"{load.name:>20}" for load in loads))
    for name, paper, ours in rows:
        print(f"{name:34}{paper:>20}" + "".join(f"{text:>20}" for text in ours))
    seen = ", ".join(f"{load.bursts.seen} of {load.name}" for load in loads)
    print(f"only apps with {_LEAST} requests in some ten seconds can be seen to burst: {seen}")


def _print_speed(options: argparse.Namespace) -> None:
    profile = generator.shape62(options.requests)
    count, began_s = 0, time.perf_counter()
    last_s = 0.0
    for call in Calls(lambda: generator.blocks(profile, options.seed, 0.0, generator.DAY_S)):
        count += 1
        last_s = call.at_s
    took_s = time.perf_counter() - began_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count:,} calls of {last_s / 3600:.1f} h in {took_s:.1f} s: {count / took_s:,.0f} a second, "
          f"{1e6 * took_s / max(count, 1):.2f} µs each; peak memory {peak_mib:.0f} MiB")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
