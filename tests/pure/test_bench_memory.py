"""The arithmetic of the memory benches: packing is exact, sizes are what they are said to be, churn keeps its books."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import memory, memory_borrowing, memory_churn, memory_density, memory_plots
from bench.memory_models import Shape, write_model
from bench.memory_server import config_file
from janus_server.kv.xtensor import kv_layout


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(12, 20))
def test_the_fewest_bins_are_those_of_exhaustive_search(sizes: list[int], room: int) -> None:
    def fits(bins: int) -> bool:
        spread = itertools.product(range(bins), repeat=len(sizes))
        return any(
            all(sum(s for s, own in zip(sizes, at, strict=True) if own == b) <= room for b in range(bins))
            for at in spread
        )

    fewest = next(bins for bins in range(1, len(sizes) + 1) if fits(bins))
    found = memory_density.best_bins(sizes, room)
    assert len(found) == fewest == memory_density.fewest_bins(sizes, room)
    assert sorted(i for one in found for i in one) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in one) <= room for one in found)


def test_what_fits_nowhere_has_no_packing() -> None:
    assert memory_density.fewest_bins([5, 11], 10) == 0


def test_density_as_counted_is_what_was_published() -> None:
    sizes = tomllib.loads(memory_density.FILE.read_text())
    paper = sizes["paper"]
    page = paper["page_bytes"]
    bases = [
        memory_density.Base(m["name"], -(-m["weight_bytes"] // page), memory_density._whole_tokens(m, paper))
        for m in paper["models"]
    ]
    pages, scratch = paper["device_bytes"] // page, -(-paper["scratch_bytes"] // page)
    assert memory_density.devices_of(bases, sizes["services_a_model"], pages, scratch) == memory_density.PUBLISHED
    alone = memory_density.devices_of(bases, 1, pages, scratch)
    assert alone["xTensor"] == alone["static partition"] == 1  # one service a model: there is nothing to share


def test_a_burst_needs_more_than_a_quarter_and_less_than_the_pool() -> None:
    shape = memory_borrowing.SHAPE
    prompt = shape.kv_pages(memory_borrowing.PROMPT, memory_borrowing.PAGE_BYTES)
    whole = shape.kv_pages(memory_borrowing.PROMPT + memory_borrowing.ANSWER, memory_borrowing.PAGE_BYTES)
    for pool in (400, 740, 2000):
        quarter = pool // 4
        burst = memory_borrowing.burst_of(quarter)
        assert burst * prompt > quarter
        assert burst * whole < pool
    assert memory_borrowing._trace(2.0, 5, 4) == memory_borrowing._trace(2.0, 5, 4)


def test_shapes_take_what_the_layout_says() -> None:
    shape = Shape(hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=96)
    layout = kv_layout(64 << 10, 3, 2, 16, 2)
    assert (shape.token_bytes, shape.page_tokens(64 << 10)) == (layout.token_bytes, layout.page_tokens)
    assert shape.kv_pages(layout.page_tokens + 1, 64 << 10) == 2


def test_checkpoints_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    shape = Shape(hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, mlp=96)
    one, two, other = (write_model(tmp_path / name, shape, seed) for name, seed in (("1", 5), ("2", 5), ("3", 6)))
    read = [(folder / "model.safetensors").read_bytes() for folder in (one, two, other)]
    assert read[0] == read[1] != read[2]


def test_the_config_file_is_toml_with_quoted_names(tmp_path: Path) -> None:
    file = config_file(
        tmp_path / "j.toml", {"memory": "8MiB", "pin": True}, {"a.b": {"path": "/x"}}, {"s": {"model": "a.b"}}
    )
    assert tomllib.loads(file.read_text()) == {
        "memory": "8MiB", "pin": True, "models": {"a.b": {"path": "/x"}}, "applications": {"s": {"model": "a.b"}},
    }  # fmt: skip


def test_churn_keeps_its_books_and_wastes_nothing_outside_pages(tmp_path: Path) -> None:
    found = memory_churn.churn(3, seconds=20)
    assert found["held"]
    for one in found["periods"].values():
        assert one["external_most"] == 0.0
        assert one["weight copies"] > 0 and one["extents_most"] >= 1
        assert one["sequences"] > 0
    assert found["real"]["wrong pages"] == 0 and found["real"]["windows"] > 20
    assert all(row.what for row in memory._TABLES["churn"](found))
    pytest.importorskip("matplotlib")
    memory_plots.draw(tmp_path / "churn.png", "churn", found)
    assert (tmp_path / "churn.png").stat().st_size > 1000
