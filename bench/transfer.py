"""How fast one node copies another's memory, as a share of what the same machine's memory and sockets can do.

    janus bench transfer                            256 MiB, each way 15 times (about a minute)
    janus bench transfer --size 1GiB --rounds 30

Two processes of this machine. A pull is a whole one: connection, proofs of the secret, grant, pages, checksum and
confirmation; "copy" is its copy alone. Ceilings do no more than move the same bytes into the same memory. All ways take
turns, so that whatever else runs meets each of them alike; a share is the median of the shares of single rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from janus_server.errors import BadConfig
from janus_server.units import format_bytes, parse_bytes

from . import transfer_nixl
from .serve_options import Parser
from .transfer_ways import Took, Way, opened

# Each with the ceiling that it is a share of; itself where it is one.
_ROWS: Final = (
    ("memcpy, one process", "memcpy, one process"),
    ("owner's memory mapped before, numpy copies", "owner's memory mapped before, numpy copies"),
    ("the same, mapped and unmapped each time", "the same, mapped and unmapped each time"),
    ("pull, same host", "the same, mapped and unmapped each time"),
    ("sockets, one hot MiB (as iperf)", "sockets, one hot MiB (as iperf)"),
    ("sendfile and recv_into, 1 socket", "sendfile and recv_into, 1 socket"),
    ("pull over TCP, 1 line", "sendfile and recv_into, 1 socket"),
    ("sendfile and recv_into, 2 sockets", "sendfile and recv_into, 2 sockets"),
    ("pull over TCP, 2 lines", "sendfile and recv_into, 2 sockets"),
    ("sendall and recv_into under TLS, 2 sockets", "sendall and recv_into under TLS, 2 sockets"),
    ("pull over TLS, 2 lines", "sendall and recv_into under TLS, 2 sockets"),
    (transfer_nixl.CMA, transfer_nixl.CMA),
    (transfer_nixl.TCP, transfer_nixl.TCP),
)


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="janus bench transfer", description=__doc__ or "")
    parser.add_argument("--size", default="256MiB", help="bytes to copy (256MiB)")
    parser.add_argument("--rounds", type=int, default=15, help="how often each way is taken (15)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse(arguments)
    try:
        size = parse_bytes(options.size)
    except ValueError as error:
        raise BadConfig(f"--size: {error}") from None
    if options.rounds < 1:
        raise BadConfig("--rounds is at least 1")
    with contextlib.ExitStack() as stack:
        took = measure(ways_of(stack, size), options.rounds)
    figures = {name: figure(name, limit, took, size) for name, limit in _ROWS if name in took}
    sys.stdout.write(table(figures, size, options.rounds) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


def ways_of(stack: contextlib.ExitStack, size: int) -> dict[str, Way]:
    """By name; whatever they need is closed with the stack."""
    bench = stack.enter_context(opened(size))
    names = [name for name, _ in _ROWS]
    works: list[Way] = [
        bench.memcpy, bench.mapped_copy, bench.mapping_copy, bench.mapped_pull, bench.sockets, partial(bench.bare, 1),
        partial(bench.far_pull, 1), partial(bench.bare, 2), partial(bench.far_pull, 2),
    ]  # fmt: skip
    ways = dict(zip(names, works, strict=False))
    if bench.has_tls:
        ways[names[9]], ways[names[10]] = partial(bench.bare, 2, tls=True), partial(bench.far_pull, 2, tls=True)
    if transfer_nixl.module() is None:
        sys.stdout.write("NIXL is not installed (nixl-cu12): it is not measured\n")
        return ways
    for name in (transfer_nixl.CMA, transfer_nixl.TCP):
        ways[name] = partial(_by_nixl, stack.enter_context(transfer_nixl.pair(size, name == transfer_nixl.TCP)))
    return ways


def _by_nixl(pull: Callable[[], tuple[float, float]]) -> Took:
    whole_s, cpu_s = pull()
    return Took(whole_s, whole_s, cpu_s)


def measure(ways: dict[str, Way], rounds: int) -> dict[str, list[Took]]:
    took: dict[str, list[Took]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            one = way()
            if turn:  # the first round is for whatever is done once
                took[name].append(one)
    return took


def figure(name: str, limit: str, took: dict[str, list[Took]], size: int) -> dict[str, Any]:
    ones, limits = took[name], took[limit]
    return {
        "gb_s": [size / 1e9 / f([one.whole_s for one in ones]) for f in (max, statistics.median, min)],
        "copy_gb_s": size / 1e9 / statistics.median(one.copy_s for one in ones),
        "cpu_s_per_gb": statistics.median(one.cpu_s for one in ones) / size * 1e9,
        "limit": limit,
        "share": statistics.median(b.whole_s / a.whole_s for a, b in zip(ones, limits, strict=True)),
        "copy_share": statistics.median(b.whole_s / a.copy_s for a, b in zip(ones, limits, strict=True)),
    }


def table(figures: dict[str, dict[str, Any]], size: int, rounds: int) -> str:
    load = os.getloadavg()[0]
    lines = [
        f"{format_bytes(size)}, {rounds} rounds, {os.cpu_count()} processors, load {load:.1f}; GB/s min / median / max",
        f"{'':42} {'GB/s':>20} {'CPU s/GB':>9} {'of its ceiling':>15} {'its copy':>9}",
    ]
    for name, one in figures.items():
        slow, middle, fast = one["gb_s"]
        shares = ("", "") if one["limit"] == name else (f"{one['share']:.0%}", f"{one['copy_share']:.0%}")
        lines.append(
            f"{name:42} {slow:5.2f} / {middle:5.2f} / {fast:5.2f} {one['cpu_s_per_gb']:9.2f}"
            f" {shares[0]:>15} {shares[1]:>9}"
        )
    return "\n".join(lines)
