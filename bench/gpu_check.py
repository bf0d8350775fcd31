"""Checks and times pages on one NVIDIA GPU: `python -m bench.gpu_check [--json FILE]`, about a minute.

Prints what is found (device, driver, granularity), what each memory call costs beside published costs, whether slab and
window alias, whether another process reads an exported page, and how fast weights are copied into a window beside the
same copy into plain memory. Needs cuda-bindings and no torch. Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from janus_server.errors import BadConfig

# house: exempt — the memory is what this measures, in its own process
from janus_server.kv.vmm_cuda import CudaMemory, CudaPeer, Device, DriverRefused, load_driver
from janus_server.units import format_bytes

# Microseconds for 2 MiB pages on an A100, as published for the system that this one follows.
PUBLISHED_US: Final = (("create a page", 193.0), ("map a page", 1.5), ("set access", 36.0), ("unmap", 26.0))
# A wake copies in pieces of this size.
_PIECE_BYTES = 8 << 20
_REPEATS = 5
_FOUND = "slab and window show the same bytes"


class Sizes(NamedTuple):
    """How much is measured with; a fake driver takes small ones."""

    page_bytes: int = 2 << 20
    pages: int = 1024
    window_pages: int = 256
    copy_bytes: int = 512 << 20


class Timed:
    """A driver that notes how long each of its calls took, by name, and is otherwise the driver."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.took_s: dict[str, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            answer = found(*arguments)
            self.took_s.setdefault(name, []).append(time.perf_counter() - start_s)
            return answer

        return call

    def median_us(self, name: str) -> float:
        return statistics.median(self.took_s[name]) * 1e6


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        print("skipped: no NVIDIA GPU on this machine (no /dev/nvidia0)")
        return 0
    try:
        driver = load_driver()
        if options.peer:
            return _peer(driver, options.peer)
        found = check(driver, Sizes(pages=options.pages))
        found["peer"] = _across_processes(driver)
    except BadConfig as error:
        # A GPU is there: what keeps it from being used is a result, and not a skip.
        print(f"failed: {error}")
        return 1
    except DriverRefused as error:
        print(f"failed: {error.strerror}")
        return 1
    print(table(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if found["aliasing"] == _FOUND and found["peer"] == "read" else 1


def check(driver: Any, sizes: Sizes) -> dict[str, Any]:
    """Everything that one process can find out, as JSON takes it."""
    device = Device(driver, 0)
    try:
        found: dict[str, Any] = {"device": _device(driver, device), "sizes": sizes._asdict()}
        found["calls"] = _calls(driver, sizes)
        with _memory(driver, sizes) as memory:
            found["aliasing"] = _aliasing(device, memory, sizes)
            found["copies"] = _copies(device, memory, sizes)
    finally:
        device.close()
    return found


def table(found: dict[str, Any]) -> str:
    """The report as people read it."""
    device, sizes = found["device"], found["sizes"]
    page, published = format_bytes(sizes["page_bytes"]), dict(PUBLISHED_US)
    lines = [
        f"{device['name']}, {format_bytes(device['memory_bytes'])}, driver for CUDA {device['cuda']}, granularity "
        f"{format_bytes(device['granularity_bytes'])}",
        f"start: {sizes['pages']} pages of {page} in {found['calls'][-1]['median_us'] / 1e6:.3f} s",
        "",
        f"{'call, pages of ' + page:<34} {'µs, median':>12} {'published, µs':>14}",
    ]
    for row in found["calls"]:
        known = published.get(row["what"])
        lines.append(f"{row['what']:<34} {row['median_us']:>12.1f} {'' if known is None else f'{known:g}':>14}")
    lines += ["", f"{'copy of ' + format_bytes(sizes['copy_bytes']):<34} {'GB/s':>12} {'plain, GB/s':>14} {'share':>7}"]
    lines += [
        f"{row['what']:<34} {row['window_gb_s']:>12.1f} {row['plain_gb_s']:>14.1f} {row['share']:>7.1%}"
        for row in found["copies"]
    ]
    lines += ["", f"aliasing: {found['aliasing']}"]
    if "peer" in found:
        lines.append(f"an exported page in another process: {found['peer']}")
    return "\n".join(lines)


def _device(driver: Any, device: Device) -> dict[str, Any]:
    handle = device.call("cuDeviceGet", 0)
    version = int(device.call("cuDriverGetVersion"))
    return {
        "name": bytes(device.call("cuDeviceGetName", 128, handle)).split(b"\0")[0].decode(),
        "memory_bytes": int(device.call("cuDeviceTotalMem", handle)),
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "granularity_bytes": device.granularity_bytes,
        "bindings": getattr(sys.modules.get("cuda.bindings"), "__version__", "unknown"),
    }


def _calls(driver: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """What the calls cost as the memory makes them: windows of one page, then one large window."""
    timed, whole = Timed(driver), Timed(driver)
    start_s = time.perf_counter()
    with _memory(timed, sizes) as memory:
        start_s = time.perf_counter() - start_s
        timed.took_s = {"cuMemCreate": timed.took_s["cuMemCreate"], "cuMemMap": timed.took_s["cuMemMap"]}
        small = [memory.window(1) for _ in range(min(64, sizes.pages))]
        for page, window in enumerate(small):
            window.map((page,))
        for window in small:
            window.unmap()
    with _memory(whole, sizes) as memory:
        whole.took_s = {}
        large, wakes_s = memory.window(sizes.window_pages), []
        for _ in range(_REPEATS):
            mapping_s = time.perf_counter()
            large.map(tuple(range(sizes.pages - 1, sizes.pages - 1 - sizes.window_pages, -1)))
            wakes_s.append(time.perf_counter() - mapping_s)
            large.unmap()
    many = f"{sizes.window_pages} pages"
    rows = [
        ("create a page", timed.median_us("cuMemCreate")), ("map a page", timed.median_us("cuMemMap")),
        ("set access", timed.median_us("cuMemSetAccess")), ("unmap", timed.median_us("cuMemUnmap")),
        (f"set access over {many}", whole.median_us("cuMemSetAccess")),
        (f"unmap of {many}", whole.median_us("cuMemUnmap")),
        (f"whole map of {many}", statistics.median(wakes_s) * 1e6),
        ("start with all pages", start_s * 1e6),
    ]  # fmt: skip
    return [{"what": what, "median_us": round(us, 3)} for what, us in rows]


def _aliasing(device: Device, memory: CudaMemory, sizes: Sizes) -> str:
    """Write through the slab and read through a window, and the other way round, over scattered pages."""
    pages = tuple(range(sizes.pages - 1, 0, -2))[: sizes.window_pages]
    window = memory.window(len(pages))
    window.map(pages)
    device.enter()
    for slot, page in enumerate(pages):
        by_slab, by_window = b"slab%12d" % page, b"window%10d" % page
        device.call("cuMemcpyHtoD", memory.address + page * memory.page_bytes, _at(by_slab), 16)
        if _read(device, window.address + slot * memory.page_bytes) != by_slab:
            return f"page {page}: written through the slab, not seen through the window"
        device.call("cuMemcpyHtoD", window.address + slot * memory.page_bytes + 64, _at(by_window), 16)
        if _read(device, memory.address + page * memory.page_bytes + 64) != by_window:
            return f"page {page}: written through the window, not seen through the slab"
    window.close()
    return _FOUND


def _copies(device: Device, memory: CudaMemory, sizes: Sizes) -> list[dict[str, Any]]:
    """A wake's copies into a window over scattered pages, in pieces, beside one copy of all into plain memory."""
    size, page = sizes.copy_bytes, memory.page_bytes
    pages = tuple(range(sizes.pages - 1, -1, -1))[: size // page]
    with contextlib.ExitStack() as held:
        device.enter()
        window = memory.window(len(pages))
        held.callback(window.close)
        window.map(pages)
        host = int(device.call("cuMemHostAlloc", size, 0))
        held.callback(device.call, "cuMemFreeHost", host)
        plain = []
        for _ in range(2):
            plain.append(int(device.call("cuMemAlloc", size)))
            held.callback(device.call, "cuMemFree", plain[-1])
        ctypes.memset(host, 7, size)
        rows = []
        for what, call, source in (
            ("host to device", "cuMemcpyHtoDAsync", host),
            ("device to device", "cuMemcpyDtoDAsync", plain[0]),
        ):
            ours = _gb_s(device, size, _pieces(device, call, window.address, source, size))
            best = _gb_s(device, size, _pieces(device, call, plain[1], source, size, most=size))
            rows.append(
                {
                    "what": what, "window_gb_s": round(ours, 2), "plain_gb_s": round(best, 2),
                    "share": round(ours / best, 4),
                }
            )  # fmt: skip
        device.call("cuCtxSynchronize")
    return rows


def _pieces(
    device: Device, call: str, target: int, source: int, size: int, most: int = _PIECE_BYTES
) -> Callable[[], None]:
    def copy() -> None:
        for at in range(0, size, most):
            device.call(call, target + at, source + at, min(most, size - at), 0)

    return copy


def _gb_s(device: Device, size: int, work: Callable[[], None]) -> float:
    """The best of some tries on the device's own clock, after one that warms up."""
    with contextlib.ExitStack() as held:
        events = []
        for _ in range(2):
            events.append(device.call("cuEventCreate", 0))
            held.callback(device.call, "cuEventDestroy", events[-1])
        work()
        took_ms = []
        for _ in range(_REPEATS):
            device.call("cuEventRecord", events[0], 0)
            work()
            device.call("cuEventRecord", events[1], 0)
            device.call("cuEventSynchronize", events[1])
            took_ms.append(float(device.call("cuEventElapsedTime", *events)))
    return size / min(took_ms) / 1e6


def _across_processes(driver: Any) -> str:
    """Have another process map a page that this one exports, and read what was written here."""
    page_bytes, device = 2 << 20, Device(driver, 0)
    with contextlib.ExitStack() as held:
        held.callback(device.close)
        memory = CudaMemory(2, page_bytes, driver)
        held.callback(memory.close)
        device.enter()
        device.call("cuMemcpyHtoD", memory.address + page_bytes, _at(b"for a peer     !"), 16)
        descriptor = memory.export(1)
        held.callback(os.close, descriptor)
        command = [sys.executable, "-m", f"{__package__}.gpu_check", "--peer", str(descriptor)]
        done = subprocess.run(command, pass_fds=[descriptor], capture_output=True, text=True, timeout=60, check=False)
    return "read" if done.stdout.strip() == "for a peer     !" else f"not read: {(done.stdout + done.stderr)[-300:]}"


def _peer(driver: Any, descriptor: int) -> int:
    """The other process: print the first bytes of an exported page."""
    peer, device = CudaPeer([descriptor], 2 << 20, driver), Device(driver, 0)
    device.enter()
    print(_read(device, peer.array.address).decode())
    peer.close()
    device.close()
    return 0


def _read(device: Device, address: int) -> bytes:
    buffer = ctypes.create_string_buffer(16)
    device.call("cuMemcpyDtoH", ctypes.addressof(buffer), address, 16)
    return buffer.raw


def _at(data: bytes) -> int:
    """The address of bytes that the caller keeps for as long as it is used."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


@contextlib.contextmanager
def _memory(driver: Any, sizes: Sizes) -> Iterator[CudaMemory]:
    memory = CudaMemory(sizes.pages, sizes.page_bytes, driver)
    try:
        yield memory
    finally:
        memory.close()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Check and time pages on one NVIDIA GPU.")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there too")
    parser.add_argument("--pages", type=int, default=Sizes().pages, help="pages of 2 MiB to create (%(default)s)")
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.pages < Sizes().window_pages:
        parser.error(f"--pages: at least {Sizes().window_pages}, which is what is copied into")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
