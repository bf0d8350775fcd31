"""How fast each step of a model's life is, against what this machine's memory and disk can do, measured beside it.

For models of 100 MB and 1 GB: load from the disk and from the page cache, sleep, wake, and fork from a live process
into a node where the model is Warm, Cold but prepared, or was never seen. Nothing else may run: it is measured idle.

    python -m bench.memory_speed --out FOLDER       speed.json and speed.png
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from janus_server.errors import BadConfig

from . import memory_limits, synthetic
from .memory_node import Remote

SIZES: Final = (100_000_000, 1_000_000_000)
_PHASES: Final = ("reserve_s", "touch_s", "map_s", "copy_s", "verify_s", "commit_s", "unmap_s")
_PATIENCE_S: Final = 120.0
_ROWS: Final = (
    "load from disk", "load from page cache", "sleep", "wake", "fork into warm", "fork into cold", "fork never seen",
    "fork never seen, at once",
)  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder for speed.json and speed.png")
    parser.add_argument("--repeats", type=int, default=5, help="how often each step is timed (default 5)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of weights")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="memory speed", description=__doc__)
    options(parser)
    speed(parser.parse_args(arguments))
    return 0


def speed(chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure, write speed.json and speed.png into chosen.out, print a table; the figures."""
    figures = asyncio.run(_measure(chosen))
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "speed.json").write_text(json.dumps(figures, indent=1))
    sys.stdout.write(table(figures) + "\n")
    draw(chosen.out / "speed.png", figures)
    return figures


async def _measure(chosen: argparse.Namespace) -> dict[str, Any]:
    limits: dict[str, Any] = memory_limits.copy_rates(chosen.repeats)
    figures: dict[str, Any] = {
        "limits": limits, "pages": memory_limits.page_costs(chosen.repeats),
        "huge_pages": memory_limits.huge_pages(), "models": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="janus-speed-") as scratch:
        for size_bytes in chosen.sizes:
            folder = synthetic.write(Path(scratch) / str(size_bytes), synthetic.shape_of(size_bytes))
            figures["models"].append(await _life(folder, Path(scratch) / "run", chosen.repeats))
    again = memory_limits.copy_rates(chosen.repeats)  # others may have come meanwhile: the mean of before and after
    figures["limits"] = {name: (rate + again[name]) / 2 for name, rate in limits.items()}
    for model in figures["models"]:
        _judge(model, figures["limits"])
    return figures


async def _life(folder: Path, run_dir: Path, repeats: int) -> dict[str, Any]:
    """Every transition of one model, timed on a node of its own; a second node is what is forked from."""
    size = (folder / "model.safetensors").stat().st_size
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in _ROWS}
    flags = {"memory": f"{size + (256 << 20)}", "host_memory": f"{size + (64 << 20)}", "preload": False}
    models = {"m": folder, "n": folder}  # one that is alone has no host memory prepared for its sleep
    async with Remote("alone", run_dir.with_name("alone"), models, **flags) as node:
        await _touched(node)
        for _ in range(repeats):
            memory_limits.drop_cached(folder)
            steps["load from disk"].append(await node.ask("move", model="m", wish="load"))
            await node.ask("move", model="m", wish="evict")
            steps["load from page cache"].append(await node.ask("move", model="m", wish="load"))
            steps["sleep"].append(await node.ask("move", model="m", wish="sleep"))
            steps["wake"].append(await node.ask("move", model="m", wish="wake"))
            await node.ask("move", model="m", wish="evict")
    async with Remote("source", run_dir, {"m": folder}, **flags) as source:
        await source.ask("move", model="m", wish="load")
        async with Remote("node", run_dir, models, **flags) as node:
            await _touched(node)
            fork = {"model": "m", "wish": "fork", "source": "source"}
            await node.ask("move", **fork)
            for _ in range(repeats):
                await node.ask("move", model="m", wish="sleep")
                steps["fork into warm"].append(await node.ask("move", **fork))
                await node.ask("move", model="m", wish="evict")
                steps["fork into cold"].append(await node.ask("move", **fork))
        for number in range(min(repeats, 3)):
            for name in ("fork never seen", "fork never seen, at once"):
                async with Remote(f"fresh{number}", run_dir, {"m": folder}, **flags) as fresh:
                    if name == "fork never seen":
                        await _touched(fresh)
                    steps[name].append(await fresh.ask("move", model="m", wish="fork", source="source"))
    return {"size_bytes": size, **memory_limits.read_rates(folder, min(repeats, 3)), "steps": _medians(steps)}


async def _touched(node: Remote) -> None:
    """Wait until the node has its memory at hand, as one that was up for a while has."""
    until_s = time.monotonic() + _PATIENCE_S
    while not await node.ask("touched") and time.monotonic() < until_s:
        await asyncio.sleep(0.1)


def _medians(steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, runs in steps.items():
        spent = {p: statistics.median(run.get("phases", {}).get(p, 0.0) for run in runs) for p in _PHASES}
        took = [run["took_s"] for run in runs]
        found[name] = {"took_s": statistics.median(took), "best_s": min(took), "runs": len(runs), **spent}
    return found


def _judge(model: dict[str, Any], limits: Mapping[str, float]) -> None:
    """Each step as a share of what bounds it: memory's copy rate, or what the file can be read at."""
    size = model["size_bytes"]
    for name, step in model["steps"].items():
        limit = limits["memcpy_1_median"]
        if name.startswith("load"):
            limit = min(limit, model["disk_read" if "disk" in name else "cached_read"])
        step["limit_bytes_per_s"] = limit
        step["whole_share"] = size / step["took_s"] / limit
        step["copy_share"] = size / step["copy_s"] / limit if step["copy_s"] else None
    steps = model["steps"]
    model["fork_over_cold_load"] = steps["load from disk"]["took_s"] / steps["fork into cold"]["took_s"]
    model["fork_over_cached_load"] = steps["load from page cache"]["took_s"] / steps["fork into cold"]["took_s"]


def table(figures: Mapping[str, Any]) -> str:
    """What a person reads."""
    limits, pages = figures["limits"], figures["pages"]
    lines = [
        f"memcpy {limits['memcpy_1_median'] / 1e9:.1f} GB/s with one thread, {limits['memcpy_2_median'] / 1e9:.1f} "
        f"with two; shared memory {figures['huge_pages']}",
        "a page of 2 MiB: " + ", ".join(f"{name[:-2]} {1e6 * cost:.0f} µs" for name, cost in pages.items()),
    ]
    for model in figures["models"]:
        lines.append(
            f"\n{model['size_bytes'] / 1e6:.0f} MB; disk {model['disk_read'] / 1e9:.2f} GB/s, page cache "
            f"{model['cached_read'] / 1e9:.2f} GB/s; a fork is {model['fork_over_cold_load']:.1f} × faster than a load "
            f"from disk, {model['fork_over_cached_load']:.1f} × than one from the page cache"
        )
        lines.append(f"{'':26}{'seconds':>9}{'copy/limit':>11}{'whole/limit':>12}   " + " ".join(
            f"{phase[:-2]:>8}" for phase in _PHASES
        ))  # fmt: skip
        for name, step in model["steps"].items():
            copy = "" if step["copy_share"] is None else f"{100 * step['copy_share']:.0f} %"
            shares = " ".join(f"{100 * step[phase] / step['took_s']:>6.0f} %" for phase in _PHASES)
            lines.append(f"{name:26}{step['took_s']:>9.3f}{copy:>11}{100 * step['whole_share']:>10.0f} %   {shares}")
    return "\n".join(lines)


def draw(path: Path, figures: Mapping[str, Any]) -> None:
    """Bars of every step, stacked by phase, a panel a model size; dots where memory or disk alone would be."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("the picture needs matplotlib; run: pip install 'janus-server[bench]'") from None
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    for number, model in enumerate(figures["models"]):
        axes = figure.add_subplot(1, len(figures["models"]), number + 1)
        names = list(model["steps"])
        left = [0.0] * len(names)
        for phase in (*_PHASES, "rest"):
            steps = model["steps"].values()
            if phase == "rest":
                width = [max(step["took_s"] - start, 0.0) for step, start in zip(steps, left, strict=True)]
            else:
                width = [step[phase] for step in steps]
            axes.barh(names, width, left=left, label=phase.removesuffix("_s"))
            left = [start + size for start, size in zip(left, width, strict=True)]
        limits = [model["size_bytes"] / step["limit_bytes_per_s"] for step in model["steps"].values()]
        axes.plot(limits, names, "k|", markersize=12, label="limit")
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.set_title(f"{model['size_bytes'] / 1e6:.0f} MB")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, loc="lower right")
    figure.savefig(path, format="png")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
