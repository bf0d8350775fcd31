"""A whole day in the simulator, policy after policy, on a cluster sized for the day's own peaks: hours, device-hours.

    janus bench simulate_day                               the built-in day of 62 applications, six policies: an hour
    janus bench simulate_day --policy static janus         two of them
    janus bench simulate_day --set duration_s=7200         the first two hours alone, sized for their peaks
    janus bench simulate_day --set source=workload62 --out DIR     the recorded day; figures, JSON and a page in DIR

The cluster has as many devices as `static` needs: for each model, the replicas that its busiest half minute takes, each
on devices of its own. What policies save is told against that, and against whole hosts. All begin with an empty
cluster; what comes while they place what they want to is run and not counted, as the scenario says.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from janus_server.errors import BadConfig, Bug

from .serve_options import Parser, count
from .simulator import devices, figures, peaks, policies, report, scenario, spec
from .simulator.attempts import How, attempt, pairs, with_nodes
from .simulator.columns import amount, share
from .simulator.records import Scenario
from .simulator.summary import summarise
from .writable import check_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POLICIES: Final = ("static", "janus", "blitzscale", "prism", "serverlessllm", "llumnix")
_KINDS: Final = ("ttft", "tpot", "overall")


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    check_folder(options.out)
    given = pairs(options.set)
    if not {"hosts", "cluster.hosts"}.isdisjoint(given):
        raise BadConfig("--set hosts: the trace's peaks say how many there are; --devices says it instead")
    asked, whole_hosts = _sized(options, given)
    for name in options.policy:
        policies.make(name, asked)  # what cannot be had is said before anything runs
    records, stopped = {}, False
    for name in dict.fromkeys(options.policy):
        try:
            records[name] = attempt(asked, name, How(options.fidelity, quiet=options.quiet))
        except Bug as error:
            print(f"{name} broke off: {error}", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            print(f"{name} was interrupted" + "; the others follow" * bool(records), file=sys.stderr)
            stopped = True
            break
        for line in _cost(name, summarise(records[name]), len(asked.nodes), whole_hosts):
            print(line, flush=True)
    if not records:
        return 130 if stopped else 1
    found = report.write(records, options.out)
    for line in hours(found):
        print(line)
    if options.out is not None:
        try:
            print(f"wrote {figures.picture(options.out / 'hours.png', functools.partial(_paint, found), 9.0)}")
        except BadConfig as error:
            print(f"no picture: {error}")
    if stopped:
        return 130
    return 0 if len(records) == len(set(options.policy)) else 1


def _sized(options: argparse.Namespace, given: Mapping[str, str]) -> tuple[Scenario, int]:
    """The scenario with as many devices as its peaks take, and how many whole hosts of them have."""
    asked = scenario.read(options.scenario, options.seed, given)
    count = options.devices or peaks.devices(asked)
    each = spec.load(options.scenario, given).cluster.devices
    hosts = math.ceil(count / each)
    asked = with_nodes(scenario.read(options.scenario, options.seed, {**given, "hosts": str(hosts)}), count)
    what = "as given" if options.devices else "what its peaks take with a model to each"
    print(f"{asked.name}: {count} devices, {what}; {hosts} whole hosts have {hosts * each}", flush=True)
    return asked, hosts * each


def _cost(name: str, summary: Mapping[str, Any], provisioned: int, whole_hosts: int) -> list[str]:
    """Device-hours by both denominators, and the least of all hours."""
    held, least = summary["devices"]["device_hours"], summary["worst_hour"]
    span_h = (summary["duration_s"] - summary["since_s"]) / 3600.0
    saved = [1.0 - held / (count * span_h) for count in (provisioned, whole_hosts)]
    kept = ", ".join(f"{kind} {share(least[kind])}" for kind in _KINDS)
    return [
        f"{name}: {amount(held)} device-hours in {span_h:.1f} h, {saved[0]:.1%} less than {provisioned} devices all "
        f"the time, {saved[1]:.1%} less than whole hosts ({whole_hosts}); busy {share(summary['devices']['busy'])}",
        f"{name}: the least of all hours: {kept}",
    ]


def hours(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Kept by hour, a line each."""
    first = next(iter(found.values()))
    width = max(20, *(len(name) + 2 for name in found))
    lines = ["", "kept by hour, of all requests: TTFT, TPOT, both", "hour  requests" + "".join(
        f"{name:>{width}}" for name in found)]  # fmt: skip
    for i, hour in enumerate(first["hours"]):
        cells = []
        for summary in found.values():
            kept = summary["hours"][i]["attainment"]["of_all"]
            cells.append(" ".join(share(kept[kind]).removesuffix(" %").rjust(5) for kind in _KINDS))
        lines.append(f"{i:>4}{hour['requests']:>10,}" + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def _paint(found: Mapping[str, Mapping[str, Any]], figure: Figure) -> None:
    """Kept by hour, one panel for TTFT, TPOT and both."""
    panels = figure.subplots(len(_KINDS), 1, sharex=True)
    for axes, kind in zip(panels, _KINDS, strict=True):
        for (name, summary), colour in zip(found.items(), figures.colours(len(found)), strict=True):
            shares = [hour["attainment"]["of_all"][kind] for hour in summary["hours"]]
            kept = [math.nan if one is None else one for one in shares]
            axes.plot(range(len(kept)), kept, marker="o", markersize=3, color=colour, label=name)
        axes.axhline(0.97, color="#555555", linestyle=":", linewidth=1)
        axes.set(ylabel=kind)
    panels[0].legend(fontsize=8)
    panels[-1].set_xlabel("hour")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench simulate_day", __doc__ or "")
    parser.add_argument("--scenario", default="day62", metavar="FILE|NAME", help="default: day62")
    parser.add_argument("--policy", nargs="+", default=list(_POLICIES), metavar="NAME",
                        help=f"default: {' '.join(_POLICIES)}")  # fmt: skip
    parser.add_argument("--devices", type=int, default=0, metavar="N", help="instead of what the peaks take")
    parser.add_argument("--fidelity", choices=devices.FIDELITIES, default="fluid", help="default: fluid")
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="default: 0")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="of the scenario")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write JSON, figures and report.html there")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse(arguments)
    if options.devices < 0:
        parser.error("--devices: at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
