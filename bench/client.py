"""What the bench client itself can do on this machine: `janus bench client`.

It loads a server that computes nothing (`noop`, in a process of its own) at a set rate and with a set number of streams
at once, and prints how late sends were and what a token cost the client. Run it before believing figures of a fast
server: those of `janus bench serve` are only as good as these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import serve, stats
from .serve_options import Parser, parse


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    figures = measure(options.rate, options.streams, options.duration, options.interval)
    print(f"{figures['requests']} requests at {options.rate:g} a second, {figures['failed']} failed")
    print(f"  streams at once      {figures['most_at_once']}, {figures['tokens_per_s']:.0f} tokens a second in all")
    late = ", ".join(f"{k} {figures[f'send_lateness_{k}_ms']:.2f} ms" for k in ("p50", "p99", "max"))
    print(f"  sent late by         {late}")
    print(f"  loop lag             p99 {figures['loop_lag_p99_ms']:.2f} ms")
    print(f"  first token          p50 {figures['ttft_p50_ms']:.2f} ms, p99 {figures['ttft_p99_ms']:.2f} ms")
    cost = f"{figures['cpu_us_per_token']:.1f} µs a token"
    print(f"  client's processor   {figures['cpu_share']:.0%} of a core, {cost} with its share of a request")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures["failed"] == 0 else 1


def measure(rate_rps: float, streams: int, duration_s: float, interval_s: float) -> dict[str, Any]:
    """Requests are as long as it takes to have `streams` at once at that rate (Little's law, and a tenth more)."""
    tokens = max(1, math.ceil(1.1 * streams / rate_rps / interval_s))
    count = max(1, round(rate_rps * duration_s))
    with noop_server(interval_s) as url:
        options = parse(
            f"--base-url {url} --ready-check-timeout-sec 10 --num-prompts {count} --request-rate {rate_rps} "
            f"--random-input-len 32 --random-output-len {tokens}".split()
        )
        setup = serve.prepare(options, None)
        serve.allow_open_files(count)
        run = serve.execute(setup, setup.plans, options)
    late_ms = stats.lateness_s(run.outcomes) * 1e3
    ttft_ms = stats.values_s(run.outcomes, "ttft") * 1e3 if run.counts.completed else np.zeros(1)
    found: dict[str, Any] = {
        "requests": len(run.outcomes),
        "failed": run.counts.failed,
        "most_at_once": run.counts.most_active,
        "tokens_per_s": run.counts.tokens / run.wall_s,
        "cpu_share": run.cpu_s / run.wall_s,
        "cpu_us_per_token": 1e6 * run.cpu_s / max(1, run.counts.tokens),
        "loop_lag_p99_ms": float(np.percentile(run.lags_s, 99)) * 1e3 if len(run.lags_s) else 0.0,
        "ttft_p50_ms": float(np.percentile(ttft_ms, 50)),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
    }
    for name, percentile in (("p50", 50), ("p99", 99), ("max", 100)):
        found[f"send_lateness_{name}_ms"] = float(np.percentile(late_ms, percentile))
    return found


@contextlib.contextmanager
def noop_server(interval_s: float) -> Iterator[str]:
    """The address of a server that streams a token every interval_s seconds to each client."""
    # -P: the folder of the benchmarks must not come before the standard library.
    command = [sys.executable, "-P", str(Path(__file__).with_name("noop.py")), str(interval_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield (process.stdout.readline() if process.stdout is not None else "").strip()
    finally:
        process.kill()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench client", __doc__ or "")
    parser.add_argument("--rate", type=float, default=500.0, metavar="RPS", help="requests a second")
    parser.add_argument("--streams", type=int, default=2000, metavar="N", help="streams at once")
    parser.add_argument("--duration", type=float, default=12.0, metavar="S", help="how long requests are sent")
    parser.add_argument("--interval", type=float, default=0.1, metavar="S", help="between tokens of a stream")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
