"""What sharing one pool of pages is worth on this machine: `janus bench memory PART`.

  janus bench memory density        12 services on 3 base models: devices with xTensor, partitions, a pool a process
  janus bench memory borrowing      bursts in turn on four models: one shared pool against fixed quarters
  janus bench memory churn          an hour of models that come and go: fragmentation, waste, extents
  janus bench memory together       five models loaded at once while a sixth serves
  janus bench memory speed          each step of a model's life against memory and disk (its own flags: --help)
  janus bench memory disturb        what streams feel while another model moves (its own flags: --help)
  janus bench memory all            all of them, one after the other

Each writes PART.json and PART.png into --out and prints a table. The exit code is 1 when something did not hold.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from . import memory_plots
from .serve_options import Parser

# What another module measures, prints and draws by itself, with flags of its own.
_APART: Final = ("speed", "disturb")
_PARTS: Final = ("density", "borrowing", "churn", "together")
_OUT: Final = "bench-memory"


class Row(NamedTuple):
    """One line of the table: what was measured, what is to be reached, and what was published for it."""

    what: str
    achieved: str
    limit: str = ""
    published: str = ""


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in _APART:
        return _apart(arguments[0], arguments[1:])
    options = _options(arguments)
    if options.part == "all":
        codes = [_run(part, options) for part in _PARTS]
        codes += [_apart(part, ["--out", str(options.out)]) for part in _APART]
        return max(codes)
    return _run(options.part, options)


def _run(part: str, options: argparse.Namespace) -> int:
    """Measure one part, print its table, write its files."""
    print(f"\n{part}: {platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}, "
          f"seed {options.seed}", flush=True)  # fmt: skip
    figures = _measures(options)[part]()
    rows = _TABLES[part](figures)
    widths = [max(len(row[i]) for row in (_HEAD, *rows)) for i in range(len(_HEAD))]
    for row in (_HEAD, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("held" if figures["held"] else "DID NOT HOLD")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{part}.json").write_text(json.dumps({"seed": options.seed, **figures}, indent=1) + "\n")
    memory_plots.draw(options.out / f"{part}.png", part, figures)
    print(f"wrote {options.out / part}.json and .png", flush=True)
    return 0 if figures["held"] else 1


def _measures(options: argparse.Namespace) -> Mapping[str, Callable[[], dict[str, Any]]]:
    """Each part imports what it needs when it is asked for."""

    def measure(part: str, *arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = getattr(importlib.import_module(f".memory_{part}", __package__), part)(*arguments)
        return found

    def say(line: str) -> None:
        print(f"  {line}", flush=True)

    return {
        "density": lambda: measure("density", options.seed),
        "borrowing": lambda: measure("borrowing", options.seed, options.scale, say),
        "churn": lambda: measure("churn", options.seed, options.seconds, say),
        "together": lambda: measure("together", options.seed, options.rounds),
    }


def _apart(part: str, arguments: Sequence[str]) -> int:
    words = list(arguments)
    if not any(word in ("--out", "-h", "--help") or word.startswith("--out=") for word in words):
        words += ["--out", _OUT]
    return int(importlib.import_module(f".memory_{part}", __package__).main(words))


# Tables

_HEAD: Final = Row("what", "achieved", "to reach", "published")


def _density(found: Mapping[str, Any]) -> list[Row]:
    rows = []
    for way, published in found["published"].items():
        rows.append(Row(f"devices counted, {way}", str(found["counted"][way]), str(published), str(published)))
        rows.append(Row(f"devices run, {way}", str(found["live"]["ran"][way]), str(found["live"]["counted"][way])))
    shared, static = found["live"]["xTensor"], found["live"]["static partition"]
    rows.append(Row("streams of 12 services on one node", f"{shared['whole']} whole", str(shared["streams"])))
    rows.append(Row("KV pages held at once there", str(shared["KV pages held at once"])))
    rows.append(Row("preempted there", str(shared["preempted"]), "0"))
    what = f"partitions on {static['refused with devices']} devices"
    rows.append(Row(what, f"{len(static['refused'])} nodes refused to start", "1 or more"))
    return rows


def _borrowing(found: Mapping[str, Any]) -> list[Row]:
    rows = [Row("requests a burst, pages each, of a pool of", f"{found['requests a burst']}, "
                f"{found['pages a request']}, {found['pool pages']}")]  # fmt: skip
    for period, sides in found["periods"].items():
        for side, one in sides.items():
            name = f"every {period} s, {side}"
            attained = f"{one['attained']:.1%} ({one['attained ttft']:.1%} TTFT, {one['attained tpot']:.1%} TPOT)"
            rows.append(Row(f"{name}: attained", attained, "100 %" if side == "shared pool" else "",
                            found["published"][side]))  # fmt: skip
            ttft = f"{1e3 * one['ttft_p50_s']:.0f} / {1e3 * one['ttft_p99_s']:.0f} ms"
            rows.append(Row(f"{name}: TTFT p50 / p99", ttft))
            rows.append(Row(f"{name}: preempted, failed", f"{one['preemptions']}, {one['failed']}"))
    return rows


def _churn(found: Mapping[str, Any]) -> list[Row]:
    rows = []
    for period, one in found["periods"].items():
        name = f"every {period} s"
        rows.append(Row(f"{name}: external, most", f"{one['external_most']:.4%}", "0.3 %", "below 0.3 %"))
        rows.append(Row(f"{name}: were runs needed, mean", f"{one['contiguous_mean']:.2%}"))
        waste = [f"{one[f'{key}_mean']:.3%}" for key in ("weights_tail", "kv_remainder", "kv_empty")]
        rows.append(Row(f"{name}: tails of weights, of KV pages, empty", ", ".join(waste), "2 % together"))
        rows.append(Row(f"{name}: idle prefixes, mean and most",
                        f"{one['idle_prefixes_mean']:.1%}, {one['idle_prefixes_most']:.1%}"))  # fmt: skip
        extents = f"{one['extents_p50']:.0f}, {one['extents_p95']:.0f}, {one['extents_most']}"
        rows.append(Row(f"{name}: extents a weight copy, p50 p95 most", extents))
        rows.append(Row(f"{name}: slower to bring in for it, p95", f"{one['slower_for_extents']:.2%}", "1 %"))
        thirds = ", ".join(f"{value:.0f}" for value in one["extents_by_third"])
        rows.append(Row(f"{name}: extents, mean by third of the hour", thirds))
    real = found["real"]
    rows.append(Row("real pages mapped, read wrongly", f"{real['pages mapped']}, {real['wrong pages']}", "0 wrong"))
    rows += [
        Row(f"{what}, µs", f"{real[f'{what}, µs']:.2f}")
        for what in ("map a page", "each extent", "unmap a page", "copy a page of 2 MiB")
    ]
    return rows


def _together(found: Mapping[str, Any]) -> list[Row]:
    return [
        Row("loads and wakes, five at once", str(found["loads"])),
        Row("failed", str(len(found["failed"])), "0"),
        Row("streams beside them, cut short", f"{found['streams beside']}, {found['streams cut short']}", "0 cut"),
        Row("slowest: all five up and answered", f"{found['slowest round up, s']} s"),
        *(Row("", line) for line in found["failed"][:5]),
    ]


_TABLES: Final[Mapping[str, Callable[[Mapping[str, Any]], list[Row]]]] = {
    "density": _density, "borrowing": _borrowing, "churn": _churn, "together": _together,
}  # fmt: skip


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench memory", __doc__ or "")
    parser.add_argument("part", choices=(*_PARTS, *_APART, "all"))
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, default=Path(_OUT), metavar="FOLDER", help=f"(default {_OUT})")
    parser.add_argument("--scale", type=float, default=5.0, metavar="X", help="borrowing: times faster (default 5)")
    parser.add_argument("--seconds", type=int, default=3600, metavar="N", help="churn: of the hour (default 3600)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="together: rounds (default 20)")
    return parser.parse(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
