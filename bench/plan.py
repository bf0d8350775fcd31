"""How many devices a load takes, by simulation: the fewest that keep enough promises, and who needs the last one.

    janus plan --scenario day62 --target 0.97                  all requests of a day of 62 applications
    janus plan --scenario day62 --judge hour --policy prism    in every single hour, led by an imitation of Prism
    janus plan --scenario my.toml --seeds 3                    with every one of three seeds
    janus plan --target 0.9                                    of the small default scenario

The number of devices is doubled until it is enough, then halved between; every answer was run, and one less was too.
The scenario's own number of hosts does not matter: the first of its devices are taken, and more like them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from janus_server.errors import BadConfig
from janus_server.units import format_seconds

from .serve_options import Parser, count, fraction
from .simulator import devices, policies, scenario, spec
from .simulator.attempts import How, attempt, check_since, with_nodes
from .simulator.batching import Rules
from .simulator.columns import amount, share
from .simulator.plan import Judge, Plan, Trial, search, sentences, trial_of, worst
from .simulator.records import Scenario
from .simulator.summary import summarise
from .writable import check_file

_MOST_SEEDS: Final = 1000


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    check_file(options.json)
    asked = _largest(options)
    check_since(asked[0], options.since)
    policies.make(options.policy, asked[0])  # what cannot be had is said before anything runs
    print(f"{asked[0].name}: {options.policy}, {options.fidelity}, {share(options.target)} of {options.judge}")
    plan = search(functools.partial(_attempt, asked, options), options.target, first=options.first, most=options.most)
    for line in sentences(plan):
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(_document(plan, options), indent=1), encoding="utf-8")
    return 0


def _largest(options: argparse.Namespace) -> list[Scenario]:
    """One scenario a seed, each with as many nodes as may be tried."""
    given = dict(_pair(pair) for pair in options.set)
    cluster = spec.load(options.scenario, given).cluster
    if cluster.more:
        raise BadConfig(f"scenario {options.scenario}: its hosts are of several kinds; janus plan counts alike ones")
    hosts = str(math.ceil(options.most / cluster.devices))
    seeds = range(options.seed, options.seed + options.seeds)
    return [scenario.read(options.scenario, seed, {**given, "hosts": hosts}) for seed in seeds]


def _attempt(asked: Sequence[Scenario], options: argparse.Namespace, nodes: int) -> Trial:
    """With each seed; the worst counts."""
    began_s = time.perf_counter()
    trials = []
    for whole in asked:
        try:
            trials.append(_one(with_nodes(whole, nodes), options))
        except BadConfig as error:
            return _said(Trial(nodes, 0.0, {}, why=str(error)), began_s)
        if trials[-1].attainment < options.target:
            break  # other seeds cannot make it enough
    return _said(worst(trials), began_s)


def _one(some: Scenario, options: argparse.Namespace) -> Trial:
    how = How(options.fidelity, Rules(one_prompt_at_a_time=options.one_prompt), options.since, quiet=options.quiet)
    record = attempt(some, options.policy, how, f"{len(some.nodes)} devices")
    return trial_of(len(some.nodes), summarise(record), Judge(options.judge))


def _said(trial: Trial, began_s: float) -> Trial:
    what = trial.why or f"{share(trial.attainment)}, {amount(trial.device_hours)} device-hours"
    print(f"  {trial.nodes:>6} devices  {what}  ({format_seconds(time.perf_counter() - began_s)})", flush=True)
    return trial


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise BadConfig(f"--set {text}: write KEY=VALUE, such as --set duration_s=600")
    if key in ("hosts", "cluster.hosts"):
        raise BadConfig(f"--set {text}: the number of devices is what janus plan looks for")
    return key, value


def _document(plan: Plan, options: argparse.Namespace) -> dict[str, object]:
    return {
        "scenario": options.scenario, "policy": options.policy, "target": plan.target, "judge": options.judge,
        "seed": options.seed, "seeds": options.seeds, "nodes": plan.enough.nodes,
        "marginal": None if plan.marginal is None else plan.marginal._asdict(),
        "trials": [{**t._asdict(), "models": {m: k._asdict() for m, k in t.models.items()}} for t in plan.trials],
        "not_enough_though_larger": [t.nodes for t in plan.odd],
    }  # fmt: skip


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus plan", __doc__ or "")
    parser.add_argument("--scenario", default="smoke", metavar="FILE|NAME", help="as janus simulate --list names them")
    parser.add_argument("--policy", default="janus", metavar="NAME")
    parser.add_argument("--target", type=fraction, default=0.95, metavar="SHARE", help="of promises to keep (0.95)")
    parser.add_argument("--judge", choices=[judge.value for judge in Judge], default="overall",
                        help="of all requests, of the worst hour's, or of the worst application's")  # fmt: skip
    parser.add_argument("--fidelity", choices=devices.FIDELITIES, default="fluid")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="devices to begin with")
    parser.add_argument("--most", type=int, default=1024, metavar="N", help="devices to end with")
    parser.add_argument("--seed", type=count, default=0)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="so many, from --seed on: the worst counts")
    parser.add_argument("--since", type=float, metavar="S",
                        help="count requests from this second on; default: as the scenario says, else 0")  # fmt: skip
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="of the scenario")
    parser.add_argument("--one-prompt", action="store_true", help="no two prompts in one step of a device")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse(arguments)
    if not 1 <= options.seeds <= _MOST_SEEDS:
        parser.error(f"--seeds: 1 to {_MOST_SEEDS}")
    if not 1 <= options.first <= options.most:
        parser.error(f"--first {options.first} --most {options.most}: from 1 on, and no fewer at the end")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
