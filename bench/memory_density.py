"""Twelve services on three base models: how many devices they take. `janus bench memory density`.

Three ways to share a device: xTensor (a base model's weights once, one pool of KV pages), a static partition (each
service its own copy of the weights and its own KV pages), and one pool a process (each service a process with weights,
KV pages and scratch of its own). Counted exactly in pages, and run: real nodes whose `--memory` is the device's. The
sizes stand in density.toml, which is read and not written.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from janus_server.kv.blocks import pages_for

# house: exempt — the layout arithmetic is what is counted
from janus_server.kv.xtensor import kv_layout

from .memory_models import Shape, write_model
from .memory_server import NotStarted, Server, config_file, plan_of
from .records import Application, Outcome

FILE: Final = Path(__file__).with_name("density.toml")
PUBLISHED: Final = {"xTensor": 1, "static partition": 3, "a pool a process": 3}
_STEP_TOKENS: Final = 32  # small steps: scratch is then as small a share of a small device as of a large one


class Base(NamedTuple):
    """A base model in pages: its weights, and the KV cache of one of its services."""

    name: str
    weights: int
    kv: int


def density(seed: int) -> dict[str, Any]:
    """Devices by way of sharing: at the size of real models, and for what was run."""
    sizes = tomllib.loads(FILE.read_text())
    count, paper = sizes["services_a_model"], sizes["paper"]
    page_bytes = paper["page_bytes"]
    bases = [
        Base(m["name"], pages_for(m["weight_bytes"], page_bytes), _whole_tokens(m, paper)) for m in paper["models"]
    ]
    pages = paper["device_bytes"] // page_bytes
    scratch = pages_for(paper["scratch_bytes"], page_bytes)
    counted = devices_of(bases, count, pages, scratch)
    lived = _live(sizes["live"], count, seed)
    return {
        "published": PUBLISHED, "counted": counted, "device pages": pages,
        "by services a model": [devices_of(bases, n, pages, scratch) for n in range(1, 9)],
        "live": lived, "held": counted == PUBLISHED and lived["held"],
    }  # fmt: skip


def devices_of(bases: Sequence[Base], services: int, device_pages: int, scratch: int) -> dict[str, int]:
    """The fewest devices for so many services on each base model, by way of sharing; each device has one scratch.

    With xTensor a base model's services stay together. A process has scratch of its own.
    """
    room = device_pages - scratch
    copies = [base.weights + base.kv for base in bases for _ in range(services)]
    return {
        "xTensor": fewest_bins([base.weights + services * base.kv for base in bases], room),
        "static partition": fewest_bins(copies, room),
        "a pool a process": fewest_bins([size + scratch for size in copies], device_pages),
    }


def fewest_bins(sizes: Sequence[int], room: int) -> int:
    """The fewest bins of `room` that hold all sizes, exactly. Example: fewest_bins([6, 5, 5, 4], 10) == 2."""
    return len(best_bins(sizes, room))


def best_bins(sizes: Sequence[int], room: int) -> list[list[int]]:
    """A packing into the fewest bins, as positions in `sizes`; 0 bins where one size alone is too large for any."""
    if any(size > room for size in sizes):
        return []
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    for bins in range(max(1, -(-sum(sizes) // room)), len(sizes) + 1):
        found: list[list[int]] = [[] for _ in range(bins)]
        if _place(sizes, order, 0, [room] * bins, found):
            return [sorted(one) for one in found if one]
    return []


def _place(sizes: Sequence[int], order: Sequence[int], at: int, left: list[int], found: list[list[int]]) -> bool:
    """Depth first; of bins with equal room only the first is tried."""
    if at == len(order):
        return True
    tried = set[int]()
    for i, free in enumerate(left):
        size = sizes[order[at]]
        if size > free or free in tried:
            continue
        tried.add(free)
        left[i] -= size
        found[i].append(order[at])
        if _place(sizes, order, at + 1, left, found):
            return True
        left[i] += size
        found[i].pop()
    return False


def _whole_tokens(model: dict[str, Any], paper: dict[str, Any]) -> int:
    """Pages of a service's KV cache: as many as hold the tokens that its bytes would."""
    layout = kv_layout(paper["page_bytes"], model["layers"], model["kv_heads"], model["head_dim"], 2)
    return pages_for(paper["kv_bytes_a_service"] // layout.token_bytes, layout.page_tokens)


# Live


class Service(NamedTuple):
    """A served name, its base model, and the pages of KV cache that its streams take together."""

    name: str
    base: str
    weights: int
    kv: int


class Bench:
    """The live part: models on disk, what they take, and nodes over them."""

    def __init__(self, live: dict[str, Any], services: int, folder: Path, seed: int) -> None:
        self.live = live
        self.folder = folder
        self.seed = seed
        self._numbers = itertools.count()  # threads draw from it
        self.page_bytes = live["page_bytes"]
        self.tokens = live["prompt_tokens"] + live["answer_tokens"]
        self.shapes = {m["name"]: Shape(**{k: v for k, v in m.items() if k != "name"}) for m in live["models"]}
        self.paths = {
            name: str(write_model(folder / name, shape, seed + i))
            for i, (name, shape) in enumerate(self.shapes.items())
        }
        with self.node(256 << 20, {name: {} for name in self.shapes}) as server:
            memory = server.get("/admin/memory")
            weights = {m["model"]: m["weight_pages"] for m in server.get("/admin/models")["data"]}
        self.scratch = sum(one["pages"] for one in memory["totals"] if one["kind"] == "scratch")
        self.services = [
            Service(f"{name}-{i}", name, weights[name], live["streams_a_service"] * shape.kv_pages(self.tokens,
                    self.page_bytes))
            for name, shape in self.shapes.items() for i in range(services)
        ]  # fmt: skip
        self.bases = [Base(one.base, one.weights, one.kv) for one in self.services[::services]]

    def node(
        self, memory_bytes: int, models: dict[str, dict[str, Any]], applications: dict[str, Any] | None = None
    ) -> Server:
        """A node with models by name: each is its base's folder and these options."""
        tables = {name: {"path": self.paths[name.split("-")[0]], **more} for name, more in models.items()}
        settings = {
            "memory": f"{memory_bytes}B", "page_size": f"{self.page_bytes}B", "host_memory": "2MiB", "kernels": "cpu",
            "threads": 1, "max_model_len": self.tokens, "max_num_batched_tokens": _STEP_TOKENS,
            "max_num_seqs": _STEP_TOKENS,
        }  # fmt: skip
        file = self.folder / f"{next(self._numbers)}.toml"
        return Server(config_file(file, settings, tables, applications))

    def partition(self, services: Sequence[Service]) -> Server:
        """A node with a copy of the weights and as many KV pages as it needs for each service, whatever others do."""
        kept = {one.name: f"{one.kv * self.page_bytes}B" for one in services}
        models = {name: {"kv_floor": size, "kv_ceiling": size, "pin": True} for name, size in kept.items()}
        return self.node(self.live["device_bytes"], models)

    async def load(self, server: Server, names: Sequence[str]) -> tuple[list[Outcome], int]:
        """All streams of the services at once; their outcomes, and the most KV pages that were seen held."""
        plans = [
            plan_of(Application(name, name), 0.0, 100 * n + i, self.live["prompt_tokens"], self.live["answer_tokens"])
            for n, name in enumerate(names) for i in range(self.live["streams_a_service"])
        ]  # fmt: skip
        run = asyncio.create_task(server.load(plans, self.seed))
        most = 0
        while not run.done():
            memory = await asyncio.to_thread(server.get, "/admin/memory")
            most = max(most, sum(one["pages"] for one in memory["totals"] if one["kind"] == "kv"))
            await asyncio.wait([run], timeout=0.02)
        return await run, most

    def serve(self, server: Server, names: Sequence[str]) -> dict[str, Any]:
        """Put the load on and tell whether all of it was served without anybody being preempted."""
        outcomes, most = asyncio.run(self.load(server, names))
        preempted = int(server.metrics().get("vllm:num_preemptions_total", 0))
        return {
            "streams": len(outcomes), "whole": sum(o.ok for o in outcomes), "KV pages held at once": most,
            "preempted": preempted, "failures": sorted({f"{o.failure} {o.detail}" for o in outcomes if not o.ok}),
        }  # fmt: skip


def _live(live: dict[str, Any], services: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(live, services, Path(folder), seed)
        pages = live["device_bytes"] // live["page_bytes"]
        counted = devices_of(bench.bases, services, pages, bench.scratch)
        shared, static, processes = _shared(bench), _static(bench, pages), _processes(bench, pages)
    ran = {"xTensor": 1, "static partition": static["devices"], "a pool a process": processes["devices"]}
    good = [shared, *static["nodes"], *processes["nodes"]]
    return {
        "device pages": pages, "scratch pages": bench.scratch, "bases": [base._asdict() for base in bench.bases],
        "counted": counted, "ran": ran, "xTensor": shared, "static partition": static, "a pool a process": processes,
        "held": counted == ran and bool(static["refused"]) and all(
            one["whole"] == one["streams"] and not one["preempted"] for one in good
        ),
    }  # fmt: skip


def _shared(bench: Bench) -> dict[str, Any]:
    """One node, three models, twelve names."""
    names = {one.name: {"model": one.base} for one in bench.services}
    models: dict[str, dict[str, Any]] = {name: {"pin": True} for name in bench.shapes}
    with bench.node(bench.live["device_bytes"], models, names) as server:
        return {"services": len(names), **bench.serve(server, list(names))}


def _static(bench: Bench, pages: int) -> dict[str, Any]:
    """A node a device. With one device less than were counted some node refuses, however they are spread best."""
    sizes = [one.weights + one.kv for one in bench.services]
    bins = best_bins(sizes, pages - bench.scratch)
    refused = []
    # The most even spread over one device less: largest first, each where most room is left.
    fewer: list[list[Service]] = [[] for _ in range(len(bins) - 1)]
    for one in sorted(bench.services, key=lambda one: -one.weights - one.kv):
        min(fewer, key=lambda group: sum(s.weights + s.kv for s in group)).append(one)
    for group in fewer:
        try:
            with bench.partition(group):
                pass
        except NotStarted as refusal:
            refused.append(str(refusal))
    nodes = []
    for chosen in bins:
        with bench.partition([bench.services[i] for i in chosen]) as server:
            nodes.append({"services": len(chosen), **bench.serve(server, [bench.services[i].name for i in chosen])})
    return {"devices": len(bins), "nodes": nodes, "refused": refused, "refused with devices": len(fewer)}


def _processes(bench: Bench, pages: int) -> dict[str, Any]:
    """A process a service with the memory that it takes; on a device as many as fit beside each other."""
    sizes = [one.weights + one.kv + bench.scratch for one in bench.services]
    bins = best_bins(sizes, pages)

    def run(i: int) -> dict[str, Any]:
        one = bench.services[i]
        with bench.node(sizes[i] * bench.page_bytes, {one.name: {"pin": True}}) as server:
            return {"service": one.name, "pages": sizes[i], **bench.serve(server, [one.name])}

    nodes = []
    for chosen in bins:
        with ThreadPoolExecutor(len(chosen)) as threads:
            nodes += list(threads.map(run, chosen))
    return {"devices": len(bins), "nodes": nodes}
