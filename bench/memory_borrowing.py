"""Bursts in turn on four equal models of one node, with one shared pool and with fixed quarters of it.

    janus bench memory borrowing

Both sides are real servers over the same models with the same memory, asked over HTTP with the same trace in the same
run, one after the other for each period. They differ only in each model's KV floor and ceiling: none, or a quarter of
the pool. A burst comes to one model at a time; its prompts alone take BURST quarters, with their answers it takes less
than the pool. So its size follows from the pool and the request, not from results.

Time is compressed: a period of 10, 30 or 60 s takes a fifth of that (`--scale`). How long a sequence runs is the
machine's to say, so short periods let bursts overlap.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from . import stats
from .memory_models import Shape, write_model
from .memory_server import Server, config_file, plan_of
from .records import Application, Outcome, Plan, Slo

SHAPE: Final = Shape(hidden=192, layers=4, heads=6, kv_heads=6, head_dim=32, mlp=512, context=1024)
NAMES: Final = ("a", "b", "c", "d")
PERIODS_S: Final = (10, 30, 60)
SCALE: Final = 5.0
PAGE_BYTES: Final = 64 << 10
MEMORY: Final = "64MiB"
BURST: Final = 1.6
PROMPT, ANSWER = 384, 256
SPREAD_S: Final = 0.8  # a burst's requests come evenly over this
SLO: Final = Slo(ttft_s=0.5, tpot_s=0.1, attain=0.99)
BURSTS: Final = 4
PUBLISHED: Final = {"shared pool": "100 %, p99 TTFT tens of ms", "fixed quarters": "81 %, seconds"}


def borrowing(seed: int, scale: float = SCALE, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Attainment and TTFT by period and side."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {one: str(write_model(folder / one, SHAPE, seed + i)) for i, one in enumerate(NAMES)}
        with _node(folder, models, {}) as shared:
            pool = _kv_pages(shared)
            quarter = pool // len(NAMES)
            bound = f"{quarter * PAGE_BYTES}B"
            with _node(folder, models, {"kv_floor": bound, "kv_ceiling": bound}) as quarters:
                sides = {"shared pool": shared, "fixed quarters": quarters}
                burst = burst_of(quarter)
                for server in sides.values():  # what is made on first use is not the first burst's to wait for
                    asyncio.run(server.load(_trace(1.0, 2, len(NAMES)), seed))
                periods = {}
                for period_s in PERIODS_S:
                    plans = _trace(period_s / scale, burst, BURSTS)
                    periods[str(period_s)] = {side: _measure(server, plans, seed) for side, server in sides.items()}
                    say(f"bursts every {period_s} s: done")
    return {
        "published": PUBLISHED, "pool pages": pool, "quarter": quarter, "requests a burst": burst,
        "pages a request": SHAPE.kv_pages(PROMPT + ANSWER, PAGE_BYTES), "time scale": scale,
        "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}, "periods": periods,
        "held": all(
            one["shared pool"]["attained"] >= one["fixed quarters"]["attained"] and not one["shared pool"]["failed"]
            for one in periods.values()
        ),
    }  # fmt: skip


def burst_of(quarter: int) -> int:
    """Requests of one burst."""
    return round(BURST * quarter / SHAPE.kv_pages(PROMPT, PAGE_BYTES))


def _node(folder: Path, models: dict[str, str], bounds: dict[str, str]) -> Server:
    settings = {
        "memory": MEMORY, "page_size": f"{PAGE_BYTES}B", "host_memory": "2MiB", "kernels": "cpu",
        "max_model_len": PROMPT + ANSWER, "max_num_seqs": 256, "prefix_cache": False,
    }  # fmt: skip
    file = folder / f"{'quarters' if bounds else 'shared'}.toml"
    return Server(
        config_file(file, settings, {one: {"path": path, "pin": True, **bounds} for one, path in models.items()})
    )


def _kv_pages(server: Server) -> int:
    """Pages that neither weights nor scratch take."""
    memory = server.get("/admin/memory")
    taken = sum(one["pages"] for one in memory["totals"] if one["kind"] in ("weights", "scratch"))
    return int(memory["pool_pages"]) - taken


def _trace(period_s: float, burst: int, bursts: int) -> list[Plan]:
    """A burst a period, for each model in turn; the same for both sides."""
    apps = [Application(name, name, SLO) for name in NAMES]
    return [
        plan_of(apps[i % len(apps)], i * period_s + SPREAD_S * j / burst, 10_000 * i + j, PROMPT, ANSWER)
        for i in range(bursts) for j in range(burst)
    ]  # fmt: skip


def _measure(server: Server, plans: Sequence[Plan], seed: int) -> dict[str, Any]:
    before = server.metrics().get("vllm:num_preemptions_total", 0.0)
    outcomes: list[Outcome] = asyncio.run(server.load(plans, seed))
    found = stats.attainment([(outcome, SLO) for outcome in outcomes])
    ttft_s = stats.values_s(outcomes, "ttft")
    tpot_s = stats.values_s(outcomes, "tpot")
    return {
        "requests": len(outcomes), "failed": sum(not o.ok for o in outcomes),
        "attained": found.overall or 0.0, "attained ttft": found.ttft or 0.0, "attained tpot": found.tpot or 0.0,
        "attained strictly": found.strict or 0.0,
        "ttft_p50_s": float(np.percentile(ttft_s, 50)), "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "tpot_p99_s": float(np.percentile(tpot_s, 99)),
        "preemptions": int(server.metrics().get("vllm:num_preemptions_total", 0.0) - before),
        "ttfts_s": [round(value, 5) for value in sorted(ttft_s.tolist())],
    }  # fmt: skip
