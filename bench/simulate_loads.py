"""How long weights take to a device in the simulator, by path and size, beside what was published.

    janus bench simulate_loads               the table
    janus bench simulate_loads --json FILE   the same figures for a program

Rows A10, A11, A14 and A15 of the published numbers; nothing is random. The fixed part and the speed of a fork were
fitted to the first two forks, and the link that devices of a host share to the one published copy over it, so those
agree by construction and say nothing; all else is predicted. Every constant stands in `bench/simulator/constants.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from janus_server.orders import KnownModel
from janus_server.sched.roofline import ASCEND_910C
from janus_server.sched.shapes import ModelShape
from janus_server.sched.source import Origin

from .serve_options import Parser
from .simulator import constants
from .simulator.physics import load_s, shard_bytes, slowdown, start_s
from .simulator.records import ModelSpec
from .writable import check_file


class Row(NamedTuple):
    """Seconds to a model that answers, all its devices at once. h2d_alone_s: one device has the host to itself. The
    published ones are None where nothing is."""

    model: str
    devices: int
    device_gb: float
    d2d_s: float
    paper_d2d_s: float | None
    h2d_s: float
    paper_h2d_s: float | None
    h2d_alone_s: float
    far_s: float
    disk_s: float
    start_s: float


# Name, billions of parameters, bytes of each, devices; published seconds from a device and from host memory.
_MODELS: Final = (
    ("Qwen3-0.6B", 0.60, 2.0, 1, None, None),
    ("Qwen3-1.7B", 1.72, 2.0, 1, None, None),
    ("Qwen3-4B", 4.02, 2.0, 1, None, None),
    ("Qwen3-8B", 8.19, 2.0, 2, 0.408, 0.4),
    ("Qwen3-14B", 14.77, 2.0, 1, None, None),
    ("Qwen3-32B", 32.76, 2.0, 2, 0.783, None),
    ("Qwen2.5-72B", 72.7, 2.0, 4, None, None),
    ("Qwen3-235B-A22B", 235.09, 1.0, 8, None, None),
    ("DeepSeek-V3-671B", 671.03, 1.0, 16, 0.742, 2.71),
)
_FITTED_D2D: Final = ("Qwen3-8B", "Qwen3-32B")
_FITTED_H2D: Final = ("DeepSeek-V3-671B",)
_PAPER_SLOWDOWN: Final = 0.057


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    check_file(options.json)
    rows = table()
    _print(rows)
    if options.json is not None:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    return 0


def table() -> list[Row]:
    """The models from the smallest to the largest."""
    found = []
    for name, billions, width, devices, paper_d2d_s, paper_h2d_s in _MODELS:
        spec = _spec(name, billions * 1e9, width, devices)
        found.append(
            Row(
                name, devices, shard_bytes(spec) / 1e9, load_s(spec, Origin.NEAR), paper_d2d_s,
                load_s(spec, Origin.HOST, devices), paper_h2d_s, load_s(spec, Origin.HOST),
                load_s(spec, Origin.FAR, devices), load_s(spec, Origin.DISK, devices), start_s(spec, devices),
            )
        )  # fmt: skip
    return found


def _spec(name: str, parameters: float, width: float, devices: int) -> ModelSpec:
    shape = ModelShape(
        name=name, parameters=parameters, layers=1, hidden=1, kv_bytes=1.0, pair_flops=0.0, parameter_bytes=width
    )
    size_bytes = round(shape.weight_bytes / devices)
    return ModelSpec(
        known=KnownModel(model=name, weight_pages=1, host_bytes=size_bytes, longest_pages=1, shards=devices),
        shape=shape,
    )


def _print(rows: Sequence[Row]) -> None:
    links = constants.LINKS
    print(f"a fork {links.near.fixed_s * 1e3:.0f} ms and {links.near.bytes_s / 1e9:.0f} GB/s a device; host memory "
          f"{links.host.bytes_s / 1e9:.0f} GB/s a device, {constants.HOST_SHARED_BYTES_S / 1e9:.0f} a host; another "
          f"domain {links.far.bytes_s / 1e9:.0f}; disk {links.disk.bytes_s / 1e9:.0f}; a process "
          f"{constants.PROCESS_START_S:.0f} s")  # fmt: skip
    print("  model             devices  GB each   D2D: ours  paper          H2D: ours  paper       1 alone  other "
          "domain     disk   new process")  # fmt: skip
    for row in rows:
        d2d = _beside(row.d2d_s, row.paper_d2d_s, row.model in _FITTED_D2D)
        h2d = _beside(row.h2d_s, row.paper_h2d_s, row.model in _FITTED_H2D)
        print(f"  {row.model:<18}{row.devices:6}{row.device_gb:9.1f}  {d2d}    {h2d}  {row.h2d_alone_s:6.2f} s"
              f"  {row.far_s:10.2f} s {row.disk_s:7.1f} s {row.start_s:9.1f} s")  # fmt: skip
    print("  * the constants were fitted to it")
    last = rows[-1]
    print(f"  {last.model}: host over device {last.h2d_s / last.d2d_s:.1f} times (published: 3.7); the fork comes out "
          f"{last.d2d_s / (last.paper_d2d_s or 1.0) - 1:+.0%}: three published times lie on no one line")  # fmt: skip
    slower = slowdown(ASCEND_910C, links.near.bytes_s) - 1.0
    print(
        f"  a device that is read from decodes {slower:.1%} slower meanwhile (published: at most {_PAPER_SLOWDOWN:.1%})"
    )


def _beside(ours_s: float, paper_s: float | None, fitted: bool) -> str:
    if paper_s is None:
        return f"{ours_s:8.3f} s      -        "
    return f"{ours_s:8.3f} s  {paper_s:5.3f}{'*' if fitted else ' '} {ours_s / paper_s - 1:+5.0%} "


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench simulate_loads", __doc__ or "")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
