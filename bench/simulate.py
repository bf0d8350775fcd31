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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from janus_server.errors import BadConfig, Bug
from janus_server.sched.brain import Brain
from janus_server.sched.oracle_records import Fitted
from janus_server.suggest import nearest
from janus_server.units import format_seconds

from .simulator import devices, policies, report, scenario, spec
from .simulator.batching import Rules
from .simulator.recorder import Record
from .simulator.records import Device, NodeSpec, Policy, Scenario
from .simulator.run import Bar, run

_DEFAULT: Final = "smoke"


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.list:
        return _list()
    if options.fidelity not in devices.FIDELITIES:
        raise BadConfig(
            f"--fidelity: there are {', '.join(devices.FIDELITIES)}{nearest(options.fidelity, devices.FIDELITIES)}"
        )
    asked = scenario.read(options.scenario, options.seed, _pairs(options.set))
    rules = Rules(parts=options.memory_parts, one_prompt_at_a_time=options.one_prompt)
    names = list(dict.fromkeys(options.policy))
    for name in names:
        policies.make(name, asked)  # what cannot be had is said before anything runs
    if options.explain is not None:
        return _explain(asked, names[0], options, rules)
    records, broken = {}, 0
    for name in names:
        record = _run(asked, name, options, rules)
        if record is None:
            broken += 1
        else:
            records[name] = record
    if records:
        report.write(records, options.out, bursts_s=options.burst)
    return 1 if broken else 0


def _run(asked: Scenario, name: str, options: argparse.Namespace, rules: Rules) -> Record | None:
    """None where the policy broke its contract; the sentence is printed."""
    record, bar = Record(asked, options.since), Bar(name, asked.duration_s)
    fit = _fit if options.fit else None
    try:
        done = run(
            asked, record.follow(functools.partial(policies.make, name, asked)),
            device_of(asked, options.fidelity, rules), record, rules, fit=fit, watch=None if options.quiet else bar,
        )  # fmt: skip
    except Bug as error:
        print(f"{name} broke off: {error}", file=sys.stderr)
        return None
    finally:
        bar.close()
    record.worked(done.used_s)
    print(f"{name}: {format_seconds(done.simulated_s)} simulated in {format_seconds(done.took_s)}, "
          f"{done.came:,} requests, {format_seconds(done.took_s / max(done.came, 1))} each",
          file=sys.stderr)  # fmt: skip
    return record


def device_of(asked: Scenario, fidelity: str, rules: Rules) -> Callable[[NodeSpec], Device]:
    """What makes the imaginary device of each node."""
    return lambda node: devices.make(fidelity, node, asked.models, (), asked.apps, rules)


def _explain(asked: Scenario, name: str, options: argparse.Namespace, rules: Rules) -> int:
    from .simulator.explain import explain

    make = functools.partial(policies.make, name, asked)
    for line in explain(asked, make, device_of(asked, options.fidelity, rules), options.explain, rules):
        print(line)
    return 0


def _fit(policy: Policy, model: str) -> Fitted | None:
    """In this process; the live server uses one of its own, with limits. torch and gpytorch are imported here alone."""
    try:
        from janus_server.sched import oracle_fit
    except ModuleNotFoundError as error:
        raise BadConfig(f"--fit: {error}; install torch and gpytorch") from None
    request = policy.fit_request(model) if isinstance(policy, Brain) else None
    return None if request is None else oracle_fit.fit(request)


def _pairs(given: Sequence[str]) -> dict[str, str]:
    for pair in given:
        if "=" not in pair:
            raise BadConfig(f"--set {pair}: write KEY=VALUE, such as --set duration_s=600")
    return dict(pair.split("=", 1) for pair in given)


def _list() -> int:
    for title, entries in (("scenarios", spec.names()), ("policies", policies.names())):
        print(title)
        for name, what in entries.items():
            print(f"  {name:<18} {what}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="janus simulate", description="Policies on an imaginary cluster, hours in seconds.", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_epilog(),
    )  # fmt: skip
    parser.add_argument("--scenario", default=_DEFAULT, metavar="FILE|NAME", help=f"default {_DEFAULT}")
    parser.add_argument("--policy", nargs="+", default=["janus"], metavar="NAME", help="one or several, compared")
    parser.add_argument("--fidelity", default="fluid", metavar="step|fluid", help="every step, or rates (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="of the scenario")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write JSON, figures and report.html there")
    parser.add_argument("--burst", type=float, nargs="*", default=[], metavar="S", help="when bursts begin: recovery")
    parser.add_argument("--since", type=float, default=0.0, metavar="S", help="count requests from this second on")
    parser.add_argument("--explain", type=int, metavar="REQUEST", help="tell one request's story, by its number")
    parser.add_argument("--fit", action="store_true", help="let the oracle learn (slow; needs torch and gpytorch)")
    parser.add_argument("--memory-parts", type=int, default=0, metavar="N", help="fixed parts of memory: xTensor off")
    parser.add_argument("--one-prompt", action="store_true", help="no two prompts in one step of a device")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--list", action="store_true", help="scenarios and policies that there are")
    return parser.parse_args(arguments)


def _epilog() -> str:
    return (__doc__ or "").partition("\n\n")[2] + "\njanus simulate --list names all scenarios and policies."
