"""What streams feel while another model is moved in and out beside them: their p99 TPOT against undisturbed.

Windows with and without moves take turns, so that what else the machine does falls on both. Another model is woken and
put to sleep, forked in from another process, or this node's model is read by one, each throttled and at full speed.

    python -m bench.memory_disturb --out FOLDER       disturb.json and disturb.png
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from janus_server.errors import BadConfig

from . import synthetic
from .memory_node import Remote

STREAMED_BYTES: Final = 100_000_000
MOVED_BYTES: Final = 400_000_000
ALLOWED: Final = 0.057
_AFTER_S: Final = 1.0
_CASES: Final = ("woken and put to sleep", "forked in", "forked out")

Moves = Callable[[], Coroutine[Any, Any, None]]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder for disturb.json and disturb.png")
    parser.add_argument("--windows", type=int, default=5, help="windows with moves, and as many without (default 5)")
    parser.add_argument("--window-s", type=float, default=6.0, help="seconds of one window (default 6)")
    parser.add_argument("--streams", type=int, default=4, help="streams at once (default 4)")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (default 1)")
    parser.add_argument("--rate", action="append", help="a --copy-rate to try (default: the server's own, and never)")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="memory disturb", description=__doc__)
    options(parser)
    disturb(parser.parse_args(arguments))
    return 0


def disturb(chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure, write disturb.json and disturb.png into chosen.out, print a table; the figures."""
    figures = asyncio.run(_measure(chosen))
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "disturb.json").write_text(json.dumps(figures, indent=1))
    sys.stdout.write(table(figures) + "\n")
    draw(chosen.out / "disturb.png", figures)
    return figures


async def _measure(chosen: argparse.Namespace) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="janus-disturb-") as scratch:
        base = Path(scratch)
        models = {
            "s": synthetic.write(base / "s", synthetic.shape_of(STREAMED_BYTES)),
            "m": synthetic.write(base / "m", synthetic.shape_of(MOVED_BYTES), 1),
        }
        for rate in chosen.rate or ("256MiB", "never"):
            for case in _CASES:
                async with _set_up(base / "run", models, case, rate, chosen) as (node, moves):
                    rows.append({"case": case, "rate": rate, **await _windows(node, moves, chosen)})
    return {"allowed": ALLOWED, "rows": rows, "streams": chosen.streams, "threads": chosen.threads}


@contextlib.asynccontextmanager
async def _set_up(
    run_dir: Path, models: Mapping[str, Path], case: str, rate: str, chosen: argparse.Namespace
) -> AsyncIterator[tuple[Remote, Moves]]:
    """The node whose streams are timed, and one round of moves beside them."""
    flags = {"memory": "1GiB", "host_memory": "1GiB", "copy_rate": rate, "threads": str(chosen.threads)}
    async with Remote("node", run_dir, models, **flags) as node, Remote("peer", run_dir, models, **flags) as peer:
        await peer.ask("move", model="m", wish="load")

        async def woken() -> None:
            await node.ask("move", model="m", wish="wake")
            await node.ask("move", model="m", wish="sleep")

        async def forked_in() -> None:
            await node.ask("move", model="m", wish="fork", source="peer")
            await node.ask("move", model="m", wish="evict")

        async def forked_out() -> None:
            await peer.ask("move", model="s", wish="evict")
            await peer.ask("move", model="s", wish="fork", source="node")

        if case == "woken and put to sleep":
            await node.ask("move", model="m", wish="sleep")
        elif case == "forked in":
            await node.ask("move", model="m", wish="evict")
        for _ in range(600):
            if await node.ask("touched") and await peer.ask("touched"):
                break
            await asyncio.sleep(0.1)
        yield node, {"woken and put to sleep": woken, "forked in": forked_in, "forked out": forked_out}[case]


async def _windows(node: Remote, moves: Moves, chosen: argparse.Namespace) -> dict[str, Any]:
    """Take turns between windows with moves and without; what a token took in each, and in the second after moves."""
    calm: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    after: list[dict[str, Any]] = []
    rounds = 0
    ask = {"model": "s", "at_once": chosen.streams, "tokens": 48}
    await node.ask("streams", for_s=1.0, **ask)
    for _ in range(chosen.windows):
        calm += await node.ask("streams", for_s=chosen.window_s, **ask)
        streaming = asyncio.create_task(node.ask("streams", for_s=chosen.window_s, **ask))
        while not streaming.done():
            await moves()
            rounds += 1
        moved += await streaming
        after += await node.ask("streams", for_s=_AFTER_S, **ask)
    found: dict[str, Any] = {"rounds": rounds}
    for name, streams in (("calm", calm), ("moved", moved), ("after", after)):
        found[name] = _times(streams)
    for name in ("tpot_p99_s", "tpot_p50_s", "gap_p99_s"):
        found[name.replace("_s", "_more")] = found["moved"][name] / found["calm"][name] - 1
        found[name.replace("_s", "_after")] = found["after"][name] / found["calm"][name] - 1
    return found


def _times(streams: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """TPOT is a stream's mean time a token after its first; a gap is the time between two of its tokens."""
    gaps = [np.diff(stream["times"]) for stream in streams]
    means = [float(one.mean()) for one in gaps if len(one)]
    every = np.concatenate(gaps)
    return {
        "streams": len(means), "tpot_p50_s": float(np.percentile(means, 50)),
        "tpot_p99_s": float(np.percentile(means, 99)), "gap_p50_s": float(np.percentile(every, 50)),
        "gap_p99_s": float(np.percentile(every, 99)),
    }  # fmt: skip


def table(figures: Mapping[str, Any]) -> str:
    """What a person reads."""
    lines = [
        f"{figures['streams']} streams, {figures['threads']} computing threads; p99 TPOT may grow by "
        f"{100 * figures['allowed']:.1f} %",
        f"{'another model is':26}{'copy rate':>10}{'p99 TPOT':>10}{'with moves':>11}{'more':>8}{'median':>8}"
        f"{'p99 gap':>9}{'after':>8}{'moves':>7}",
    ]
    for row in figures["rows"]:
        lines.append(
            f"{row['case']:26}{row['rate']:>10}{1e3 * row['calm']['tpot_p99_s']:>7.2f} ms"
            f"{1e3 * row['moved']['tpot_p99_s']:>8.2f} ms{100 * row['tpot_p99_more']:>6.1f} %"
            f"{100 * row['tpot_p50_more']:>6.1f} %{100 * row['gap_p99_more']:>7.1f} %"
            f"{100 * row['tpot_p99_after']:>6.1f} %{row['rounds']:>7}"
        )
    return "\n".join(lines)


def draw(path: Path, figures: Mapping[str, Any]) -> None:
    """p99 TPOT without moves, with them, and after, for each case and rate."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("the picture needs matplotlib; run: pip install 'janus-server[bench]'") from None
    figure = Figure(figsize=(9, 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    rows = figures["rows"]
    places = np.arange(len(rows))
    for number, name in enumerate(("calm", "moved", "after")):
        heights = [1e3 * row[name]["tpot_p99_s"] for row in rows]
        axes.bar(places + 0.27 * (number - 1), heights, 0.25, label=name)
    limits = [1e3 * row["calm"]["tpot_p99_s"] * (1 + figures["allowed"]) for row in rows]
    axes.plot(places, limits, "k_", markersize=26, label="allowed")
    axes.set_xticks(places, [f"{row['case']}\n{row['rate']}" for row in rows], fontsize=7)
    axes.set_ylabel("p99 TPOT, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
