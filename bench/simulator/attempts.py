"""One policy run on one scenario, from names to a record: what `simulate`, `plan` and the experiments of `bench` share.

The scenario comes read and the policy by its name; how faithfully devices are imitated, and what is printed meanwhile,
says a `How`. Nothing is reported here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from janus_server.errors import BadConfig
from janus_server.sched.brain import Brain
from janus_server.sched.oracle_records import Fitted
from janus_server.units import format_seconds

from . import devices, policies
from .batching import Rules
from .recorder import Record
from .records import Device, NodeSpec, Policy, Scenario
from .run import Bar, run


class How(NamedTuple):
    """since_s: requests before are not counted; None: as the scenario says. fit: the oracle learns. quiet: nothing is
    printed."""

    fidelity: str = "fluid"
    rules: Rules = Rules()
    since_s: float | None = None
    fit: bool = False
    quiet: bool = False


def attempt(asked: Scenario, name: str, how: How = How(), title: str = "") -> Record:  # noqa: B008 - frozen
    """title stands before the bar instead of the policy's name. Bug where the policy breaks its contract."""
    record = Record(asked, asked.since_s if how.since_s is None else how.since_s)
    bar = Bar(title or name, asked.duration_s)
    try:
        done = run(
            asked, record.follow(functools.partial(policies.make, name, asked)),
            device_of(asked, how.fidelity, how.rules), record, how.rules,
            fit=_fit if how.fit else None, watch=None if how.quiet else bar,
        )  # fmt: skip
    finally:
        bar.close()
    record.worked(done.used_s)
    if not how.quiet:
        print(f"{title or name}: {format_seconds(done.simulated_s)} simulated in {format_seconds(done.took_s)}, "
              f"{done.came:,} requests, {format_seconds(done.took_s / max(done.came, 1))} each",
              file=sys.stderr)  # fmt: skip
    return record


def check_since(asked: Scenario, since_s: float | None) -> None:
    """BadConfig where nothing of the scenario would be counted. None: as the scenario says, which was checked."""
    if since_s is not None and not 0.0 <= since_s < asked.duration_s:
        raise BadConfig(f"--since {since_s:g}: scenario {asked.name} goes from second 0 to {asked.duration_s:g}")


def device_of(asked: Scenario, fidelity: str, rules: Rules) -> Callable[[NodeSpec], Device]:
    """What makes the imaginary device of each node."""
    return lambda node: devices.make(fidelity, node, asked.models, (), asked.apps, rules)


def with_nodes(whole: Scenario, nodes: int) -> Scenario:
    """The first of its nodes, and what their hosts keep."""
    kept = whole.nodes[:nodes]
    copies = {node.name: whole.copies[node.name] for node in kept if node.name in whole.copies}
    return msgspec.structs.replace(whole, nodes=kept, copies=copies)


def pairs(given: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE of --set, by key."""
    for pair in given:
        if "=" not in pair:
            raise BadConfig(f"--set {pair}: write KEY=VALUE, such as --set duration_s=600")
    return dict(pair.split("=", 1) for pair in given)


def _fit(policy: Policy, model: str) -> Fitted | None:
    """In this process; the live server uses one of its own, with limits. torch and gpytorch are imported here alone."""
    try:
        from janus_server.sched import oracle_fit
    except ModuleNotFoundError as error:
        raise BadConfig(f"--fit: {error}; install torch and gpytorch") from None
    request = policy.fit_request(model) if isinstance(policy, Brain) else None
    return None if request is None else oracle_fit.fit(request)
