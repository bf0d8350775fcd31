"""What clients of a cluster feel while its nodes are killed, stopped and cut off: `janus bench chaos`.

  janus bench chaos                       every fault, one after the other, each on a real cluster under load (minutes)
  janus bench chaos leader stop10         these alone
  janus bench chaos --list                what there is

Prints a row for each fault: when the next leader decided, and how requests ended: of the nodes that were hit, and of
all others, where none may fail. Afterwards the journals are read: one leader a term, and the same decisions when they
are replayed. The exit code is 1 when something did not hold. Network namespaces, etcd and a small disk are skipped,
with a reason, where they cannot be had.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from janus_server.errors import BadConfig

from .chaos_faults import Fault, faults
from .chaos_places import Settings
from .chaos_run import Found, Pace, Row, strike_all
from .chaos_scene import Scene
from .memory_models import Shape, write_model
from .serve_options import Parser, above_zero, count
from .writable import check_file

# Small enough for three nodes on two cores, and restless enough that no text repeats itself. Its tokens are those of
# the printable characters alone: what is no character could not be told apart.
_SHAPE: Final = Shape(hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=96, vocab=97)
_SCALE: Final = 0.3
FLAGS: Final = ("--memory", "16MiB", "--page-size", "64KiB", "--host-memory", "16MiB", "--kernels", "cpu",
                "--threads", "1")  # fmt: skip
_PLAIN_S: Final = 5.0
_HEAD: Final = ("fault", "next leader decided", "own requests", "right", "error", "elsewhere", "right", "wrong",
                "slowest there", "went on elsewhere")  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    known = faults(options.scale)
    if options.list:
        for fault in known.values():
            print(f"  {fault.name:14}{fault.what}")
        return 0
    check_file(options.json)
    for name in options.faults:
        if name not in known:
            raise BadConfig(f"there is no fault {name!r}; there are: {', '.join(known)}")
    chosen = [known[name] for name in options.faults] or list(known.values())
    pace = Pace(options.rate, options.tokens, options.settle, options.seed)
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    each = f"{pace.rate:g} requests of {pace.tokens} tokens a second on each"
    print(f"{machine}; {options.nodes} nodes, {each}", flush=True)
    found = []
    with tempfile.TemporaryDirectory(prefix="janus-chaos-") as folder:
        models = _models(options, Path(folder))
        for number, group in enumerate(_groups(chosen)):
            place = Path(folder) / f"{number}-{group[0].place}"
            place.mkdir(mode=0o700)
            settings = Settings(models, FLAGS if not options.model else (), options.nodes, place)
            found.append(asyncio.run(strike_all(group, settings, pace, progress())))
            if options.logs is not None:
                options.logs.mkdir(parents=True, exist_ok=True)
                (options.logs / f"{place.name}.log").write_text(found[-1].log)
                for path, text in found[-1].journals.items():
                    (options.logs / f"{place.name}.{path}").write_bytes(text)
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps(figures(found), indent=1) + "\n")
    return 0 if all(one.held for one in found) else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench chaos", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="those of --list; by default all")
    parser.add_argument("--list", action="store_true", help="name the faults")
    parser.add_argument("--nodes", type=count, default=3, metavar="N", help="of the cluster")
    parser.add_argument("--model", type=Path, action="append", default=[], metavar="PATH",
                        help="serve this one (may come twice) instead of two tiny random ones")  # fmt: skip
    parser.add_argument("--rate", type=above_zero, default=2.0, metavar="RPS", help="requests a second on each node")
    parser.add_argument("--tokens", type=count, default=240, metavar="N", help="of each answer")
    parser.add_argument("--settle", type=above_zero, default=3.0, metavar="S", help="how long a fault lasts that has "
                        "no time of its own")  # fmt: skip
    parser.add_argument("--scale", type=above_zero, default=1.0, metavar="X", help="shorten what lasts")
    parser.add_argument("--seed", type=count, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the nodes said, and their journals, there")
    options = parser.parse(arguments)
    if options.nodes < 2:
        parser.error("--nodes: at least 2, or nobody is left when one is killed")
    return options


def _models(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    if options.model:
        return {f"m{number}": path for number, path in enumerate(options.model)}
    return small_models(folder)


def small_models(folder: Path) -> dict[str, Path]:
    """Two that say different things; the same for the same version of numpy."""
    return {name: write_model(folder / name, _SHAPE, seed, _SCALE) for seed, name in enumerate("ab")}


def _groups(chosen: Sequence[Fault]) -> Iterable[list[Fault]]:
    """Those of one place share a cluster."""
    for _, group in itertools.groupby(sorted(chosen, key=lambda fault: fault.place), lambda fault: fault.place):
        yield list(group)


def progress() -> Callable[[Fault, Scene], None]:
    """On a terminal one line that is rewritten, elsewhere one now and then."""
    began: dict[str, float] = {}
    said_s = [0.0]

    def watch(fault: Fault, scene: Scene) -> None:
        now = time.monotonic()
        since_s = now - began.setdefault(fault.name, now)
        sent, right, failed = scene.load.under_way()
        line = (
            f"{fault.name}: {since_s:5.1f} s  {sent} requests, {right} right, {failed} ended otherwise  {scene.doing}"
        )
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line[:118]}")
            sys.stderr.flush()
        elif now - said_s[0] >= _PLAIN_S or since_s == 0.0:
            said_s[0] = now
            print(line, file=sys.stderr, flush=True)

    return watch


def table(found: Sequence[Found]) -> str:
    """Markdown: a row a fault, then what the journals say."""
    rows = [_cells(row) for one in found for row in one.rows]
    widths = [max(len(row[i]) for row in (_HEAD, *rows)) for i in range(len(_HEAD))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    head = "| " + " | ".join(cell.ljust(w) for cell, w in zip(_HEAD, widths, strict=True)) + " |"
    lines = [head, "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines]
    for one in found:
        for row in one.rows:
            if row.trouble or row.elsewhere.reasons or row.own.other or row.own.never:
                reasons = ", ".join(f"{n} x {why}" for why, n in (row.elsewhere.reasons + row.own.reasons).items())
                lines.append(f"{row.fault.name}: {row.trouble} {reasons}".rstrip())
        lines += one.troubles
        if one.terms:
            entries = sum(term.entries for term in one.terms)
            lines.append(f"{one.rows[0].fault.place}: {len(one.terms)} journals of terms {one.terms[0].number} to "
                         f"{one.terms[-1].number}, {entries} events: one leader a term, "
                         f"{'all replay to the same decisions' if not one.troubles else 'see above'}")  # fmt: skip
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    if row.skipped:
        return row.fault.what, f"skipped: {row.skipped}", *[""] * (len(_HEAD) - 2)
    own, other = row.own, row.elsewhere
    after = "-" if row.recovered_s is None else f"{row.recovered_s:.2f} s"
    mine = (str(own.begun), str(own.right), str(own.not_right)) if row.lost else ("-", "-", "-")
    return (row.fault.what, after, *mine, str(other.begun), str(other.right), str(other.not_right),
            f"{other.slowest_s:.2f} s", str(row.moved))  # fmt: skip


def figures(found: Sequence[Found]) -> list[dict[str, Any]]:
    return [
        {"fault": row.fault.name, "skipped": row.skipped, "recovered_s": row.recovered_s, "own": row.own.begun,
         "own_right": row.own.right, "elsewhere": row.elsewhere.begun, "elsewhere_right": row.elsewhere.right,
         "slowest_elsewhere_s": row.elsewhere.slowest_s, "moved": row.moved, "held": row.held, "trouble": row.trouble,
         "terms": len(one.terms), "journals": one.troubles}
        for one in found
        for row in one.rows
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
