"""What a backend of device memory offers: pages made once, all of them in one slab, and windows over any of them.

`xtensor` and `touch` work through this; who opens a node makes the memory and hands it in. There are two: `vmm_cpu` (a
memfd) and `vmm_cuda` (the driver's virtual memory calls). Nothing here runs. How a peer process reaches pages is no
part of it: one descriptor that can only be read on a CPU, one a page on a GPU; `transfer` takes the memory it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Array = Any  # Flat uint8: numpy.ndarray on a CPU; on a GPU what has __cuda_array_interface__. Both have len and slices.


Between = Callable[[int], None]


def at_once(size_bytes: int) -> None:
    """No rest between the parts."""


class Window(Protocol):
    """A contiguous address range over pages of a memory, the same addresses for as long as it is open."""

    @property
    def address(self) -> int:
        """Where the range starts, on the device."""

    @property
    def array(self) -> Array:
        """The whole range; to touch it while nothing is mapped is a fault."""

    def map(self, pages: tuple[int, ...], between: Between = at_once) -> None:
        """Put these pages behind the addresses, in order; as many as the window has. OSError leaves nothing mapped.

        between(size_bytes) is called after every part of what takes its time, and may rest.
        """

    def unmap(self, between: Between = at_once) -> None:
        """Take whatever is mapped out again; nothing may use it any more. Fine where nothing is mapped."""

    def close(self) -> None:
        """Unmap, and give the addresses back."""


class DeviceMemory(Protocol):
    """`n_pages` physical pages of `page_bytes`. Windows may be mapped on any thread, one thread at a time each."""

    @property
    def n_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Where the slab starts, on the device: page i is at address + i · page_bytes."""

    @property
    def slab(self) -> Array:
        """All pages in the order of their ids."""

    def window(self, n_pages: int) -> Window:
        """A range of n_pages with nothing mapped in it yet."""

    def touch(self, page: int, count: int = 1) -> None:
        """Have the system provide pages page … page+count-1 now, where it would do so only at their first use."""

    def close(self) -> None:
        """Give everything back. No array over it may be used afterwards."""
