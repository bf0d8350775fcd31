"""How much load each policy bears in the simulator, or how tight promises may be, until too few are kept.

    janus bench simulate_sweep                                    the greatest factor of scenario rate, four policies
    janus bench simulate_sweep --out DIR                          the same, and sweep.png and sweep.json in DIR
    janus bench simulate_sweep --scenario slo --key scale --easy 2 --hard 0.05     the tightest promises
    janus bench simulate_sweep --scenario dispatch2x --easy 0.5 --hard 4 --policy dispatch-live dispatch-turns

From --easy on the value is doubled (or halved, where --hard is below it) until fewer than --target are kept, then the
gap is halved until it is --within of the value. Every value printed was run; the same seed gives the same answer.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from janus_server.errors import BadConfig
from janus_server.units import format_seconds

from .serve_options import Parser, above_zero, count, fraction
from .simulator import devices, figures, policies, scenario, spec
from .simulator.attempts import How, attempt, check_since, pairs
from .simulator.batching import Rules
from .simulator.columns import share
from .simulator.plan import Judge, judged
from .simulator.summary import summarise
from .simulator.sweep import Limit, search
from .writable import check_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POLICIES: Final = ("janus", "blitzscale", "prism", "serverlessllm")


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    given = pairs(options.set)
    if options.easy == options.hard:
        raise BadConfig(f"--easy {options.easy:g} --hard {options.hard:g}: a sweep goes from one value to another")
    if spec.SHORT.get(options.key, options.key) in {spec.SHORT.get(key, key) for key in given}:
        raise BadConfig(f"--set {options.key}: it is what is swept")
    names = list(dict.fromkeys(options.policy))
    asked = scenario.read(options.scenario, options.seed, {**given, options.key: f"{options.easy:g}"})
    for name in names:
        policies.make(name, asked)  # what cannot be had is said before anything runs
    check_since(asked, options.since)
    check_folder(options.out)
    print(f"{asked.name}: {options.key} from {options.easy:g} to {options.hard:g} with {share(options.target)} of "
          f"{options.judge} kept; {len(asked.nodes)} devices, {options.fidelity}, seed {options.seed}")  # fmt: skip
    limits: dict[str, Limit] = {}
    for name in names:
        one = functools.partial(_attempt, options, given, name)
        limits[name] = search(one, options.target, easy=options.easy, hard=options.hard, within=options.within)
    for line in sentences(limits, options.key, options.hard > options.easy):
        print(line)
    if options.out is not None:
        _save(options, limits)
    return 0


def _attempt(options: argparse.Namespace, given: Mapping[str, str], name: str, value: float) -> float:
    began_s = time.perf_counter()
    asked = scenario.read(options.scenario, options.seed, {**given, options.key: f"{value:g}"})
    how = How(options.fidelity, Rules(one_prompt_at_a_time=options.one_prompt), options.since, quiet=True)
    kept = judged(summarise(attempt(asked, name, how)), Judge(options.judge))
    kept = 1.0 if kept is None else kept
    if not options.quiet:
        print(f"  {name:<14} {options.key} {value:<8g} {share(kept):>8}  "
              f"({format_seconds(time.perf_counter() - began_s)})", flush=True)  # fmt: skip
    return kept


def sentences(limits: Mapping[str, Limit], key: str, rising: bool) -> list[str]:
    """Each policy's limit, and what part of the first one's it is."""
    first, *_ = limits.values()
    lines = []
    for name, limit in limits.items():
        if limit.value is None:
            lines.append(f"{name}: not even {key} {limit.beyond:g}")
            continue
        what = f"{name}: {key} {limit.value:g}"
        what += " and perhaps beyond" if limit.beyond is None else f" ({limit.beyond:g} is too much)"
        if limit is not first and first.value is not None:
            times = first.value / limit.value if rising else limit.value / first.value
            open_end = limit.beyond is None or first.beyond is None
            what += f"; the first bears {times:.3g} times {'that' if rising else 'as tight'}"
            what += ", as far as was tried" if open_end else ""
        lines.append(what)
    return lines


def _save(options: argparse.Namespace, limits: Mapping[str, Limit]) -> None:
    """All that was run, as JSON and as a picture."""
    options.out.mkdir(parents=True, exist_ok=True)
    document = {
        "scenario": options.scenario, "key": options.key, "target": options.target, "judge": options.judge,
        "fidelity": options.fidelity, "seed": options.seed, "set": options.set,
        "policies": {
            name: {"value": limit.value, "beyond": limit.beyond, "tried": sorted(limit.tried.items())}
            for name, limit in limits.items()
        },
    }  # fmt: skip
    path = options.out / "sweep.json"
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(f"wrote {path}")
    try:
        paint = functools.partial(_paint, options, limits)
        print(f"wrote {figures.picture(options.out / 'sweep.png', paint)}")
    except BadConfig as error:
        print(f"no picture: {error}")


def _paint(options: argparse.Namespace, limits: Mapping[str, Limit], figure: Figure) -> None:
    axes = figure.add_subplot()
    for (name, limit), colour in zip(limits.items(), figures.colours(len(limits)), strict=True):
        values, kept = zip(*sorted(limit.tried.items()), strict=True)
        axes.plot(values, kept, marker="o", markersize=4, color=colour, label=name)
    axes.axhline(options.target, color="#555555", linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel=options.key, ylabel=f"share kept, of {options.judge}",
             title=f"{options.scenario}: promises kept by {options.key}", ylim=(0.0, 1.02))  # fmt: skip
    axes.legend(fontsize=8)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench simulate_sweep", __doc__ or "")
    parser.add_argument("--scenario", default="rate", metavar="FILE|NAME", help="default: rate")
    parser.add_argument("--policy", nargs="+", default=list(_POLICIES), metavar="NAME",
                        help=f"the first is compared with the others; default: {' '.join(_POLICIES)}")  # fmt: skip
    parser.add_argument("--key", default="factor", help="what is swept, as in --set; default: factor")
    parser.add_argument("--easy", type=above_zero, default=1.0, metavar="X", help="where to begin; default: 1")
    parser.add_argument("--hard", type=above_zero, default=64.0, metavar="X", help="where to end; default: 64")
    parser.add_argument("--within", type=above_zero, default=0.05, metavar="SHARE", help="how exactly; default: 0.05")
    parser.add_argument("--target", type=fraction, default=0.9, metavar="SHARE", help="to keep; default: 0.9")
    parser.add_argument("--judge", choices=[judge.value for judge in Judge], default="overall",
                        help="of all requests, of the worst hour's, or of the worst application's")  # fmt: skip
    parser.add_argument("--fidelity", choices=devices.FIDELITIES, default="fluid", help="default: fluid")
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="default: 0")
    parser.add_argument("--since", type=float, metavar="S", help="default: as the scenario says")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="of the scenario")
    parser.add_argument("--one-prompt", action="store_true", help="no two prompts in one step of a device")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write sweep.json and sweep.png there")
    parser.add_argument("--quiet", action="store_true", help="the answers alone")
    return parser.parse(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
