"""Pages on a GPU against a driver that keeps account: which calls, in which order, and nothing left after any failure.

The real driver's part is in tests/gpu; that the names used here are the bindings' own is checked where they are
installed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import fake_cuda
import pytest
from fake_cuda import GRANULARITY, READ, READ_WRITE, CUresult, FakeCuda
from hypothesis import given
from hypothesis import strategies as st

from bench import gpu_check
from janus_server.errors import BadConfig, Bug
from janus_server.kv import vmm_cuda
from janus_server.kv.vmm import DeviceMemory, Window
from janus_server.kv.vmm_cpu import CpuMemory
from janus_server.kv.vmm_cuda import CudaMemory, CudaPeer, DeviceArray, DriverRefused
from janus_server.kv.xtensor import XTensor
from janus_server.machine import Gpu
from janus_server.terminal.doctor import pages_of

PAGE = 2 * GRANULARITY
EMPTY = (0, (), (), ())
START = ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetAttribute", "cuMemGetAllocationGranularity",
         "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]  # fmt: skip


def memory_of(cuda: FakeCuda, n_pages: int = 4) -> CudaMemory:
    return CudaMemory(n_pages, PAGE, cuda)


# Order and arguments


def test_a_start_creates_every_page_then_maps_all_and_opens_them_at_once() -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda, 3)
    assert cuda.names() == [
        *START, *["cuMemCreate"] * 3, "cuCtxSetCurrent", "cuMemAddressReserve", "cuCtxSetCurrent", *["cuMemMap"] * 3,
        "cuMemSetAccess",
    ]  # fmt: skip
    creates = [call for call in cuda.calls if call[0] == "cuMemCreate"]
    for _, size, properties, flags in creates:
        assert (size, flags, properties.type, properties.requestedHandleTypes) == (PAGE, 0, 1, 1)
        assert (properties.location.type, properties.location.id) == (1, 0)
    assert ("cuMemAddressReserve", 3 * PAGE, 0, 0, 0) in cuda.calls
    handles = sorted(cuda.handles)
    maps = [call for call in cuda.calls if call[0] == "cuMemMap"]
    assert maps == [("cuMemMap", memory.address + i * PAGE, PAGE, 0, handles[i], 0) for i in range(3)]
    _, address, size, (access,), count = cuda.calls[-1]
    assert (address, size, count, access.flags) == (memory.address, 3 * PAGE, 1, READ_WRITE)
    assert (access.location.type, access.location.id) == (1, 0)


def test_a_window_maps_page_by_page_opens_once_and_unmaps_in_one_call() -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda)
    handles = sorted(cuda.handles)
    window = memory.window(3)
    since = len(cuda.calls)
    window.map((3, 0, 1))
    assert cuda.calls[since] == ("cuCtxSetCurrent", "context of 70")
    assert cuda.calls[since + 1 : -1] == [
        ("cuMemMap", window.address + slot * PAGE, PAGE, 0, handles[page], 0) for slot, page in enumerate((3, 0, 1))
    ]
    assert cuda.calls[-1][:3] == ("cuMemSetAccess", window.address, 3 * PAGE)
    since = len(cuda.calls)
    window.unmap()
    assert cuda.calls[since:] == [
        ("cuCtxSetCurrent", "context of 70"), ("cuMemUnmap", window.address, 3 * PAGE)
    ]  # fmt: skip


def test_closing_takes_everything_back_in_reverse() -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda, 3)
    handles = sorted(cuda.handles)
    window, idle = memory.window(2), memory.window(1)
    window.map((0, 2))
    since = len(cuda.calls)
    memory.close()
    assert [call for call in cuda.calls[since:] if call[0] != "cuCtxSetCurrent"] == [
        ("cuMemUnmap", window.address, 2 * PAGE), ("cuMemAddressFree", window.address, 2 * PAGE),
        ("cuMemAddressFree", idle.address, PAGE),
        ("cuMemUnmap", memory.address, 3 * PAGE), ("cuMemAddressFree", memory.address, 3 * PAGE),
        *[("cuMemRelease", handle) for handle in reversed(handles)],
        ("cuDevicePrimaryCtxRelease", 70),
    ]  # fmt: skip
    assert cuda.left() == EMPTY
    memory.close()
    assert cuda.left() == EMPTY


def test_a_page_is_exported_by_its_own_handle_and_a_peer_maps_it_to_read() -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda)
    handles = sorted(cuda.handles)
    cuda.poke(memory.address + 2 * PAGE, b"two")
    cuda.poke(memory.address, b"zero")
    before = cuda.left()
    descriptors = [memory.export(2), memory.export(0)]
    assert cuda.calls[-1] == ("cuMemExportToShareableHandle", handles[0], 1, 0)
    since = len(cuda.calls)
    peer = CudaPeer(descriptors, PAGE, cuda)
    assert [call for call in cuda.calls[since:] if "Import" in call[0]] == [
        ("cuMemImportFromShareableHandle", descriptor, 1) for descriptor in descriptors
    ]
    at = peer.array.address
    assert (cuda.peek(at, 3), cuda.peek(at + PAGE, 4)) == (b"two", b"zero")
    assert not cuda.poke(at, b"x") and cuda.access[at] == READ
    peer.close()
    assert cuda.left() == before
    for descriptor in descriptors:
        os.close(descriptor)


# Behaviour


def test_slab_and_window_are_the_same_memory() -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda)
    window = memory.window(2)
    window.map((3, 1))
    assert cuda.poke(memory.address + 3 * PAGE, b"by the slab")
    assert cuda.poke(window.address + PAGE, b"by the window")
    assert cuda.peek(window.address, 11) == b"by the slab"
    assert cuda.peek(memory.address + PAGE, 13) == b"by the window"
    window.unmap()
    assert cuda.peek(window.address, 1) is None
    window.map((1, 3))
    assert cuda.peek(window.address, 13) == b"by the window"


@given(st.lists(st.permutations(range(5)).flatmap(lambda p: st.integers(1, 5).map(lambda n: tuple(p[:n]))), max_size=6))
def test_any_pages_in_any_order_stand_behind_their_windows(choices: list[tuple[int, ...]]) -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda, 5)
    for page in range(5):
        cuda.poke(memory.address + page * PAGE, bytes([page]) * PAGE)
    clean = cuda.left()
    windows = []
    for pages in choices:
        window = memory.window(len(pages))
        window.map(pages)
        windows.append((window, pages))
    for window, pages in windows:
        assert cuda.peek(window.address, len(window.array)) == b"".join(bytes([p]) * PAGE for p in pages)
    for window, _ in windows:
        window.close()
        window.close()
    assert cuda.left() == clean


def test_an_array_is_what_torch_takes_and_slices_like_bytes() -> None:
    array = DeviceArray(1000, 100)
    assert array.__cuda_array_interface__ == {"shape": (100,), "typestr": "|u1", "data": (1000, False), "version": 3}
    part = array[10:30][5:]
    assert (part.address, len(part)) == (1015, 15)
    assert (len(array[:200]), len(array[50:20]), array[-10:].address) == (100, 0, 1090)
    with pytest.raises(Bug):
        array[::2]


@pytest.mark.parametrize("pages", [(0,), (0, 1, 2)])
def test_a_window_is_mapped_whole_and_not_twice(pages: tuple[int, ...]) -> None:
    cuda = FakeCuda()
    window = memory_of(cuda).window(2)
    with pytest.raises(Bug):
        window.map(pages)
    window.unmap()  # nothing is mapped: nothing happens
    window.map((0, 1))
    before = cuda.left()
    with pytest.raises(Bug):
        window.map((2, 3))
    assert cuda.left() == before


def test_windows_are_mapped_from_threads_that_never_met_the_device() -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda)
    window = memory.window(2)
    ended: list[str] = []

    def run() -> None:
        window.map((0, 1))
        os.close(memory.export(0))
        window.unmap()
        memory.window(1).close()
        ended.append("well")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == ["well"]


def test_xtensor_works_on_either_memory() -> None:
    cuda = FakeCuda()
    left = []
    for memory in (memory_of(cuda, 8), CpuMemory(8, PAGE)):
        checked: DeviceMemory = memory
        xtensor = XTensor(checked)
        weights = xtensor.weights("m", 3 * PAGE - 100)
        assert weights.reserve()
        weights.map()
        weights.commit()
        left.append((xtensor.pool.free_pages, len(weights.array), len(xtensor.slab)))
        weights.unmap()
        weights.release()
        xtensor.pool.check()
        window: Window = checked.window(2)
        window.map((5, 6))
        assert window.address > 0 and checked.address > 0 and len(window.array) == 2 * PAGE
        checked.touch(0, 8)
        window.close()
        xtensor.close()
    assert left == [(5, 3 * PAGE - 100, 8 * PAGE)] * 2
    assert cuda.left() == EMPTY


def test_a_map_that_fails_on_a_cpu_maps_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CpuMemory(4, PAGE)
    window = memory.window(3)
    really = memory._map

    def refuse_the_second(address: int, page: int, count: int) -> None:
        if address != window.address:
            raise OSError(errno.ENOMEM, "mmap")
        really(address, page, count)

    monkeypatch.setattr(memory, "_map", refuse_the_second)
    with pytest.raises(OSError):
        window.map((3, 0, 1))
    starts = [line for line in Path("/proc/self/maps").read_text().splitlines() if "janus-pages" in line]
    assert not any(line.startswith(f"{window.address:x}-") for line in starts)
    monkeypatch.undo()
    window.map((3, 0, 1))
    memory.slab[3 * PAGE] = 9
    assert window.array[0] == 9
    window.close()
    memory.close()


# Failure at every call


def calls_of(work: Callable[[FakeCuda], object]) -> int:
    cuda = FakeCuda()
    work(cuda)
    return len(cuda.calls)


START_CALLS = calls_of(memory_of)


@pytest.mark.parametrize("result", [CUresult.CUDA_ERROR_OUT_OF_MEMORY, CUresult.CUDA_ERROR_NOT_PERMITTED])
@pytest.mark.parametrize("number", range(1, START_CALLS + 1))
def test_a_start_that_fails_at_any_call_leaves_nothing_and_names_it(number: int, result: CUresult) -> None:
    cuda = FakeCuda()
    cuda.fail_at, cuda.fail_with = frozenset({number}), result
    with pytest.raises(BadConfig) as caught:
        memory_of(cuda)
    assert cuda.names()[number - 1] in str(caught.value) and result.name in str(caught.value)
    assert cuda.left() == EMPTY
    cuda.fail_at = frozenset()
    memory_of(cuda).close()
    assert cuda.left() == EMPTY and cuda.bytes == {}


@pytest.mark.parametrize("number", range(1, 7))
def test_a_map_that_fails_at_any_call_maps_nothing(number: int) -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda)
    window = memory.window(4)
    before, since = cuda.left(), len(cuda.calls)
    cuda.fail_at = frozenset({since + number})
    with pytest.raises(OSError, match="CUDA_ERROR_INVALID_VALUE") as caught:
        window.map((3, 2, 1, 0))
    assert isinstance(caught.value, DriverRefused) and caught.value.call == cuda.names()[since + number - 1]
    assert cuda.left() == before
    window.unmap()
    window.map((0, 1, 2, 3))
    memory.close()
    assert cuda.left() == EMPTY


def test_what_the_driver_will_not_take_back_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda)
    window = memory.window(3)
    since = len(cuda.calls)
    # Context, two maps, the third fails, context, and the step back fails too.
    cuda.fail_at = frozenset({since + 4, since + 6})
    with caplog.at_level(logging.ERROR), pytest.raises(DriverRefused, match="cuMemMap"):
        window.map((0, 1, 2))
    assert "cuMemUnmap: CUDA_ERROR_INVALID_VALUE" in caplog.text
    assert len(cuda.mappings) == 4 + 2
    with pytest.raises(Bug):
        window.map((0, 1, 2))
    window.unmap()
    assert len(cuda.mappings) == 4
    window.map((0, 1, 2))


def test_an_unmap_that_fails_leaves_the_window_mapped() -> None:
    cuda = FakeCuda()
    window = memory_of(cuda).window(2)
    window.map((0, 1))
    before = cuda.left()
    cuda.fail_names = frozenset({"cuMemUnmap"})
    with pytest.raises(DriverRefused):
        window.unmap()
    assert cuda.left() == before
    cuda.fail_names = frozenset()
    window.unmap()
    assert cuda.peek(window.address, 1) is None


@pytest.mark.parametrize("number", range(1, calls_of(lambda cuda: memory_of(cuda).close()) - START_CALLS + 1))
def test_a_close_goes_on_past_any_call_that_fails(number: int, caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda)
    cuda.fail_at = frozenset({len(cuda.calls) + number})
    memory.close()
    assert "not given back to the GPU" in caplog.text
    assert cuda.names()[-1] == "cuDevicePrimaryCtxRelease"


# The start, two imports, a reservation, two maps and the access, and a context for the last two steps.
@pytest.mark.parametrize("number", range(1, len(START) + 2 + 2 + 4 + 1))
def test_a_peer_that_fails_at_any_call_leaves_nothing(number: int) -> None:
    cuda = FakeCuda()
    memory = memory_of(cuda)
    descriptors = [memory.export(0), memory.export(3)]
    before = cuda.left()
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        cuda.fail_at = frozenset({len(cuda.calls) + number})
        with pytest.raises(DriverRefused):
            CudaPeer(descriptors, PAGE, cuda)
        assert cuda.left() == before
        CudaPeer(descriptors, PAGE, cuda).close()
        assert cuda.left() == before


# Sentences


def test_too_much_memory_names_the_budget_and_what_fits() -> None:
    cuda = FakeCuda(room=5 * PAGE)
    with pytest.raises(BadConfig) as caught:
        CudaMemory(8, PAGE, cuda)
    assert str(caught.value) == (
        "memory: GPU 0 has no 64 KiB free (cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY after 40 KiB): use less memory than "
        "40 KiB, or end what else uses the GPU"
    )
    assert cuda.left() == EMPTY and cuda.bytes == {}


@pytest.mark.parametrize(("page", "fits"), [(0, 4096), (4095, 4096), (4097, 8192), (12000, 12288)])
def test_a_page_must_be_a_multiple_of_the_granularity(page: int, fits: int) -> None:
    cuda = FakeCuda()
    with pytest.raises(BadConfig, match=rf"page-size {page} is not a multiple of the GPU's 4096 bytes .*: use {fits}"):
        CudaMemory(2, page, cuda)
    assert cuda.left() == EMPTY


def test_a_device_that_cannot_is_refused() -> None:
    cuda = FakeCuda()
    cuda.unsupported.add(fake_cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
    with pytest.raises(BadConfig, match="VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
        memory_of(cuda)
    with pytest.raises(BadConfig, match="GPU 3 cannot give the memory: cuDeviceGet returned CUDA_ERROR_INVALID_DEVICE"):
        CudaMemory(2, PAGE, FakeCuda(), ordinal=3)
    assert cuda.left() == EMPTY


def test_a_code_without_a_name_is_told_as_a_number() -> None:
    cuda = FakeCuda()
    cuda.fail_at, cuda.fail_with = frozenset({2}), 999999  # type: ignore[assignment]
    with pytest.raises(BadConfig, match="cuDeviceGet returned 999999"):
        memory_of(cuda)


def test_no_driver_and_no_bindings_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotFound(RuntimeError):
        """As the bindings raise it at their first call without a driver."""

    class NoDriver:
        @staticmethod
        def cuInit(flags: int) -> None:
            raise NotFound("cuda")

    with pytest.raises(BadConfig, match=r"cuInit: NotFound: the NVIDIA driver \(libcuda\) is not installed"):
        CudaMemory(2, PAGE, NoDriver())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(BadConfig, match=r"cuda-bindings: pip install 'janus-server\[cuda\]'"):
        vmm_cuda.load_driver()


def test_the_real_bindings_say_so_where_there_is_no_driver() -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed", exc_type=ImportError)
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has an NVIDIA GPU")
    with pytest.raises(BadConfig, match=r"^cuInit: DynamicLibNotFoundError: the NVIDIA driver|cuInit returned CUDA_"):
        CudaMemory(2, PAGE, vmm_cuda.load_driver())


def test_every_name_used_is_one_of_the_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed", exc_type=ImportError)
    for kind in vars(FakeCuda):
        if kind.startswith("cu"):
            assert callable(getattr(driver, kind)), kind
    for group in (
        "CUresult", "CUdevice_attribute", "CUmemAllocationType", "CUmemLocationType", "CUmemAllocationHandleType",
        "CUmemAllocationGranularity_flags", "CUmemAccess_flags",
    ):  # fmt: skip
        ours, theirs = getattr(FakeCuda, group), getattr(driver, group)
        for name in [n for n in dir(ours) if n.startswith("CU")]:
            assert int(getattr(ours, name)) == int(getattr(theirs, name)), name
    assert driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY.name == "CUDA_ERROR_OUT_OF_MEMORY"
    properties, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    for record in (properties, access):
        # A location that is a copy would lose what is written to it.
        record.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        record.location.id = 5
        assert (int(record.location.type), record.location.id) == (1, 5)


# What doctor says


@pytest.mark.parametrize(
    ("gpu", "bindings", "reason"),
    [
        (Gpu((), None), "13.5.0", "no NVIDIA GPU"),
        (Gpu(("/dev/nvidia0",), None), "13.5.0", "no driver is loaded"),
        (Gpu(("/dev/nvidia0",), "580"), None, "cuda-bindings is not installed"),
        (Gpu(("/dev/nvidia0",), "580"), "13.5.0", r"the kernels compute there; .*\(cuda-bindings 13.5.0\)"),
    ],
)
def test_doctor_says_which_memory_and_why(gpu: Gpu, bindings: str | None, reason: str) -> None:
    assert re.fullmatch(rf"host memory \(memfd\): .*{reason}.*", pages_of(gpu, bindings))


# The check that runs on a GPU, tried without one


def test_the_gpu_check_measures_and_gives_everything_back() -> None:
    cuda = FakeCuda()
    found = gpu_check.check(cuda, gpu_check.Sizes(page_bytes=PAGE, pages=8, window_pages=3, copy_bytes=5 * PAGE))
    assert cuda.left() == EMPTY and cuda.bytes == {} and cuda.host == {}
    assert found["device"]["name"] == "Imaginary" and found["device"]["granularity_bytes"] == GRANULARITY
    assert found["aliasing"] == "slab and window show the same bytes"
    assert [row["what"] for row in found["calls"]][:2] == ["create a page", "map a page"]
    assert all(row["median_us"] > 0 for row in found["calls"])
    assert {row["what"] for row in found["copies"]} == {"host to device", "device to device"}
    shown = gpu_check.table(found)
    assert "published" in shown and "193" in shown and "Imaginary" in shown
    json.dumps(found)


@pytest.mark.parametrize("name", ["cuMemSetAccess", "cuMemHostAlloc", "cuMemAlloc", "cuMemcpyDtoH", "cuEventRecord"])
def test_a_gpu_check_that_fails_gives_everything_back(name: str) -> None:
    cuda = FakeCuda()
    cuda.fail_names = frozenset({name})
    with pytest.raises((BadConfig, DriverRefused)):
        gpu_check.check(cuda, gpu_check.Sizes(page_bytes=PAGE, pages=8, window_pages=3, copy_bytes=5 * PAGE))
    assert cuda.left() == EMPTY and cuda.bytes == {} and cuda.host == {}


def test_the_gpu_check_skips_with_a_reason_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has an NVIDIA GPU")
    assert gpu_check.main([]) == 0
    assert capsys.readouterr().out.startswith("skipped: ")
