"""`janus bench transfer`: every way that can run here is taken, moves the bytes, and is put beside its ceiling."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from bench import transfer
from bench.transfer_ways import opened
from janus_server.errors import BadConfig

SIZE = (3 << 20) + 5


def test_every_way_moves_the_owners_bytes() -> None:
    with contextlib.ExitStack() as stack:
        ways = transfer.ways_of(stack, SIZE)
        bench = ways["memcpy, one process"].__self__  # type: ignore[attr-defined]
        expected = np.arange(4 << 18, dtype=np.uint32).view(np.uint8)[:SIZE]
        for name, way in ways.items():
            bench.target[:] = 0
            took = way()
            assert 0 < took.copy_s <= took.whole_s, name
            if "hot MiB" not in name and "NIXL" not in name:
                assert np.array_equal(bench.target, expected), name


def test_the_table_has_a_share_for_every_pull(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert transfer.main(["--size", "1MiB", "--rounds", "2", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    said = capsys.readouterr().out
    for name, one in figures.items():
        assert name in said
        assert one["limit"] in figures and (one["share"] == 1.0 or one["limit"] != name)
    assert {"pull, same host", "pull over TCP, 1 line", "pull over TCP, 2 lines"} <= set(figures)


@pytest.mark.parametrize("words", [["--size", "0"], ["--rounds", "0"], ["--size", "much"]])
def test_sizes_that_are_none_are_refused(words: list[str]) -> None:
    with pytest.raises(BadConfig):
        transfer.main(words)


def test_the_owner_ends_with_the_bench() -> None:
    with opened(1 << 20) as bench:
        pid = bench._owner["pid"]
    assert not Path(f"/proc/{pid}").exists()
