"""An hour of models that come and go, compressed: `janus bench memory churn`.

The real `PagePool`, `KvPages` and `PrefixCache` at the size of a 40 GB device, with eight public model shapes. Every
10, 30 or 60 s models leave and others take their room, while requests of all sizes hold pages, leave prefixes behind
and are preempted where room is short. Then the same on real memory: pages are mapped, stamped, looked at and unmapped.

External fragmentation is what `janus memory` calls so: free pages that could not serve the largest waiting kind of
request, over the pool. It is probed, not derived: all free pages are asked for in one reservation.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from janus_server.kv.blocks import KvPages, pages_for
from janus_server.kv.pages import PagePool, Reservation
from janus_server.kv.prefix import PrefixCache

# house: exempt — the layout arithmetic and the real mappings are what is measured
from janus_server.kv.vmm_cpu import CpuMemory, runs

# house: exempt — the same
from janus_server.kv.xtensor import kv_layout
from janus_server.types import Owner, PageKind

PAGE_BYTES: Final = 2 << 20
POOL_PAGES: Final = 40_000_000_000 // PAGE_BYTES
PERIODS_S: Final = (10, 30, 60)
HOUR_S: Final = 3600
IDLE_S: Final = 300
# How much longer than its copy alone a weight copy may take to come in for lying in extents (95th percentile).
SLOWER_MOST: Final = 0.01
EXTERNAL_MOST: Final = 0.003
WASTE_MOST: Final = 0.02
_AGE_PERIODS: Final = 4  # as the server ages them: at the latest after 5/4 of the idle time
_ARRIVALS_A_SECOND: Final = 0.6  # for each model that is not quiet
_QUIET_SHARE: Final = 0.25  # of a model's time Active without a request
_STAY_SHARE: Final = 0.7  # of the models Active stay so over a reallocation


class Weights(NamedTuple):
    """A public model in bf16: bytes of its weights, and what its KV cache is made of."""

    name: str
    bytes: int
    layers: int
    kv_heads: int
    head_dim: int


SHAPES: Final = (
    Weights("Qwen3-0.6B", 1_192_099_840, 28, 8, 128),
    Weights("Qwen3-1.7B", 3_441_150_976, 28, 8, 128),
    Weights("Qwen3-4B", 8_044_936_192, 36, 8, 128),
    Weights("Qwen3-8B", 16_381_470_720, 36, 8, 128),
    Weights("Llama-3.2-1B", 2_471_628_800, 16, 8, 64),
    Weights("Llama-3.2-3B", 6_425_499_648, 28, 8, 128),
    Weights("Qwen2.5-1.5B", 3_087_428_608, 28, 2, 128),
    Weights("Qwen2.5-7B", 15_231_233_024, 28, 4, 128),
)


class Running(NamedTuple):
    """A sequence that holds pages until end_s; its tokens are published when it ends."""

    end_s: float
    number: int
    pages: tuple[int, ...]
    tokens: tuple[int, ...]


class Resident:
    """A model on the device: its weight pages, its KV pages, and who runs."""

    def __init__(self, pool: PagePool, weights: Weights, name: str) -> None:
        self.weights = weights
        self.name = name
        self.owner = Owner(name, PageKind.WEIGHTS)
        layout = kv_layout(PAGE_BYTES, weights.layers, weights.kv_heads, weights.head_dim, 2)
        self.token_bytes = layout.token_bytes
        self.kv = KvPages(pool, name, layout.page_tokens)
        self.prefix = PrefixCache(self.kv, b"bench")
        self.pages: tuple[int, ...] = ()
        self.running: list[Running] = []
        self.quiet = False

    @property
    def weight_pages(self) -> int:
        return pages_for(self.weights.bytes, PAGE_BYTES)


class Device:
    """One device over the hour."""

    def __init__(self, seed: int, period_s: int) -> None:
        self.rng = np.random.default_rng([seed, period_s])
        self.pool = PagePool(POOL_PAGES)
        self.residents: dict[str, Resident] = {}
        self.samples: list[dict[str, float]] = []
        self.extents: list[tuple[int, int, int]] = []  # (second, extents, pages) of each weight copy that came in
        self.sequences = self.preempted = self.put_off = 0
        self._asleep = [f"{shape.name}-{copy}" for copy in range(3) for shape in SHAPES]
        self._number = 0

    def second(self, now: int, period_s: int) -> None:
        """What happens from `now` to `now` + 1."""
        if now % period_s == 0:
            self._reallocate(now)
        for resident in self.residents.values():
            self._finish(resident, now)
            count = 0 if resident.quiet else int(self.rng.poisson(_ARRIVALS_A_SECOND))
            for _ in range(count):
                self._start(resident, now)
        if now % (IDLE_S // _AGE_PERIODS) == 0:
            for resident in self.residents.values():
                resident.prefix.age(_AGE_PERIODS)
        if now % 10 == 9:
            self.samples.append(self._sample(now))

    def _reallocate(self, now: int) -> None:
        """Some models leave, and as many of those asleep as fit come in their place."""
        for name in [name for name in self.residents if self.rng.random() > _STAY_SHARE]:
            self._take_out(name)
        for resident in self.residents.values():
            resident.quiet = bool(self.rng.random() < _QUIET_SHARE)
        order = [self._asleep[i] for i in self.rng.permutation(len(self._asleep))]
        for name in order:
            weights = next(shape for shape in SHAPES if name.startswith(shape.name))
            needed = pages_for(weights.bytes, PAGE_BYTES)
            held = sum(r.weight_pages for r in self.residents.values())
            # Weights may take three quarters of the pool: the rest is for KV.
            if held + needed <= POOL_PAGES * 3 // 4:
                self._bring_in(name, weights, now)

    def _bring_in(self, name: str, weights: Weights, now: int) -> None:
        resident = Resident(self.pool, weights, name)
        self._make_room(resident.weight_pages)
        reservation = self.pool.reserve_low(resident.weight_pages, resident.owner)
        if reservation is None:
            self.put_off += 1
            return
        resident.pages = reservation.commit()
        self.extents.append((now, len(runs(resident.pages)), len(resident.pages)))
        self.residents[name] = resident
        self._asleep.remove(name)

    def _take_out(self, name: str) -> None:
        resident = self.residents.pop(name)
        for one in resident.running:
            for page in one.pages:
                resident.kv.drop(page)
        resident.prefix.clear()
        self.pool.release(resident.owner, resident.pages)
        self._asleep.append(name)

    def _start(self, resident: Resident, now: int) -> None:
        """A request: a prompt that may begin as others do, and an answer; its pages are taken for all of it."""
        self.sequences += 1
        self._number += 1
        prompt = int(np.clip(self.rng.lognormal(6.2, 1.0), 16, 8192))
        answer = int(np.clip(self.rng.lognormal(5.3, 0.8), 8, 2048))
        begin = int(self.rng.integers(0, 4)) * 1_000_000
        shared = min(prompt // 2, 1024)
        own = self._number * 10_000 + 10_000_000
        tokens = (*range(begin, begin + shared), *range(own, own + prompt + answer - shared))
        match = resident.prefix.match(tokens, prompt - 1)
        if match.partial is not None:
            resident.kv.drop(match.partial)
        missing = pages_for(len(tokens), resident.kv.page_tokens) - len(match.pages)
        self._make_room(missing)
        fresh = resident.kv.take(missing)
        if fresh is None:
            for page in match.pages:
                resident.kv.drop(page)
            self.put_off += 1
            return
        one = Running(now + answer * 0.02, self._number, match.pages + fresh, tokens)
        bisect.insort(resident.running, one)

    def _finish(self, resident: Resident, now: int) -> None:
        while resident.running and resident.running[0].end_s <= now:
            one = resident.running.pop(0)
            full = len(one.tokens) // resident.kv.page_tokens
            held = resident.prefix.publish(one.tokens, one.pages[:full])
            for page in (*held, *one.pages[full:]):
                resident.kv.drop(page)

    def _make_room(self, n: int) -> None:
        """Cached prefixes go first, then the youngest sequences of the device."""
        for resident in self.residents.values():
            if self.pool.free_pages < n:
                resident.prefix.evict(n - self.pool.free_pages)
        while self.pool.free_pages < n:
            busy = [r for r in self.residents.values() if r.running]
            if not busy:
                return
            victim = max(busy, key=lambda r: max(one.number for one in r.running))
            one = max(victim.running, key=lambda one: one.number)
            victim.running.remove(one)
            self.preempted += 1
            for page in one.pages:
                victim.kv.drop(page)

    def _sample(self, now: int) -> dict[str, float]:
        pool, residents = self.pool, self.residents.values()
        free = _free_runs(pool)
        largest = max((pages_for(shape.bytes, PAGE_BYTES) for shape in SHAPES), default=1)
        probe = pool.reserve_low(pool.free_pages, Owner("probe", PageKind.WEIGHTS))
        unusable = pool.free_pages if probe is None else 0
        if isinstance(probe, Reservation):
            probe.cancel()
        pool.check()
        weight_waste = sum(r.weight_pages * PAGE_BYTES - r.weights.bytes for r in residents)
        kv_remainder = sum(r.kv.held * (PAGE_BYTES - r.kv.page_tokens * r.token_bytes) for r in residents)
        kv_empty = sum(
            (len(one.pages) * r.kv.page_tokens - len(one.tokens)) * r.token_bytes
            for r in residents
            for one in r.running
        )
        pool_bytes = POOL_PAGES * PAGE_BYTES
        # As published: a virtual page is one physical page in every K and V tensor, 2 x layers of them at a time.
        worst = max((r.weights.layers for r in residents), default=1) * 2
        return {
            "second": now,
            "used": 1 - pool.free_pages / POOL_PAGES,
            "external": unusable / POOL_PAGES,
            "contiguous": sum(count for count in free if count < largest) / POOL_PAGES,
            "two_layers_at_once": (pool.free_pages % worst) / POOL_PAGES,
            "weights_tail": weight_waste / pool_bytes,
            "kv_remainder": kv_remainder / pool_bytes,
            "kv_empty": kv_empty / pool_bytes,
            "idle_prefixes": sum(r.prefix.evictable(len(r.prefix)) for r in residents) / POOL_PAGES,
            "residents": len(self.residents),
        }


def churn(seed: int, seconds: int = HOUR_S, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """By period: fragmentation, waste, extents and idle prefixes; and the same hour on real memory in small."""
    periods = {}
    for period_s in PERIODS_S:
        device, began_s = Device(seed, period_s), time.perf_counter()
        for now in range(seconds):
            device.second(now, period_s)
        periods[str(period_s)] = _summary(device, seconds)
        say(f"every {period_s} s: done in {time.perf_counter() - began_s:.1f} s")
    real = real_memory(seed, turns=max(40, seconds // PERIODS_S[0]))
    for one in periods.values():
        one["slower_for_extents"] = (
            one["extents_a_page_p95"] * real["each extent, µs"] / real["copy a page of 2 MiB, µs"]
        )
    return {
        "pool pages": POOL_PAGES, "page bytes": PAGE_BYTES, "seconds": seconds, "periods": periods,
        "shapes": [_waste_of(shape) for shape in SHAPES], "real": real,
        "held": not real["wrong pages"] and all(_good(one) for one in periods.values()),
    }  # fmt: skip


def _good(one: dict[str, Any]) -> bool:
    """What must hold over an hour, all of it fixed before the run."""
    waste = one["weights_tail_mean"] + one["kv_remainder_mean"] + one["kv_empty_mean"]
    return bool(
        one["external_most"] < EXTERNAL_MOST and one["slower_for_extents"] <= SLOWER_MOST and waste < WASTE_MOST
    )


def _summary(device: Device, seconds: int) -> dict[str, Any]:
    rows = device.samples
    counts = np.array([count for _, count, _ in device.extents])
    shares = np.array([count / pages for _, count, pages in device.extents])
    thirds = [
        [count for at, count, _ in device.extents if third * seconds // 3 <= at < (third + 1) * seconds // 3]
        for third in range(3)
    ]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return {
        "weight copies": len(counts), "sequences": device.sequences, "preempted": device.preempted,
        "put off": device.put_off,
        **{f"{name}_mean": float(column.mean()) for name, column in columns.items() if name != "second"},
        "external_most": float(columns["external"].max()),
        "idle_prefixes_most": float(columns["idle_prefixes"].max()),
        "extents_mean": float(counts.mean()), "extents_p50": float(np.median(counts)),
        "extents_p95": float(np.percentile(counts, 95)), "extents_most": int(counts.max()),
        "extents_a_page_p95": float(np.percentile(shares, 95)),
        "extents_by_third": [float(np.mean(third)) if third else 0.0 for third in thirds],
        "samples": rows, "extents": device.extents,
    }  # fmt: skip


def _waste_of(shape: Weights) -> dict[str, Any]:
    """What a shape leaves unused: behind its weights, and in each page of KV."""
    layout = kv_layout(PAGE_BYTES, shape.layers, shape.kv_heads, shape.head_dim, 2)
    pages = pages_for(shape.bytes, PAGE_BYTES)
    return {
        "model": shape.name, "weight pages": pages, "tail of weights": 1 - shape.bytes / (pages * PAGE_BYTES),
        "tokens a page": layout.page_tokens,
        "rest of a KV page": 1 - layout.page_tokens * layout.token_bytes / PAGE_BYTES,
        "first token, published layout, pages": 2 * shape.layers,
    }  # fmt: skip


def _free_runs(pool: PagePool) -> list[int]:
    """Lengths of runs of free pages."""
    free = np.array([owner is None for owner in pool.owners()], np.int8)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free, [0]))))
    return [int(count) for count in edges[1::2] - edges[::2]]


def real_memory(seed: int, pages: int = 1024, page_bytes: int = 64 << 10, turns: int = 360) -> dict[str, Any]:
    """Windows over real pages: every page is stamped through its window and read through the slab, before and after."""
    rng = np.random.default_rng(seed)
    pool, memory = PagePool(pages), CpuMemory(pages, page_bytes)
    kv, singles = KvPages(pool, "kv", 1), list[int]()
    held: dict[int, tuple[Owner, Any, tuple[int, ...]]] = {}
    extents: list[int] = []
    mapped = wrong = 0
    for turn in range(turns):
        for number in [number for number in held if rng.random() < 0.3]:
            owner, window, own = held.pop(number)
            wrong += _misread(memory, own, number)
            window.unmap()
            window.close()
            pool.release(owner, own)
        _trickle(rng, kv, singles, pages // 4)
        size = int(rng.integers(16, pages // 3))
        owner = Owner(f"m{turn}", PageKind.WEIGHTS)
        reservation = pool.reserve_low(size, owner)
        if reservation is None:
            continue
        own = reservation.commit()
        window = memory.window(size)
        window.map(own)
        mapped += size
        extents.append(len(runs(own)))
        window.array.reshape(size, page_bytes)[:, 0] = turn % 251
        held[turn] = owner, window, own
        wrong += sum(_misread(memory, pages_of, number) for number, (_, _, pages_of) in held.items())
    for _, window, _ in held.values():
        window.unmap()
        window.close()
    pool.check()
    costs_s = _costs(memory, pages // 4)
    memory.close()
    return {
        "windows": len(extents), "pages mapped": mapped, "wrong pages": wrong,
        **{f"{what}, µs": 1e6 * seconds for what, seconds in costs_s.items()},
        "extents_mean": float(np.mean(extents)), "extents_most": max(extents),
    }  # fmt: skip


def _costs(memory: CpuMemory, size: int) -> dict[str, float]:
    """Seconds to map and unmap a page of a window in one piece, and what each further extent adds: the fastest."""
    whole, spread = tuple(range(size)), tuple(range(0, 2 * size, 2))
    memory.touch(0, 2 * size)
    took: dict[str, list[float]] = {"map": [], "unmap": [], "spread": []}
    window = memory.window(size)
    for _ in range(15):
        for name, pages in (("map", whole), ("spread", spread)):
            began_s = time.perf_counter()
            window.map(pages)
            took[name].append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            window.unmap()
            took["unmap"].append(time.perf_counter() - began_s)
    window.close()
    source, target = np.ones(PAGE_BYTES, np.uint8), np.ones(PAGE_BYTES, np.uint8)
    took["copy"] = []
    for _ in range(15):
        began_s = time.perf_counter()
        np.copyto(target, source)
        took["copy"].append(time.perf_counter() - began_s)
    one_s, many_s, unmap_s = (min(took[name]) for name in ("map", "spread", "unmap"))
    return {
        "map a page": one_s / size, "each extent": (many_s - one_s) / (size - 1), "unmap a page": unmap_s / size,
        "copy a page of 2 MiB": min(took["copy"]),
    }  # fmt: skip


def _trickle(rng: np.random.Generator, kv: KvPages, singles: list[int], most: int) -> None:
    """KV pages come and go one by one, in no order."""
    for _ in range(int(rng.integers(0, most))):
        if len(singles) > most or (singles and rng.random() < 0.5):
            kv.drop(singles.pop(int(rng.integers(len(singles)))))
        elif (page := kv.take(1)) is not None:
            singles += page


def _misread(memory: CpuMemory, pages: tuple[int, ...], turn: int) -> int:
    """Pages that do not show the stamp of their window when seen through the slab."""
    slab = memory.slab.reshape(memory.n_pages, memory.page_bytes)
    return int(np.count_nonzero(slab[list(pages), 0] != turn % 251))
