"""A driver without a GPU, for tests of what calls one: it has the names of `cuda.bindings.driver` that are used here.

It keeps what a driver keeps (handles, reserved ranges, mappings, who may read and write them, bytes), answers misuse
with the driver's error codes, and records every call. It is stricter than a real one where that finds mistakes: a
thread needs a current context, a handle is not released while it is mapped, only whole ranges are freed. Any call can
be made to fail by its number.
"""

from __future__ import annotations

import ctypes
import enum
import os
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

GRANULARITY = 4096
READ, READ_WRITE = 1, 3


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_PERMITTED = 800


OK = CUresult.CUDA_SUCCESS
BAD = CUresult.CUDA_ERROR_INVALID_VALUE


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103


class Mapping(NamedTuple):
    """What is mapped at an address: the allocation behind it, and the handle that it was mapped by."""

    size: int
    allocation: int
    handle: int


class FakeCuda:
    """One imaginary host: `n_devices` GPUs of `room` bytes together, and one process that uses them."""

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(
        CU_MEM_ALLOC_GRANULARITY_MINIMUM=0, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1
    )
    CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ACCESS_FLAGS_PROT_READ=READ, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=READ_WRITE
    )

    def __init__(self, room: int = 1 << 30, n_devices: int = 1) -> None:
        self.room = room
        self.n_devices = n_devices
        self.unsupported: set[int] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.fail_at: frozenset[int] = frozenset()
        self.fail_names: frozenset[str] = frozenset()
        self.fail_with = CUresult.CUDA_ERROR_INVALID_VALUE
        self.contexts = 0
        self.bytes: dict[int, bytearray] = {}  # allocation → its memory
        self.handles: dict[int, int] = {}  # handle → allocation
        self.ranges: dict[int, int] = {}  # reserved address → size
        self.mappings: dict[int, Mapping] = {}
        self.access: dict[int, int] = {}  # mapped address → flags
        self.descriptors: dict[int, int] = {}  # what was exported → allocation
        self.host: dict[int, Any] = {}
        self._next = 1
        self._ready = False
        self._current = threading.local()

    def left(self) -> tuple[Any, ...]:
        """Everything that somebody holds; all of it is empty, or 0, when nothing is left behind."""
        maps = tuple(sorted((at, m.allocation, self.access.get(at, 0)) for at, m in self.mappings.items()))
        return self.contexts, tuple(sorted(self.handles)), tuple(sorted(self.ranges.items())), maps

    def names(self, since: int = 0) -> list[str]:
        return [call[0] for call in self.calls[since:]]

    def __getattribute__(self, name: str) -> Any:
        """Every cu… function is recorded, and fails where it was told to, before it has done anything."""
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if len(self.calls) in self.fail_at or name in self.fail_names:
                return (self.fail_with, None)
            if name != "cuInit" and not self._ready:
                return (CUresult.CUDA_ERROR_NOT_INITIALIZED, None)
            needs_context = name.startswith("cuMem") and name != "cuMemGetAllocationGranularity"
            if needs_context and not (self.contexts and getattr(self._current, "context", None)):
                return (CUresult.CUDA_ERROR_INVALID_CONTEXT, None)
            answer = found(*arguments)
            return answer if isinstance(answer, tuple) else (answer,)

        return call

    # Devices

    def cuInit(self, flags: int) -> CUresult:
        self._ready = flags == 0
        return OK if self._ready else BAD

    def cuDriverGetVersion(self) -> tuple[CUresult, int]:
        return OK, 13000

    def cuDeviceGet(self, ordinal: int) -> tuple[CUresult, int | None]:
        return (OK, 70 + ordinal) if 0 <= ordinal < self.n_devices else (CUresult.CUDA_ERROR_INVALID_DEVICE, None)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[CUresult, bytes]:
        return OK, b"Imaginary\0".ljust(length, b"\0")

    def cuDeviceTotalMem(self, device: int) -> tuple[CUresult, int]:
        return OK, self.room

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[CUresult, int]:
        return OK, int(attribute not in self.unsupported)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[CUresult, str]:
        self.contexts += 1
        return OK, f"context of {device}"

    def cuDevicePrimaryCtxRelease(self, device: int) -> CUresult:
        if not self.contexts:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        self.contexts -= 1
        return OK

    def cuCtxSetCurrent(self, context: str) -> CUresult:
        self._current.context = context
        return OK

    def cuCtxSynchronize(self) -> CUresult:
        return OK

    # Physical memory

    class CUmemAllocationProp:
        def __init__(self) -> None:
            self.type = self.requestedHandleTypes = 0
            self.location = SimpleNamespace(type=0, id=-1)

    class CUmemAccessDesc:
        def __init__(self) -> None:
            self.flags = 0
            self.location = SimpleNamespace(type=0, id=-1)

    def cuMemGetAllocationGranularity(self, prop: Any, option: int) -> tuple[CUresult, int]:
        return self._placed(prop), GRANULARITY

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[CUresult, int | None]:
        if size < 1 or size % GRANULARITY or flags or prop.type != 1 or self._placed(prop):
            return BAD, None
        if sum(map(len, self.bytes.values())) + size > self.room:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        allocation = self._number()
        self.bytes[allocation] = bytearray(size)
        return OK, self._handle(allocation)

    def cuMemRelease(self, handle: int) -> CUresult:
        allocation = self.handles.get(handle)
        if allocation is None or any(m.handle == handle for m in self.mappings.values()):
            return CUresult.CUDA_ERROR_INVALID_HANDLE
        del self.handles[handle]
        if allocation not in self.handles.values() and allocation not in self.descriptors.values():
            del self.bytes[allocation]
        return OK

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[CUresult, int | None]:
        if handle not in self.handles or kind != 1 or flags:
            return BAD, None
        descriptor = os.memfd_create("page")
        self.descriptors[descriptor] = self.handles[handle]
        return OK, descriptor

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> tuple[CUresult, int | None]:
        if descriptor not in self.descriptors or kind != 1:
            return BAD, None
        return OK, self._handle(self.descriptors[descriptor])

    # Addresses

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[CUresult, int | None]:
        if size < 1 or size % GRANULARITY or alignment % GRANULARITY or address or flags:
            return BAD, None
        start = (1 << 40) + self._number() * (1 << 32)
        self.ranges[start] = size
        return OK, start

    def cuMemAddressFree(self, address: int, size: int) -> CUresult:
        if self.ranges.get(address) != size or self._within(address, size):
            return BAD
        del self.ranges[address]
        return OK

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> CUresult:
        allocation = self.handles.get(handle)
        if allocation is None or size != len(self.bytes[allocation]) or offset or flags or address % GRANULARITY:
            return BAD
        reserved = any(start <= address and address + size <= start + room for start, room in self.ranges.items())
        if not reserved or any(at < address + size and address < at + m.size for at, m in self.mappings.items()):
            return BAD
        self.mappings[address] = Mapping(size, allocation, handle)
        return OK

    def cuMemUnmap(self, address: int, size: int) -> CUresult:
        found = self._within(address, size)
        if sum(self.mappings[at].size for at in found) != size:
            return BAD
        for at in found:
            del self.mappings[at]
            self.access.pop(at, None)
        return OK

    def cuMemSetAccess(self, address: int, size: int, wanted: list[Any], count: int) -> CUresult:
        found = self._within(address, size)
        if count != len(wanted) or sum(self.mappings[at].size for at in found) != size:
            return BAD
        if any(self._placed(access) or access.flags not in (READ, READ_WRITE) for access in wanted):
            return BAD
        self.access.update(dict.fromkeys(found, wanted[0].flags))
        return OK

    # Bytes

    def cuMemcpyHtoD(self, target: int, source: int, size: int) -> CUresult:
        return self._write(target, ctypes.string_at(source, size))

    def cuMemcpyDtoH(self, target: int, source: int, size: int) -> CUresult:
        found = self.peek(source, size)
        if found is None:
            return CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        ctypes.memmove(target, found, size)
        return OK

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> CUresult:
        return self._write(target, ctypes.string_at(source, size))

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> CUresult:
        found = self.peek(source, size)
        return CUresult.CUDA_ERROR_ILLEGAL_ADDRESS if found is None else self._write(target, found)

    def cuMemAlloc(self, size: int) -> tuple[CUresult, int]:
        size = -(-size // GRANULARITY) * GRANULARITY
        allocation, start = self._number(), (1 << 50) + self._number() * (1 << 32)
        self.bytes[allocation] = bytearray(size)
        self.mappings[start], self.access[start] = Mapping(size, allocation, 0), READ_WRITE
        return OK, start

    def cuMemFree(self, address: int) -> CUresult:
        del self.bytes[self.mappings.pop(address).allocation], self.access[address]
        return OK

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[CUresult, int]:
        buffer = ctypes.create_string_buffer(size)
        self.host[ctypes.addressof(buffer)] = buffer
        return OK, ctypes.addressof(buffer)

    def cuMemFreeHost(self, address: int) -> CUresult:
        return BAD if self.host.pop(address, None) is None else OK

    def cuEventCreate(self, flags: int) -> tuple[CUresult, int]:
        return OK, self._number()

    def cuEventDestroy(self, event: int) -> CUresult:
        return OK

    def cuEventRecord(self, event: int, stream: int) -> CUresult:
        return OK

    def cuEventSynchronize(self, event: int) -> CUresult:
        return OK

    def cuEventElapsedTime(self, start: int, end: int) -> tuple[CUresult, float]:
        return OK, 0.5

    # What tests look with

    def peek(self, address: int, size: int, flags: int = READ) -> bytes | None:
        """The bytes at a device address, or None where the device would fault."""
        parts = self._parts(address, size, flags)
        return None if parts is None else b"".join(bytes(self.bytes[a][at : at + n]) for a, at, n in parts)

    def poke(self, address: int, data: bytes) -> bool:
        return self._write(address, data) == OK

    def _write(self, address: int, data: bytes) -> CUresult:
        parts = self._parts(address, len(data), READ_WRITE)
        if parts is None:
            return CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        done = 0
        for allocation, at, size in parts:
            self.bytes[allocation][at : at + size] = data[done : done + size]
            done += size
        return OK

    def _parts(self, address: int, size: int, flags: int) -> list[tuple[int, int, int]] | None:
        """(allocation, offset, bytes) of an access, or None where some of it is not mapped or not allowed."""
        parts, at = [], address
        while at < address + size:
            start = next((s for s, m in self.mappings.items() if s <= at < s + m.size), None)
            if start is None or self.access.get(start, 0) & flags != flags:
                return None
            mapping = self.mappings[start]
            length = min(start + mapping.size, address + size) - at
            parts.append((mapping.allocation, at - start, length))
            at += length
        return parts

    def _within(self, address: int, size: int) -> list[int]:
        return [at for at, m in self.mappings.items() if address <= at and at + m.size <= address + size]

    def _placed(self, record: Any) -> CUresult:
        return OK if record.location.type == 1 and 0 <= record.location.id < self.n_devices else BAD

    def _handle(self, allocation: int) -> int:
        handle = self._number()
        self.handles[handle] = allocation
        return handle

    def _number(self) -> int:
        self._next += 1
        return self._next
