"""The live scheduler on paced nodes of this machine, beside the simulator on the same requests.

    janus bench live shadow                     ten minutes of three applications on three nodes, live and simulated
    janus bench live burst                      eight times the requests for 30 s on four nodes, with forks and without
    janus bench live dispatch                   LST-IMH, round robin and least load on the same requests, live
    janus bench live shadow --set duration_s=60 --out DIR

Nodes are real processes with real, small models that take as long as the scenario's device does (`live_cluster`): HTTP,
election, tickets, orders, copies and streams are real, only device time is imagined. Each table says how much of the
processors that took. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from janus_server.sched.rules import Rule
from janus_server.sched.state import BrainSettings

from .live_run import Ran, attainment, live, on_time, replicas, twin
from .live_told import Ordered
from .serve_options import Parser, count
from .simulator import scenario
from .simulator.ablations import without_forks
from .simulator.attempts import pairs
from .simulator.records import AppSpec, Scenario
from .writable import check_folder

_SHADOW, _BURST = "live3", "live4"
_DISPATCH: Final = {"duration_s": "110"}
_WINDOW_S: Final = 3.0


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    check_folder(options.out)
    ran, asked = _KINDS[options.kind](options)
    if options.out is not None:
        file = options.out / f"live_{options.kind}.json"
        file.write_text(json.dumps({"machine": _machine(), "runs": [_figures(one, asked) for one in ran]}, indent=1))
        print(f"wrote {file}")
    if options.plot is not None:
        from .live_plots import draw

        for path in draw(options.plot, options.kind, ran, asked):
            print(f"wrote {path}")
    return 0


# The three comparisons


def _shadow(options: argparse.Namespace) -> tuple[list[Ran], Scenario]:
    asked = _asked(options, _SHADOW, {})
    ran = live(asked, BrainSettings(), "live", _folder(options, "shadow"))
    both = [ran, twin(asked, ran, "simulated")]
    _print_attainment(both, asked)
    _print_replicas(both, asked)
    _print_cost(ran)
    return both, asked


def _burst(options: argparse.Namespace) -> tuple[list[Ran], Scenario]:
    asked = _asked(options, _BURST, {"duration_s": "120"})
    # Without memory for copies on the host there is nothing but the checkpoint to read.
    nodes = tuple(msgspec.structs.replace(node, host_bytes=0) for node in asked.nodes)
    disk = msgspec.structs.replace(asked, nodes=nodes)
    found = []
    for name, one, brain in (("forks", asked, BrainSettings()), ("disk alone", disk, without_forks(BrainSettings()))):
        ran = live(one, brain, name, _folder(options, name.replace(" ", "-")))
        found += [ran, twin(one, ran, f"{name}, simulated")]
    _print_attainment(found, asked)
    for ran in found:
        print(burst_line(ran, asked))
    for ran in found[::2]:
        _print_cost(ran)
    return found, asked


def _dispatch(options: argparse.Namespace) -> tuple[list[Ran], Scenario]:
    asked = _asked(options, _BURST, _DISPATCH)
    found = []
    for rule in Rule:
        brain = msgspec.structs.replace(BrainSettings(), dispatch=rule)
        ran = live(asked, brain, rule.value, _folder(options, rule.value))
        found += [ran, twin(asked, ran, f"{rule.value}, simulated")]
    _print_attainment(found, asked)
    for ran in found[::2]:
        _print_cost(ran)
    return found, asked


_KINDS: Final[Mapping[str, Callable[[argparse.Namespace], tuple[list[Ran], Scenario]]]] = {
    "shadow": _shadow, "burst": _burst, "dispatch": _dispatch,
}  # fmt: skip


def _asked(options: argparse.Namespace, name: str, sets: Mapping[str, str]) -> Scenario:
    asked = scenario.read(options.scenario or name, options.seed, {**sets, **pairs(options.set)})
    calls, nodes = tuple(asked.calls), asked.nodes
    print(f"{asked.name}: {len(calls)} requests in {asked.duration_s:g} s, seed {options.seed}, {len(nodes)} paced "
          f"nodes as {nodes[0].shape.name}; {_machine()}", flush=True)  # fmt: skip
    return msgspec.structs.replace(asked, calls=calls)


def _folder(options: argparse.Namespace, name: str) -> Path | None:
    return None if options.out is None else options.out / f"live_{options.kind}_{name}"


# What came of it


def since_s(asked: Scenario) -> float:
    """Requests before it are not counted; since the trace began."""
    return max(0.0, asked.since_s - _first_s(asked))


def burst_s(asked: Scenario) -> float | None:
    """When the first burst begins; since the trace began."""
    return asked.bursts_s[0] - _first_s(asked) if asked.bursts_s else None


def _first_s(asked: Scenario) -> float:
    return min((call.at_s for call in asked.calls), default=0.0)


def recovered_s(ran: Ran, apps: Sequence[AppSpec], app: int, from_s: float) -> float | None:
    """From then on, until of those that came since, in every window of three seconds, the promised share is on time."""
    mine = [
        (one.at_s - from_s, on_time(one, apps[app])) for one in ran.answers if one.app == app and one.at_s >= from_s
    ]
    last_bad_s = 0.0
    for at_s, good in mine:
        window = [ok for other_s, ok in mine if at_s <= other_s < at_s + _WINDOW_S]
        if not good and sum(window) < apps[app].attain * len(window):
            last_bad_s = at_s
    if mine and last_bad_s == mine[-1][0] and not mine[-1][1]:
        return None
    later = [at_s for at_s, _ in mine if at_s > last_bad_s]
    return later[0] if last_bad_s and later else 0.0


def first_copy(ran: Ran, model: str, from_s: float) -> Ordered | None:
    """The first replica more that was ordered since then."""
    rises = (one for one in ran.ordered if one.model == model and one.verb in ("fork", "load", "wake"))
    return next((one for one in rises if one.at_s >= from_s), None)


def burst_line(ran: Ran, asked: Scenario) -> str:
    """When the first copy was ordered and had arrived, and when the promise was kept again."""
    began_s = burst_s(asked)
    if began_s is None:
        return f"  {ran.name:24} has no burst"
    app = max(range(len(asked.apps)), key=lambda i: sum(one.app == i for one in ran.answers))
    copy = first_copy(ran, asked.apps[app].model, began_s)
    came = "no copy" if copy is None else f"{copy.verb} ordered after {copy.at_s - began_s:.2f} s"
    if copy is not None and copy.end_s is not None:
        came += f", there after {copy.end_s - began_s:.2f} s"
    back_s = recovered_s(ran, asked.apps, app, began_s)
    back = "not recovered" if back_s is None else f"promise kept again after {back_s:.1f} s"
    held = [one for one in ran.answers if one.app == app and began_s <= one.at_s < began_s + 32.0]
    share = sum(on_time(one, asked.apps[app]) for one in held) / max(1, len(held))
    return f"  {ran.name:24} {came}; {back}; {share:.1%} of the burst's {len(held)} requests on time"


def _print_attainment(ran: Sequence[Ran], asked: Scenario) -> None:
    print(f"\n  {'on time':24}" + "".join(f"{name:>16}" for name in ("all", *(app.name for app in asked.apps)))
          + f"{'TTFT p50/p99':>20}{'TPOT p50/p99':>20}")  # fmt: skip
    for one in ran:
        shares = attainment(one.answers, asked.apps, since_s(asked))
        kept = [answer for answer in one.answers if answer.at_s >= since_s(asked) and answer.ttft_s is not None]
        ttft = np.quantile([answer.ttft_s or 0.0 for answer in kept] or [0.0], [0.5, 0.99]) * 1e3
        tpot = np.quantile([answer.tpot_s for answer in kept] or [0.0], [0.5, 0.99]) * 1e3
        failed = sum(bool(answer.why) for answer in one.answers)
        print(f"  {one.name:24}" + "".join(f"{share:16.2%}" for share in shares.values())
              + f"{ttft[0]:10.0f} /{ttft[1]:5.0f} ms{tpot[0]:10.1f} /{tpot[1]:5.1f} ms"
              + (f"  {failed} failed" if failed else ""), flush=True)  # fmt: skip


def _print_replicas(ran: Sequence[Ran], asked: Scenario) -> None:
    """Of each model: the mean over time, and for how much of it both had as many."""
    times = np.arange(since_s(asked), ran[0].answers[-1].at_s, 0.5).tolist()
    print("\n  replicas" + " " * 16 + "".join(f"{one.name + ', mean':>18}" for one in ran) + f"{'the same for':>16}")
    for spec in asked.models:
        counts = [np.array(replicas(one.moved, spec.known.model, times)) for one in ran]
        same = float(np.mean(counts[0] == counts[1]))
        print(f"  {spec.known.model:24}" + "".join(f"{row.mean():18.2f}" for row in counts) + f"{same:16.0%}")


def _print_cost(ran: Ran) -> None:
    ours, machine = cores(ran)
    print(f"  {ran.name}: nodes and clients took {ours:.2f} cores of {os.cpu_count()} on average, the machine was "
          f"{machine / (os.cpu_count() or 1):.0%} busy")  # fmt: skip
    for line in ran.notes:
        print(f"    {line}")


def cores(ran: Ran) -> tuple[float, float]:
    """On average over the run: what ours took, and the whole machine."""
    if len(ran.busy) < 2:
        return 0.0, 0.0
    first, last = ran.busy[0], ran.busy[-1]
    took_s = last.at_s - first.at_s
    return (last.ours_s - first.ours_s) / took_s, (last.machine_s - first.machine_s) / took_s


def _machine() -> str:
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def _figures(ran: Ran, asked: Scenario) -> dict[str, Any]:
    answers = [[one.app, round(one.at_s, 4), one.ttft_s, round(one.tpot_s, 5), one.why] for one in ran.answers]
    return {
        "name": ran.name, "on_time": dict(attainment(ran.answers, asked.apps, since_s(asked))), "cores": cores(ran),
        "answers": answers, "moved": [[one.at_s, one.node, one.model, one.stage.value] for one in ran.moved],
        "orders": [one._asdict() for one in ran.ordered], "notes": ran.notes,
    }  # fmt: skip


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench live", __doc__ or "")
    parser.add_argument("kind", choices=list(_KINDS), help="what is compared")
    parser.add_argument("--scenario", metavar="FILE|NAME", help=f"default: {_BURST}, for shadow {_SHADOW}")
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="of all that is random; default: 0")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="of the scenario")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures as JSON, journals and logs there")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write pictures there")
    return parser.parse(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
