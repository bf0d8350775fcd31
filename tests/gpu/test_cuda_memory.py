"""Pages on a real GPU: slab and windows alias, torch sees them without a copy, a peer process reads what was exported.

Needs the driver, cuda-bindings and a torch with CUDA. Times are printed, never asserted:
`bench/gpu_check` reports them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from janus_server.kv.vmm_cuda import CudaMemory, load_driver
from janus_server.kv.xtensor import XTensor

pytestmark = pytest.mark.gpu

PAGE = 2 << 20
N_PAGES = 64

_READER = """
import sys
import torch
from janus_server.kv.vmm_cuda import CudaPeer, load_driver

peer = CudaPeer([int(fd) for fd in sys.argv[1:]], 2 << 20, load_driver())
pages = torch.as_tensor(peer.array, device="cuda").view(len(sys.argv) - 1, -1)
print(*[int(page.to(torch.int64).sum()) for page in pages])
torch.cuda.synchronize()
peer.close()
"""


@pytest.fixture
def memory() -> Iterator[CudaMemory]:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    made = CudaMemory(N_PAGES, PAGE, load_driver())
    yield made
    torch.cuda.synchronize()
    made.close()


def test_what_is_written_through_the_slab_is_read_through_the_window(memory: CudaMemory) -> None:
    import torch

    pages = (63, 0, 17, 18, 5)
    slab = torch.as_tensor(memory.slab, device="cuda")
    assert slab.data_ptr() == memory.address and slab.numel() == N_PAGES * PAGE
    for page in pages:
        slab[page * PAGE : (page + 1) * PAGE] = page
    window = memory.window(len(pages))
    start_s = time.perf_counter()
    window.map(pages)
    print(f"map of {len(pages)} pages: {(time.perf_counter() - start_s) * 1e6:.0f} µs")
    view = torch.as_tensor(window.array, device="cuda")
    assert view.data_ptr() == window.address
    assert view.view(len(pages), PAGE).unique_consecutive(dim=1).flatten().tolist() == list(pages)
    view[:PAGE] = 99
    assert int(slab[63 * PAGE]) == 99 and int(slab[-1]) == 99
    # The same addresses over other pages, as after a sleep and a wake.
    torch.cuda.synchronize()
    window.unmap()
    window.map((5, 18, 17, 0, 63))
    torch.cuda.synchronize()
    assert view.view(len(pages), PAGE)[:, 0].tolist() == [5, 18, 17, 0, 99]


def test_weights_live_in_it_as_on_a_cpu(memory: CudaMemory) -> None:
    import torch

    xtensor = XTensor(memory)
    weights = xtensor.weights("m", 10 * PAGE - 100)
    host = torch.randint(0, 256, (weights.size_bytes,), dtype=torch.uint8)
    for _ in range(2):
        assert weights.reserve()
        weights.map()
        weights.commit()
        torch.as_tensor(weights.array, device="cuda").copy_(host)
        assert torch.equal(torch.as_tensor(weights.array, device="cuda").cpu(), host)
        weights.unmap()
        weights.release()
    xtensor.pool.check()


def test_a_peer_process_reads_exported_pages(memory: CudaMemory) -> None:
    import torch

    slab = torch.as_tensor(memory.slab, device="cuda").view(N_PAGES, PAGE)
    slab[3], slab[40] = 3, 40
    torch.cuda.synchronize()
    descriptors = [memory.export(40), memory.export(3)]
    try:
        shown = subprocess.run(
            [sys.executable, "-c", _READER, *map(str, descriptors)],
            pass_fds=descriptors, capture_output=True, text=True, timeout=120, check=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert shown.stdout.split() == [str(40 * PAGE), str(3 * PAGE)]
