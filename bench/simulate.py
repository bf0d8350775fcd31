"""Whole days of an imaginary cluster: policies beside each other on the same requests, in a table and a report.

    janus simulate                                                 a minute of three small models, led by janus
    janus simulate --scenario day62 --policy janus static          a day of 62 applications, two policies compared
    janus simulate --scenario my.toml --policy janus --out report  figures, JSON and one HTML page
    janus simulate --scenario smoke --explain 17                   the story of one request

The world supplies time and physics, policies decide: `janus` is the very Brain that leads a live cluster. Everything
random comes from --seed, so that a run can be had again.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from janus_server.errors import BadConfig, Bug
from janus_server.suggest import nearest

from .serve_options import Parser, count
from .simulator import devices, policies, report, scenario, spec
from .simulator.attempts import How, attempt, check_since, device_of, pairs
from .simulator.batching import Rules, check_room
from .simulator.records import Scenario
from .writable import check_folder

_DEFAULT: Final = "smoke"


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.list:
        return _list()
    if options.fidelity not in devices.FIDELITIES:
        raise BadConfig(
            f"--fidelity: there are {', '.join(devices.FIDELITIES)}{nearest(options.fidelity, devices.FIDELITIES)}"
        )
    asked = scenario.read(options.scenario, options.seed, pairs(options.set))
    rules = Rules(parts=options.memory_parts, one_prompt_at_a_time=options.one_prompt)
    how = How(options.fidelity, rules, options.since, options.fit, options.quiet)
    for burst_s in options.burst:
        if not 0.0 <= burst_s < asked.duration_s:
            raise BadConfig(f"--burst {burst_s:g}: scenario {asked.name} goes from second 0 to {asked.duration_s:g}")
    check_since(asked, options.since)
    check_room(asked, rules)
    names = list(dict.fromkeys(options.policy))
    for name in names:
        policies.make(name, asked)  # what cannot be had is said before anything runs
    if options.explain is not None:
        return _explain(asked, names[0], how, options.explain)
    check_folder(options.out)
    records, broken, stopped = {}, 0, False
    for name in names:
        try:
            records[name] = attempt(asked, name, how)
        except Bug as error:
            print(f"{name} broke off: {error}", file=sys.stderr)
            broken += 1
        except KeyboardInterrupt:
            print(f"{name} was interrupted" + "; the others follow" * bool(records), file=sys.stderr)
            stopped = True
            break
    if records:
        report.write(records, options.out, bursts_s=options.burst or asked.bursts_s)
    return 130 if stopped else 1 if broken else 0


def _explain(asked: Scenario, name: str, how: How, request: int) -> int:
    from .simulator.explain import explain

    make = functools.partial(policies.make, name, asked)
    for line in explain(asked, make, device_of(asked, how.fidelity, how.rules), request, how.rules):
        print(line)
    return 0


def _list() -> int:
    for title, entries in (("scenarios", spec.names()), ("policies", policies.names())):
        print(title)
        for name, what in entries.items():
            print(f"  {name:<18} {what}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus simulate", _DESCRIPTION)
    parser.add_argument("--scenario", default=_DEFAULT, metavar="FILE|NAME", help=f"default: {_DEFAULT}")
    parser.add_argument("--policy", nargs="+", default=["janus"], metavar="NAME",
                        help="one or several, compared; default: janus")  # fmt: skip
    parser.add_argument("--fidelity", default="fluid", metavar="step|fluid",
                        help="of devices: every step with the live batcher, or rates; default: fluid")  # fmt: skip
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="of all that is random; default: 0")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
                        help="something else than the scenario says, such as factor=2 or cluster.hosts=4")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="write JSON, figures and report.html there")
    parser.add_argument("--burst", type=float, nargs="*", default=[], metavar="S",
                        help="when bursts begin, for recovery; default: the scenario's")  # fmt: skip
    parser.add_argument("--since", type=float, metavar="S",
                        help="count requests from this second on; default: as the scenario says, else 0")  # fmt: skip
    parser.add_argument("--explain", type=int, metavar="REQUEST", help="tell one request's story, by its number")
    parser.add_argument("--fit", action="store_true", help="let the oracle learn (slow; needs torch and gpytorch)")
    parser.add_argument("--memory-parts", type=count, default=0, metavar="N",
                        help="each device's memory in N fixed parts: xTensor off; default: 0, one pool")  # fmt: skip
    parser.add_argument("--one-prompt", action="store_true", help="no two prompts in one step of a device")
    parser.add_argument("--quiet", action="store_true", help="the table alone: no progress, no times")
    parser.add_argument("--list", action="store_true", help="scenarios and policies that there are")
    return parser.parse(arguments)


_DESCRIPTION: Final = (__doc__ or "") + "\njanus simulate --list names all scenarios and policies."
