"""Physical pages on a CPU: one memfd, mapped once as a slab and page by page into windows.

The same page may be seen through the slab and through a window at once; both are real mappings of one memory, as on a
GPU with the driver's virtual memory calls. All calls go to libc through ctypes, which drops the GIL. kv/xtensor calls.
A stale access to an unmapped window is a SIGSEGV: xtensor unmaps a window only when nothing uses it any more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from janus_server.errors import BadConfig, require
from janus_server.kv.vmm import Between, at_once

_NONE, _READ, _READ_WRITE = 0, 1, 3
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 1, 2, 0x10, 0x20, 0x4000
_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 14, 22, 23
# Mappings that are not ours: libraries, thread stacks, heaps. A server with three models had 610.
_OTHER_MAPPINGS = 4096
# To look up the pages of so much takes 2 to 3 ms.
_PIECE_BYTES = 32 << 20


def check_map_count(n_pages: int, page_bytes: int) -> None:
    """Refuse a pool whose windows could need more mappings than the kernel allows (one a page in the worst case)."""
    allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    if n_pages + _OTHER_MAPPINGS > allowed:
        fits = 1 << (page_bytes * n_pages // (allowed - _OTHER_MAPPINGS)).bit_length()
        raise BadConfig(
            f"page-size {page_bytes} with this memory makes {n_pages} pages, but vm.max_map_count {allowed} allows "
            f"{allowed - _OTHER_MAPPINGS}: use a page-size of at least {fits} bytes, less memory, or raise "
            f"vm.max_map_count"
        )


class CpuMemory:
    """`n_pages` physical pages of `page_bytes`; bytes are taken from the system when a page is first touched."""

    def __init__(self, n_pages: int, page_bytes: int) -> None:
        check_map_count(n_pages, page_bytes)
        self.n_pages = n_pages
        self.page_bytes = page_bytes
        self._libc = _libc()
        self._fd = os.memfd_create("janus-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, n_pages * page_bytes)
        # What a peer maps stays behind its addresses: a shrunk file would be a SIGBUS over there.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        # Nor can a peer open it again for writing, unless it may do anything (root).
        os.fchmod(self._fd, stat.S_IRUSR)
        self._reserved_at, self.address = self._reserve(n_pages * page_bytes)
        self._map(self.address, 0, n_pages)
        self.slab = _as_array(self.address, n_pages * page_bytes)

    def window(self, n_pages: int) -> Window:
        """A contiguous address range of n_pages, nothing mapped in it yet."""
        return Window(self, n_pages)

    def touch(self, page: int, count: int = 1) -> None:
        """Make the system provide pages page … page+count-1 now, not at their first use (1.4 ms each). Keeps contents.

        Refusal (an old kernel, memory short) is fine: the page is then provided when it is first written.
        """
        size = count * self.page_bytes
        self._libc.madvise(self.address + page * self.page_bytes, size, _MADV_POPULATE_WRITE)

    def read_only(self) -> int:
        """A descriptor through which all pages can be read and not written; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give everything back. Arrays over the slab must not be used afterwards."""
        self._libc.munmap(self._reserved_at, self.n_pages * self.page_bytes + self.page_bytes)
        os.close(self._fd)

    def _reserve(self, size_bytes: int) -> tuple[int, int]:
        """Address space without memory behind it; returns where it starts and the first page-aligned address in it."""
        flags = _PRIVATE | _ANONYMOUS | _NORESERVE
        start = self._call_mmap(None, size_bytes + self.page_bytes, _NONE, flags, -1, 0)
        return start, -(-start // self.page_bytes) * self.page_bytes

    def _map(self, address: int, page: int, count: int) -> None:
        size = count * self.page_bytes
        self._call_mmap(address, size, _READ_WRITE, _SHARED | _FIXED, self._fd, page * self.page_bytes)
        # Taken where /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise": first touch 126 µs instead of 3 ms.
        self._libc.madvise(address, size, _MADV_HUGEPAGE)

    def _unmap(self, address: int, count: int) -> None:
        flags = _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED
        self._call_mmap(address, count * self.page_bytes, _NONE, flags, -1, 0)

    def _call_mmap(self, *arguments: object) -> int:
        return _mmap(self._libc, *arguments)


class PeerMemory:
    """Another process's pages, mapped read-only through the descriptor that it handed over.

    OSError where the file could change its size under the mapping, or is smaller than was said.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < size_bytes:
            raise OSError(errno.EINVAL, "the peer's memory is not sealed, or too small")
        self._libc = _libc()
        self._size_bytes = size_bytes
        self._address = _mmap(self._libc, None, size_bytes, _READ, _SHARED, fd, 0)
        self.slab = _as_array(self._address, size_bytes)
        self.slab.flags.writeable = False

    def look_up(self, offset_bytes: int, size_bytes: int) -> None:
        """Have the mapping learn where those pages are. Refusal is fine: it then learns when they are first read."""
        skip = offset_bytes % mmap.PAGESIZE
        self._libc.madvise(self._address + offset_bytes - skip, size_bytes + skip, _MADV_POPULATE_READ)

    def close(self) -> None:
        """Unmap. No array over the slab may be used afterwards."""
        self._libc.munmap(self._address, self._size_bytes)


class Window:
    """A model's weights as one stable contiguous range, backed by whatever pages were free."""

    def __init__(self, memory: CpuMemory, n_pages: int) -> None:
        self.n_pages = n_pages
        self._memory = memory
        self._reserved_at, self.address = memory._reserve(n_pages * memory.page_bytes)
        self._mapped = False

    @property
    def array(self) -> np.ndarray:
        """The whole window as flat uint8; to touch it while it is not mapped is a fault."""
        return _as_array(self.address, self.n_pages * self._memory.page_bytes)

    def map(self, pages: tuple[int, ...], between: Between = at_once) -> None:
        """Map pages in order; runs of neighbouring ids take one call. OSError leaves nothing mapped."""
        require(len(pages) == self.n_pages and not self._mapped, "a window is mapped whole, and not twice")
        size = self._memory.page_bytes
        slot = 0
        try:
            for first, count in runs(pages):
                self._memory._map(self.address + slot * size, first, count)
                slot += count
        except OSError:
            self.unmap()
            raise
        # A mapping of its own has to learn where its pages are: at once 0.16 ms for 2 MiB, at first use 0.8 ms.
        for address, count in self._pieces():
            self._memory._libc.madvise(address, count * size, _MADV_POPULATE_READ)
            between(count * size)
        self._mapped = True

    def unmap(self, between: Between = at_once) -> None:
        """Take whatever is mapped out of the range again; the addresses stay reserved."""
        for address, count in self._pieces():
            self._memory._unmap(address, count)
            between(count * self._memory.page_bytes)
        self._mapped = False

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """(address, pages) of parts of some milliseconds: what runs beside is held up by no more than one of them."""
        size = self._memory.page_bytes
        most = max(1, _PIECE_BYTES // size)
        for slot in range(0, self.n_pages, most):
            yield self.address + slot * size, min(most, self.n_pages - slot)

    def close(self) -> None:
        """Give the address range back."""
        size = self._memory.page_bytes
        self._memory._libc.munmap(self._reserved_at, (self.n_pages + 1) * size)
        self._mapped = False


def runs(pages: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first, count) of neighbouring ids. Example: runs((3, 4, 5, 9)) == [(3, 3), (9, 1)]."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and page == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((page, 1))
    return found


def _as_array(address: int, size_bytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=np.uint8)


def _mmap(libc: ctypes.CDLL, *arguments: object) -> int:
    address = libc.mmap(*arguments)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap: {os.strerror(code)}")
    return int(address)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
