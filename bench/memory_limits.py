"""What this machine's memory, disk and page tables can do, measured in the run that is compared with it.

`memory_speed` calls it. Copies go through memory that was touched before, in arrays far larger than the caches; the
disk is read past the page cache as far as the system lets it be dropped.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

# house: exempt — the cost of a map call is what is measured
from janus_server.kv.vmm_cpu import CpuMemory

PAGE_BYTES: Final = 2 << 20
_COPY_BYTES: Final = 256 << 20
_READ_BYTES: Final = 8 << 20
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")


def timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def copy_rates(repeats: int) -> dict[str, float]:
    """Bytes a second that one and two threads copy, the best and the median: numpy's copyto of 256 MiB, touched."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    found = {}
    for threads in (1, 2):
        size = _COPY_BYTES // threads
        parts = [slice(i * size, (i + 1) * size) for i in range(threads)]

        def copy(parts: Sequence[slice] = parts) -> None:
            workers = [threading.Thread(target=np.copyto, args=(target[part], source[part])) for part in parts]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        rates = [_COPY_BYTES / timed(copy) for _ in range(repeats + 1)][1:]
        found[f"memcpy_{threads}_median"] = statistics.median(rates)
        found[f"memcpy_{threads}_best"] = max(rates)
    return found


def drop_cached(folder: Path) -> None:
    """Have the system forget what it cached of the files in a folder."""
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_rates(folder: Path, repeats: int) -> dict[str, float]:
    """Bytes a second of the checkpoint's file, from the disk and from the page cache, in large reads."""
    file = folder / "model.safetensors"
    size, buffer = file.stat().st_size, np.empty(_READ_BYTES, np.uint8)

    def read() -> None:
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer.data):
                pass

    cold, warm = [], []
    for _ in range(repeats):
        drop_cached(folder)
        cold.append(size / timed(read))
        warm.append(size / timed(read))
    return {"disk_read": statistics.median(cold), "cached_read": statistics.median(warm)}


def page_costs(repeats: int, pages: int = 64) -> dict[str, Any]:
    """Seconds a page of 2 MiB: first touch, touch again, map and unmap of neighbouring and of scattered pages."""
    memory = CpuMemory(2 * pages, PAGE_BYTES)
    try:
        first = timed(lambda: memory.touch(0, 2 * pages)) / (2 * pages)
        again = statistics.median(timed(lambda: memory.touch(0, pages)) for _ in range(repeats)) / pages
        window = memory.window(pages)
        costs: dict[str, Any] = {"first_touch_s": first, "touched_again_s": again}
        for name, ids in (("neighbours", tuple(range(pages))), ("scattered", tuple(range(0, 2 * pages, 2)))):
            maps, unmaps = [], []
            for _ in range(repeats):
                maps.append(timed(lambda ids=ids: window.map(ids)) / pages)  # type: ignore[misc]
                unmaps.append(timed(window.unmap) / pages)
            costs[f"map_{name}_s"], costs[f"unmap_{name}_s"] = statistics.median(maps), statistics.median(unmaps)
        window.close()
        return costs
    finally:
        memory.close()


def huge_pages() -> str:
    """Whether the system gives huge pages for shared memory; only its owner can change that."""
    try:
        words = (_THP / "shmem_enabled").read_text()
    except OSError:
        return "unknown"
    chosen = words[words.index("[") + 1 : words.index("]")]
    return f"{chosen}: huge pages are {'used' if chosen in ('advise', 'always', 'force') else 'not to be had'}"
