"""What this machine offers to the process: cores, memory, instruction sets, kernel limits, GPUs.

Called by `config` for defaults and by `doctor` for its table. Reads files under /proc, /sys and /dev and nothing else:
it starts no process, opens no device and imports no accelerator library, so it is safe and quick anywhere. What cannot
be read is None, never a guess.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_FLAGS_OF_INTEREST = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip


class Cpu(msgspec.Struct, frozen=True):
    """The processor: its name and those of its instruction sets that matter to kernels, in the order listed above."""

    model: str
    flags: tuple[str, ...]


class Gpu(msgspec.Struct, frozen=True):
    """Whether an NVIDIA GPU can be there: the device files seen, and the loaded driver's version."""

    devices: tuple[str, ...]
    driver: str | None


def cores() -> int:
    """Physical cores this process may run on, at least 1: hardware threads of one core count once, quotas are kept."""
    allowed = sorted(os.sched_getaffinity(0))
    siblings = {
        _text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu) for cpu in allowed
    }
    quota = _cpu_quota()
    return max(1, len(siblings) if quota is None else min(len(siblings), int(quota)))


def memory_bytes() -> int:
    """Memory this process may use: the machine's, or the control group's limit where that is smaller."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_group_limits("memory.max", "memory/memory.limit_in_bytes")])


def available_bytes() -> int | None:
    """Memory that new work can take without swapping, as the kernel estimates it."""
    return _meminfo("MemAvailable")


def cpu() -> Cpu:
    """Name and instruction sets from /proc/cpuinfo (first processor)."""
    fields: dict[str, str] = {}
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    have = set((fields.get("flags") or fields.get("features") or "").split())
    return Cpu(fields.get("model name") or os.uname().machine, tuple(f for f in _FLAGS_OF_INTEREST if f in have))


def max_map_count() -> int | None:
    """How many separate mappings one process may hold (vm.max_map_count)."""
    return _number(Path("/proc/sys/vm/max_map_count"))


def huge_pages() -> dict[str, str]:
    """Transparent huge pages for anonymous and shared memory (the chosen mode), and reserved huge pages."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    found = {"anonymous": _chosen(folder / "enabled"), "shared": _chosen(folder / "shmem_enabled")}
    reserved = _text(Path("/proc/sys/vm/nr_hugepages"))
    return {name: value for name, value in {**found, "reserved": reserved}.items() if value is not None}


def gpu() -> Gpu:
    """NVIDIA device files and the kernel driver's version line; nothing is loaded or initialised."""
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    version = _text(Path("/proc/driver/nvidia/version"))
    return Gpu(tuple(devices), version.splitlines()[0] if version else None)


def _cpu_quota() -> float | None:
    """Cores that the control group's quota allows, or None without one."""
    text = _text(Path("/sys/fs/cgroup/cpu.max"))
    if text is not None:
        quota, _, period = text.partition(" ")
        return float(quota) / float(period) if quota.isdigit() and period.isdigit() and int(period) > 0 else None
    quota_us = _number(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
    period_us = _number(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _group_limits(*names: str) -> list[int]:
    found = (_number(Path("/sys/fs/cgroup") / name) for name in names)
    return [limit for limit in found if limit is not None and limit > 0]


def _meminfo(name: str) -> int | None:
    for line in (_text(Path("/proc/meminfo")) or "").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) << 10
    return None


def _chosen(path: Path) -> str | None:
    """The word in brackets: "always [madvise] never" → "madvise"."""
    text = _text(path)
    return None if text is None else next((w.strip("[]") for w in text.split() if w.startswith("[")), text)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
