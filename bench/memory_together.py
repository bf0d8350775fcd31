"""Five models that are loaded at once while a sixth serves: `janus bench memory together`.

Each round puts five models to sleep and wakes all five, or evicts and loads them, in one moment, while clients stream
from the sixth and from the five. The pool is what six models and their longest sequence take and not a page more, so a
reading of free memory that is a moment old would refuse a load that fits. All loads must succeed, all streams be whole.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from .memory_models import Shape, write_model
from .memory_server import Server, config_file, plan_of
from .records import Application, Outcome

SHAPE: Final = Shape(hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp=704)
NAMES: Final = ("a", "b", "c", "d", "e")
SERVING: Final = "f"
PAGE_BYTES: Final = 64 << 10
CONTEXT: Final = 256
ROUNDS: Final = 20
_WAIT_S: Final = 60.0
_PROMPT, _ANSWER = 24, 96


def together(seed: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """What happened, and whether anything failed."""
    with tempfile.TemporaryDirectory() as folder:
        models = {
            name: {"path": str(write_model(Path(folder) / name, SHAPE, seed + i))}
            for i, name in enumerate((*NAMES, SERVING))
        }
        settings = {"page_size": f"{PAGE_BYTES}B", "host_memory": "64MiB", "kernels": "cpu", "max_model_len": CONTEXT}
        file = Path(folder) / "janus.toml"
        with Server(config_file(file, {**settings, "memory": "256MiB"}, models)) as server:
            taken = sum(
                one["pages"] for one in server.get("/admin/memory")["totals"] if one["kind"] in ("weights", "scratch")
            )
        tight = (taken + SHAPE.kv_pages(CONTEXT, PAGE_BYTES)) * PAGE_BYTES
        with Server(config_file(file, {**settings, "memory": f"{tight}B"}, models)) as server:
            return asyncio.run(_rounds(server, seed, rounds))


async def _rounds(server: Server, seed: int, rounds: int) -> dict[str, Any]:
    serving = Application(SERVING, SERVING)
    stop = asyncio.Event()
    found: list[Outcome] = []
    streams = asyncio.create_task(_stream_on(server, serving, seed, stop, found))
    start_s, ups_s = time.perf_counter(), list[float]()
    failed: list[str] = []
    ended = 0
    for number in range(rounds):
        down, up = ("sleep", "wake") if number % 2 else ("evict", "load")
        answers = await server.wishes([(name, down) for name in NAMES], _WAIT_S)
        failed += [f"{down}: {body['error']['message']}" for status, body in answers if status != 200]
        began_s = time.perf_counter()
        # Half of the rounds are woken by an operator, half by requests for all five.
        if number % 4 < 2:
            answers = await server.wishes([(name, up) for name in NAMES], _WAIT_S)
            failed += [f"{up}: {body['error']['message']}" for status, body in answers if status != 200]
        plans = [plan_of(Application(name, name), 0.0, 1000 * number + i, _PROMPT, 8) for i, name in enumerate(NAMES)]
        outcomes = await server.load(plans, seed)
        ups_s.append(round(time.perf_counter() - began_s, 4))
        failed += [f"{o.plan.app.name}: {o.failure} {o.detail}" for o in outcomes if not o.ok]
        ended += len(outcomes)
    stop.set()
    await streams
    failed += [f"{SERVING}: {o.failure} {o.detail}" for o in found if not o.ok]
    short = sum(o.ok and o.output_tokens != _ANSWER for o in found)
    memory = server.get("/admin/memory")
    return {
        "rounds": rounds, "models at once": len(NAMES), "loads": rounds * len(NAMES), "failed": failed,
        "streams beside": len(found), "streams cut short": short, "requests to the five": ended,
        "slowest round up, s": max(ups_s), "ups_s": ups_s, "took, s": round(time.perf_counter() - start_s, 1),
        "pages": memory["pool_pages"], "held": not failed and not short,
    }  # fmt: skip


async def _stream_on(server: Server, app: Application, seed: int, stop: asyncio.Event, found: list[Outcome]) -> None:
    """Four streams of the model that serves, again and again until told to stop."""
    number = 10**6
    while not stop.is_set():
        plans = [plan_of(app, 0.01 * i, number + i, _PROMPT, _ANSWER) for i in range(4)]
        found += await server.load(plans, seed)
        number += 4
