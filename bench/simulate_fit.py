"""Does the roofline that the simulator's devices run by predict steps that were measured? On this machine's own server.

It starts a real `janus serve`, measures decode steps at several batch sizes, fits two numbers (the FLOPs and the
bandwidth that this processor reaches with these weights) on three of the sizes, and predicts the others. Beside the
roofline, in which arithmetic and reading overlap as they do on an accelerator, it shows the same two terms added up:
a processor's core first unpacks a block of quantised weights and then multiplies with it. Steps of more rows than the
engine's block kernels take run by others, which unpack weights once for all rows: they are shown, and not judged by.
Nothing is asserted.

    janus bench simulate_fit                        the default model, one thread
    janus bench simulate_fit MODEL --json out.json  a folder or a .gguf file; the same figures for a program
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .engine import Server, _burst, _card

SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_FITTED: Final = (1, 4, 16)
_ONE_KERNEL: Final = 16  # rows
_PROMPT_TOKENS: Final = 8
_OUTPUTS: Final = (8, 48)
_GRID: Final = 400
_TARGET: Final = 0.15

Array: TypeAlias = npt.NDArray[np.float64]
Form: TypeAlias = Callable[[Array, float, float], Array]


class Prediction(NamedTuple):
    """Of a form: what a row's arithmetic and a pass over the weights take, and the predicted steps by batch size."""

    form: str
    row_s: float
    read_s: float
    steps_s: list[float]


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    card, steps_s = _measure(options)
    found = [
        _predict("roofline", lambda rows, row_s, read_s: np.maximum(rows * row_s, read_s), steps_s),
        _predict("added up", lambda rows, row_s, read_s: rows * row_s + read_s, steps_s),
    ]
    _print(options, card, steps_s, found)
    if options.json is not None:
        figures = {"sizes": SIZES, "fitted": _FITTED, "steps_s": steps_s, "predicted": [one._asdict() for one in found]}
        options.json.write_text(json.dumps({"model": options.model, "threads": options.threads, **figures}, indent=1))
    return 0


def _measure(options: argparse.Namespace) -> tuple[dict[str, float], list[float]]:
    """Seconds of a decode step by batch size: processor time of the server's busiest thread, which computes, so that
    what else runs on this machine counts as little as can be.

    What long answers take less what short ones do leaves their prompts out. The least of several passes each.
    """
    command = [sys.executable, "-m", "janus_server", "serve", options.model, "--served-model-name", "m", "--port", "0"]
    draws = random.Random(7)
    least = {(streams, tokens): float("inf") for streams in SIZES for tokens in _OUTPUTS}
    with Server([*command, "--threads", str(options.threads)]) as server:
        card = _card(server.port)
        _burst(server, draws, 2, 16, 8)
        for _ in range(options.repeats):
            for streams, tokens in least:
                before = _spent_s(server.pid)
                _burst(server, draws, streams, _PROMPT_TOKENS, tokens)
                spent_s = max(total - before.get(thread, 0.0) for thread, total in _spent_s(server.pid).items())
                least[streams, tokens] = min(least[streams, tokens], spent_s)
    short, long = _OUTPUTS
    return card, [(least[streams, long] - least[streams, short]) / (long - short) for streams in SIZES]


def _spent_s(pid: int) -> dict[str, float]:
    """Processor seconds of each thread of a process."""
    folders = Path(f"/proc/{pid}/task").iterdir()
    return {folder.name: int((folder / "schedstat").read_text().split()[0]) / 1e9 for folder in folders}


def _predict(name: str, form: Form, steps_s: Sequence[float]) -> Prediction:
    """The two numbers with the least squares of relative errors over the sizes that are fitted on: by a fine grid."""
    fitted = np.array([SIZES.index(size) for size in _FITTED])
    rows, took_s = np.array(SIZES, dtype=np.float64), np.array(steps_s)
    per_row = np.geomspace(1e-3, 1.2, _GRID) * took_s[-1] / rows[-1]
    per_read = np.geomspace(1e-2, 1.2, _GRID) * took_s[0]
    errors = [
        (float(np.sum((form(rows[fitted], row_s, read_s) / took_s[fitted] - 1.0) ** 2)), float(row_s), float(read_s))
        for row_s in per_row
        for read_s in per_read
    ]
    _, row_s, read_s = min(errors)
    return Prediction(name, row_s, read_s, form(rows, row_s, read_s).tolist())


def _print(
    options: argparse.Namespace, card: dict[str, float], steps_s: Sequence[float], found: list[Prediction]
) -> None:
    print(f"{options.model}, {options.threads} threads, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; the "
          f"least of {options.repeats} passes; * was fitted on, - is another kernel")  # fmt: skip
    print("  batch   measured" + "".join(f"{one.form:>20}" for one in found))
    for i, size in enumerate(SIZES):
        cells = "".join(f"{one.steps_s[i] * 1e3:11.1f} {one.steps_s[i] / steps_s[i] - 1:+8.1%}" for one in found)
        mark = "*" if size in _FITTED else " " if size <= _ONE_KERNEL else "-"
        print(f"  {size:4}{mark} {steps_s[i] * 1e3:7.1f} ms{cells}")
    for one in found:
        judged = [i for i, size in enumerate(SIZES) if size not in _FITTED and size <= _ONE_KERNEL]
        worst = max(abs(one.steps_s[i] / steps_s[i] - 1) for i in judged)
        flops, read = 2.0 * card["parameters"] / one.row_s, card["weight_bytes"] / one.read_s
        verdict = "within" if worst <= _TARGET else "beyond"
        print(f"  {one.form}: {flops / 1e9:.1f} GFLOPS and {read / 1e9:.1f} GB/s reached; worst not fitted on, "
              f"up to {_ONE_KERNEL} rows, {worst:.0%} ({verdict} {_TARGET:.0%})")  # fmt: skip


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="janus bench simulate_fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a folder, a .gguf file or an alias")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    parser.add_argument("--repeats", type=int, default=8, help="passes; the least is taken")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
