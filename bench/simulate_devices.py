"""Do the simulator's two fidelities of a device agree, and what does each cost?

    janus bench simulate_devices                 the table: TTFT, TPOT and attainment of both, by workload
    janus bench simulate_devices --only decode   workloads whose name has that word
    janus bench simulate_devices --length 600    ten minutes of simulated time each

One device with one or four models, calls begun as they come: what differs is the batching alone. `step` makes every
step with the live batcher and the live turns, `fluid` counts whole stretches of them. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from janus_server.errors import BadConfig

from .simulator.agreement import CASES, Case, Run, run

_CLOSE: Final = 0.05
_CLOSE_POINTS: Final = 1.0


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        raise BadConfig(f"no workload has {options.only!r} in its name; there are: {', '.join(c.name for c in CASES)}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; seed {options.seed}, "
          f"{options.length:.0f} s each; step / fluid / how far fluid is off")  # fmt: skip
    print("  workload                 calls       mean TTFT (ms)            mean TPOT (ms)           on time"
          "            cost a call (us)")  # fmt: skip
    figures = []
    for case in cases:
        step, fluid = (run(case, fidelity, options.seed, options.length) for fidelity in ("step", "fluid"))
        _print(case, step, fluid)
        figures.append({"workload": case.name, "step": step._asdict(), "fluid": fluid._asdict()})
    print(f"  * beyond {_CLOSE:.0%}, or {_CLOSE_POINTS:.0f} point of attainment")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"seed": options.seed, "length_s": options.length, "rows": figures}, indent=1)
        )
    return 0


def _print(case: Case, step: Run, fluid: Run) -> None:
    ttft, tpot = (_pair(a * 1e3, b * 1e3) for a, b in ((step.ttft_s, fluid.ttft_s), (step.tpot_s, fluid.tpot_s)))
    points = 100.0 * (fluid.on_time - step.on_time)
    flag = "*" if abs(points) > _CLOSE_POINTS else " "
    cost = f"{step.took_s / step.ended * 1e6:8.0f} {fluid.took_s / fluid.ended * 1e6:5.0f}"
    kept = f"{step.on_time:6.1%} {fluid.on_time:6.1%} {points:+5.1f}{flag}"
    print(f"  {case.name:24} {step.ended:5}  {ttft}  {tpot}  {kept} {cost}", flush=True)


def _pair(step: float, fluid: float) -> str:
    off = fluid / step - 1.0
    return f"{step:8.1f} {fluid:8.1f} {off:+6.1%}{'*' if abs(off) > _CLOSE else ' '}"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="janus bench simulate_devices", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help="workloads with this in their name")
    parser.add_argument("--length", type=float, default=120.0, metavar="SECONDS", help="of simulated time")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
