"""How a kernel table comes to be: the build and its cache, the choice and its reasons, the pool of threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from kernel_cases import error, open_table, weights

from janus_server.errors import BadConfig
from janus_server.kernels import build
from janus_server.kernels.choose import choose
from janus_server.kernels.cpu import CpuNative
from janus_server.kernels.table import DType

CLOSE = 3e-6  # f32 sums of a few hundred terms, as a share of the largest


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    rng = np.random.default_rng(5)
    values, x = rng.standard_normal((700, 96)), rng.standard_normal((30, 96)).astype(np.float32)
    outs = []
    for count in (1, threads):
        table = open_table("cpu", count)
        matrix, out = weights(table, values, DType.BF16), table.empty((30, 700), DType.F32)
        for _ in range(300):  # long enough for workers to fall asleep and wake between calls
            table.linear(x, matrix, None, out)
        outs.append(out)
        table.close()
    assert np.array_equal(*outs)


def test_pools_of_two_tables_do_not_meet() -> None:
    """Two device threads, each with its own table, at the same time."""
    rng = np.random.default_rng(6)
    values, x = rng.standard_normal((512, 128)), rng.standard_normal((20, 128)).astype(np.float32)
    want = x.astype(np.float64) @ values.astype(np.float32).T
    worst: list[float] = []

    def go() -> None:
        table = open_table("cpu", 3)
        matrix, out = weights(table, values, DType.F32), table.empty((20, 512), DType.F32)
        for _ in range(200):
            table.linear(x, matrix, None, out)
            worst.append(error(out, want))
        table.close()

    threads = [threading.Thread(target=go) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(worst) == 400 and max(worst) < CLOSE


def test_close_twice_is_harmless() -> None:
    table = open_table("cpu", 2)
    table.close()
    table.close()


def test_build_is_cached_and_two_may_build_at_once(tmp_path: Path) -> None:
    results: list[build.Built] = []
    threads = [threading.Thread(target=lambda: results.append(build.ensure(tmp_path))) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if results[0].path is None:
        pytest.skip(results[0].how)
    assert results[0].path == results[1].path
    assert [p.name for p in results[0].path.parent.iterdir()] == [build.LIBRARY]
    assert build.ensure(tmp_path).how.startswith("cached")
    CpuNative(results[0].path, 1).close()
    # Without a compiler the library that is there still serves.
    assert build.ensure(tmp_path, compilers=("no-such-compiler",)).path == results[0].path


def test_a_failed_build_is_a_reason(tmp_path: Path) -> None:
    assert "no C++ compiler" in build.ensure(tmp_path, compilers=("no-such-compiler",)).how
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'error: out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    failed = build.ensure(tmp_path / "cache", compilers=(str(broken),))
    assert failed.path is None and "out of luck" in failed.how
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    unwritable = build.ensure(in_the_way / "cache")
    assert unwritable.path is None


def test_choose(tmp_path: Path) -> None:
    table, reasons = choose("torch_ref", 1, tmp_path)
    assert table.name == "torch_ref" and reasons[0].chosen == "torch_ref"
    with pytest.raises(BadConfig):
        choose("cuda", 1, tmp_path)
    table, reasons = choose("auto", 1, build.cache_dir(os.environ))
    assert reasons and reasons[0].chosen == table.name and reasons[0].why


def test_choose_falls_back_with_the_reason(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    table, reasons = choose("auto", 1, in_the_way / "cache")
    assert table.name == "torch_ref" and "cannot be written" in reasons[0].why
    with pytest.raises(BadConfig, match="cannot be written"):
        choose("cpu", 1, in_the_way / "cache")
