"""Physical pages on an NVIDIA GPU: made once by the driver, mapped once as a slab and page by page into windows.

`kv/xtensor` works through it, once somebody opened a node with it. The driver is a module given by the caller
(`load_driver` finds the real one), so nothing here imports CUDA. Every call is checked; what fails leaves nothing
behind. The caller sees to it that nothing on the device uses a window when it is unmapped.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from janus_server.errors import BadConfig, require
from janus_server.kv.vmm import Between, at_once
from janus_server.units import format_bytes

log = logging.getLogger("janus.memory")

# What a device must be able to do.
_NEEDED = (
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
)


class DriverRefused(OSError):
    """A driver call that failed. What it was part of has been undone."""

    def __init__(self, call: str, result: str) -> None:
        super().__init__(errno.ENOMEM if result == "CUDA_ERROR_OUT_OF_MEMORY" else errno.EIO, f"{call}: {result}")
        self.call = call
        self.result = result


class DeviceArray:
    """Flat uint8 at a device address. `torch.as_tensor(array, device="cuda")` is a view of it and not a copy.

    It keeps nothing alive: the memory's owner says how long the bytes are there.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self._size_bytes = size_bytes

    def __len__(self) -> int:
        return self._size_bytes

    def __getitem__(self, part: slice) -> DeviceArray:
        first, last, step = part.indices(self._size_bytes)
        require(step == 1, "device bytes are sliced without a step")
        return DeviceArray(self.address + first, max(0, last - first))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # Never flagged read-only, not even a peer's pages: torch refuses such arrays.
        return {"shape": (self._size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def load_driver() -> Any:
    """The driver's bindings. BadConfig where they are not installed; that the driver is there, its first call shows."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise BadConfig("pages on a GPU need the package cuda-bindings: pip install 'janus-server[cuda]'") from None


class CudaMemory:
    """`n_pages` physical pages of `page_bytes` on one GPU, all there from the start."""

    def __init__(self, n_pages: int, page_bytes: int, driver: Any, ordinal: int = 0) -> None:
        """BadConfig where the device cannot give them, with the call that failed; then nothing is left of it."""
        self.n_pages = n_pages
        self.page_bytes = page_bytes
        self._handles: list[int] = []
        self._windows: list[CudaWindow] = []
        with contextlib.ExitStack() as undo:
            try:
                device = self._device = Device(driver, ordinal)
                undo.callback(device.close)
                _check_page(page_bytes, device.granularity_bytes)
                device.enter()
                undo.callback(_release, device, self._handles)
                for _ in range(n_pages):
                    self._handles.append(device.create(page_bytes))
                self._slab = _Range(device, n_pages, page_bytes)
                undo.callback(self._slab.close)
                self._slab.map(self._handles, device.read_write)
            except DriverRefused as refused:
                raise BadConfig(self._sentence(refused, ordinal)) from None
            self._undo = undo.pop_all()

    @property
    def address(self) -> int:
        return self._slab.address

    @property
    def slab(self) -> DeviceArray:
        return self._slab.array

    def window(self, n_pages: int) -> CudaWindow:
        """A contiguous address range of n_pages, nothing mapped in it yet."""
        window = CudaWindow(self, _Range(self._device, n_pages, self.page_bytes))
        self._windows.append(window)
        return window

    def touch(self, page: int, count: int = 1) -> None:
        """Nothing to do: a page has its memory from the start."""

    def export(self, page: int) -> int:
        """A descriptor through which another process of this host may map the page; the caller closes it.

        Whoever holds it can write the page too: the driver knows no weaker one. The page's memory stays as long as
        somebody has it.
        """
        device = self._device
        device.enter()
        return int(device.call("cuMemExportToShareableHandle", self._handles[page], device.shareable, 0))

    def close(self) -> None:
        """Give everything back, windows too. Arrays over the memory must not be used afterwards."""
        for window in list(self._windows):
            window.close()
        self._undo.close()

    def _sentence(self, refused: DriverRefused, ordinal: int) -> str:
        made = len(self._handles)
        if refused.result == "CUDA_ERROR_OUT_OF_MEMORY" and made < self.n_pages:
            asked, given = format_bytes(self.n_pages * self.page_bytes), format_bytes(made * self.page_bytes)
            return (
                f"memory: GPU {ordinal} has no {asked} free ({refused.call}: {refused.result} after {given}): use less "
                f"memory than {given}, or end what else uses the GPU"
            )
        return f"GPU {ordinal} cannot give the memory: {refused.call} returned {refused.result}"


class CudaWindow:
    """A model's weights as one stable contiguous range, backed by whatever pages were free."""

    def __init__(self, memory: CudaMemory, addresses: _Range) -> None:
        self._memory = memory
        self._range = addresses

    @property
    def address(self) -> int:
        return self._range.address

    @property
    def array(self) -> DeviceArray:
        return self._range.array

    def map(self, pages: tuple[int, ...], between: Between = at_once) -> None:
        """Map pages in order, or none of them, in one go. DriverRefused where the driver would not."""
        handles = self._memory._handles
        self._range.map([handles[page] for page in pages], self._memory._device.read_write)

    def unmap(self, between: Between = at_once) -> None:
        """Take whatever is mapped out again, in one go; the addresses stay reserved."""
        self._range.unmap()

    def close(self) -> None:
        """Unmap and give the addresses back; a second time is fine."""
        if self in self._memory._windows:
            self._memory._windows.remove(self)
            self._range.close()


class CudaPeer:
    """Pages that another process exported, side by side in the given order, to be read."""

    def __init__(self, descriptors: Sequence[int], page_bytes: int, driver: Any, ordinal: int = 0) -> None:
        """The descriptors stay the caller's, who may close them afterwards. DriverRefused leaves nothing behind."""
        handles: list[int] = []
        with contextlib.ExitStack() as undo:
            device = Device(driver, ordinal)
            undo.callback(device.close)
            device.enter()
            undo.callback(_release, device, handles)
            for descriptor in descriptors:
                handles.append(int(device.call("cuMemImportFromShareableHandle", descriptor, device.shareable)))
            self._range = _Range(device, len(handles), page_bytes)
            undo.callback(self._range.close)
            self._range.map(handles, device.read_only)
            self._undo = undo.pop_all()

    @property
    def array(self) -> DeviceArray:
        """The pages as flat uint8. A write is a fault on the device."""
        return self._range.array

    def close(self) -> None:
        """Unmap. No array over the pages may be used afterwards."""
        self._undo.close()


class Device:
    """One GPU through the driver's calls, with its primary context, which torch and others share."""

    def __init__(self, driver: Any, ordinal: int) -> None:
        self._driver = driver
        try:
            self.call("cuInit", 0)
        except RuntimeError as error:
            # The bindings look for the driver's library at their first call, and have an error of their own for that.
            raise BadConfig(f"cuInit: {type(error).__name__}: the NVIDIA driver (libcuda) is not installed") from None
        self._device = self.call("cuDeviceGet", ordinal)
        for name in _NEEDED:
            if not self.call("cuDeviceGetAttribute", getattr(driver.CUdevice_attribute, name), self._device):
                raise BadConfig(f"GPU {ordinal} cannot serve: cuDeviceGetAttribute says no to {name}")
        self.shareable = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = self.shareable
        self._place(self._properties, ordinal)
        self.read_write = self._access(driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE, ordinal)
        self.read_only = self._access(driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ, ordinal)
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity_bytes = int(self.call("cuMemGetAllocationGranularity", self._properties, smallest))
        # Last, so that nothing has to be undone where this fails.
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)

    def call(self, name: str, *arguments: Any) -> Any:
        """What the driver's call returns beside its result. DriverRefused unless that is success."""
        result, *values = getattr(self._driver, name)(*arguments)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            # A driver newer than the bindings may answer with a number that they have no name for.
            raise DriverRefused(name, getattr(result, "name", str(result)))
        return values[0] if values else None

    def enter(self) -> None:
        """Make the context this thread's: a thread starts without one, and calls that need one then fail."""
        self.call("cuCtxSetCurrent", self._context)

    def create(self, size_bytes: int) -> int:
        """A handle of physical memory of this device that can be exported."""
        return int(self.call("cuMemCreate", size_bytes, self._properties, 0))

    def close(self) -> None:
        _quietly(self.call, "cuDevicePrimaryCtxRelease", self._device)

    def _access(self, flags: Any, ordinal: int) -> Any:
        access = self._driver.CUmemAccessDesc()
        self._place(access, ordinal)
        access.flags = flags
        return access

    def _place(self, record: Any, ordinal: int) -> None:
        record.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        record.location.id = ordinal


class _Range:
    """Reserved device addresses for n_pages, mapped whole or not at all."""

    def __init__(self, device: Device, n_pages: int, page_bytes: int) -> None:
        self._device = device
        self._n_pages = n_pages
        self._page_bytes = page_bytes
        # More than 0 and less than all only where the driver would not take back a half-done map.
        self._mapped_pages = 0
        device.enter()
        self.address = int(device.call("cuMemAddressReserve", n_pages * page_bytes, 0, 0, 0))

    @property
    def array(self) -> DeviceArray:
        return DeviceArray(self.address, self._n_pages * self._page_bytes)

    def map(self, handles: Sequence[int], access: Any) -> None:
        require(len(handles) == self._n_pages and not self._mapped_pages, "a window is mapped whole, and not twice")
        size = self._page_bytes
        self._device.enter()
        try:
            for slot, handle in enumerate(handles):
                # A handle is mapped from its start only: the driver takes no other offset.
                self._device.call("cuMemMap", self.address + slot * size, size, 0, handle, 0)
                self._mapped_pages = slot + 1
            # One call for all pages: it costs 20 times a page's map.
            self._device.call("cuMemSetAccess", self.address, self._n_pages * size, [access], 1)
        except BaseException:
            _quietly(self.unmap)
            raise

    def unmap(self) -> None:
        if self._mapped_pages:
            self._device.enter()
            self._device.call("cuMemUnmap", self.address, self._mapped_pages * self._page_bytes)
            self._mapped_pages = 0

    def close(self) -> None:
        _quietly(self.unmap)
        _quietly(self._device.call, "cuMemAddressFree", self.address, self._n_pages * self._page_bytes)


def _release(device: Device, handles: list[int]) -> None:
    while handles:
        _quietly(device.call, "cuMemRelease", handles.pop())


def _quietly(step: Callable[..., object], *arguments: object) -> None:
    """A step back. Where the driver refuses it that is logged, and the steps that follow are taken all the same."""
    try:
        step(*arguments)
    except DriverRefused as refused:
        log.error("not given back to the GPU: %s", refused.strerror)


def _check_page(page_bytes: int, granularity_bytes: int) -> None:
    if page_bytes < 1 or page_bytes % granularity_bytes:
        fits = max(1, -(-page_bytes // granularity_bytes)) * granularity_bytes
        raise BadConfig(
            f"page-size {page_bytes} is not a multiple of the GPU's {granularity_bytes} bytes "
            f"(cuMemGetAllocationGranularity): use {fits}"
        )
