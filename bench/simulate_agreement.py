"""Do the simulator's two fidelities tell the same of a whole cluster? The same ten minutes of requests through both.

    janus bench simulate_agreement                              ten minutes of the day of 62 applications, two policies
    janus bench simulate_agreement --scenario dual --policy janus
    janus bench simulate_agreement --set start_s=50000 cluster.hosts=4

Requests and physics are the same; what differs is how each device's steps are made (`simulate_devices` compares single
devices). A policy decides by what devices report, so that a moment's difference grows into another placement. That is
told apart: "replayed" are fluid devices that are told what those of the run in steps were told, every call at the same
moment on the same device. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from janus_server.orders import Action, Order, Stage

from .serve_options import Parser, count
from .simulator import policies, scenario
from .simulator.attempts import device_of, pairs
from .simulator.batching import Rules
from .simulator.records import Device, NodeSpec, Outcome, Scenario
from .simulator.run import run
from .simulator.taped import Taped, outcomes, play
from .writable import check_file

_SCENARIO: Final = "day62"
_SLICE: Final = {"start_s": "36000", "duration_s": "660", "since_s": "60"}
_CLOSE: Final = 0.05
_CLOSE_POINTS: Final = 1.0


class Told(NamedTuple):
    """What one fidelity tells of a slice: means over requests that ended, and what a run took of ours."""

    requests: int
    ended: int
    attainment: float
    ttft_s: float
    tpot_s: float
    took_s: float


class _Ran(NamedTuple):
    """A run of one fidelity: outcomes are by the request's number, tapes of what each device was told."""

    told: Told
    outcomes: dict[int, Outcome]
    tapes: list[Taped]


class _Kept:
    """A Recorder of what became of each request that came from since_s on, by its number."""

    def __init__(self, since_s: float) -> None:
        self._since_s = since_s
        self.outcomes: dict[int, Outcome] = {}

    def outcome(self, outcome: Outcome) -> None:
        if outcome.call.at_s >= self._since_s:
            self.outcomes[outcome.call.id] = outcome

    def decision(self, action: Action, now: float) -> None: ...

    def began(self, order: Order, now: float, takes_s: float) -> None: ...

    def stage(self, node: str, model: str, stage: Stage, now: float) -> None: ...

    def moment(self, now: float, active: Sequence[str]) -> None: ...

    def closed(self, now: float) -> None: ...


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    chosen = dict(_SLICE) if options.scenario == _SCENARIO else {}
    asked = scenario.read(options.scenario, options.seed, chosen | pairs(options.set))
    check_file(options.json)
    for name in options.policy:
        policies.make(name, asked)  # what cannot be had is said before anything runs
    print(f"{asked.name}, {asked.duration_s:g} s, counted from {asked.since_s:g} s on, seed {asked.seed}, "
          f"{len(asked.nodes)} devices; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")  # fmt: skip
    print("  policy           fidelity  requests        on time          mean TTFT           mean TPOT       took")
    figures = {}
    for name in dict.fromkeys(options.policy):
        step, fluid = _run(asked, name, "step"), _run(asked, name, "fluid")
        told = {"step": step.told, "fluid": fluid.told, "replayed": _replayed(asked, step.tapes, step.outcomes)}
        _print(name, told)
        moved = _moved(step.outcomes, fluid.outcomes)
        print(f"  {'':16} {moved:.0%} of the requests were served by another device in fluid")
        figures[name] = {label: one._asdict() for label, one in told.items()} | {"moved": moved}
    print(f"  * beyond {_CLOSE:.0%}, or {_CLOSE_POINTS:.0f} point of attainment")
    if options.json is not None:
        options.json.write_text(json.dumps({"scenario": asked.name, "seed": asked.seed, "policies": figures}, indent=1))
    return 0


def _run(asked: Scenario, policy: str, fidelity: str) -> _Ran:
    kept, rules = _Kept(asked.since_s), Rules()
    tapes: list[Taped] = []
    make = device_of(asked, fidelity, rules)

    def taped(node: NodeSpec) -> Device:
        tapes.append(Taped(node, make(node)))
        return tapes[-1]

    done = run(asked, functools.partial(policies.make, policy, asked), taped, kept, rules)
    return _Ran(_told(asked, kept.outcomes, done.took_s), kept.outcomes, tapes)


def _moved(step: Mapping[int, Outcome], fluid: Mapping[int, Outcome]) -> float:
    """The share of requests that another device served."""
    return sum(step[call].node != fluid[call].node for call in step.keys() & fluid.keys()) / max(1, len(step))


def _replayed(asked: Scenario, tapes: Sequence[Taped], known: dict[int, Outcome]) -> Told:
    make, began_s = device_of(asked, "fluid", Rules()), time.perf_counter()
    emits = [emit for tape in tapes for emit in play(tape, make(tape.node))]
    return _told(asked, outcomes(known, emits), time.perf_counter() - began_s)


def _told(asked: Scenario, outcomes: dict[int, Outcome], took_s: float) -> Told:
    ended = [one for one in outcomes.values() if not one.why and one.ttft_s is not None]
    good = sum(
        (one.ttft_s or 0.0) <= asked.apps[one.call.app].ttft_s and one.tpot_s <= asked.apps[one.call.app].tpot_s
        for one in ended
    )
    ttft_s = [one.ttft_s for one in ended if one.ttft_s is not None]
    tpot_s = [one.tpot_s for one in ended if one.call.output_tokens > 1]
    return Told(len(outcomes), len(ended), good / max(1, len(outcomes)), _mean(ttft_s), _mean(tpot_s), took_s)


def _mean(column: Sequence[float]) -> float:
    return float(np.mean(column)) if column else 0.0


def _print(name: str, told: Mapping[str, Told]) -> None:
    step = told["step"]
    for label, one in told.items():
        print(f"  {name:16} {label:9}{one.requests:9,} {one.attainment:9.2%}{_points(step, one):7} "
              f"{one.ttft_s * 1e3:8.1f} ms {_off(step.ttft_s, one.ttft_s):7} {one.tpot_s * 1e3:8.2f} ms "
              f"{_off(step.tpot_s, one.tpot_s):7} {one.took_s:7.1f} s", flush=True)  # fmt: skip


def _points(step: Told, one: Told) -> str:
    points = 100.0 * (one.attainment - step.attainment)
    return "" if one is step else f"{points:+.2f}{'*' if abs(points) > _CLOSE_POINTS else ' '}"


def _off(step: float, one: float) -> str:
    off = one / step - 1.0 if step else 0.0
    return "" if one == step else f"{off:+.1%}{'*' if abs(off) > _CLOSE else ' '}"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench simulate_agreement", __doc__ or "")
    parser.add_argument("--scenario", default=_SCENARIO, metavar="FILE|NAME", help=f"default: a slice of {_SCENARIO}")
    parser.add_argument("--policy", nargs="+", default=["static", "janus"], metavar="NAME")
    parser.add_argument("--seed", type=count, default=0)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="of the scenario")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
