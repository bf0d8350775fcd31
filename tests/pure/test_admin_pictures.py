"""What operators are shown: the map adds up whatever the pool looks like, and is drawn without a terminal's help."""

from __future__ import annotations

import string

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server import cli_admin
from janus_server.api.admin import (
    WISHES,
    KvUse,
    ManagedModel,
    MemoryMap,
    PageRun,
    PeerList,
    PeerModel,
    PeerNode,
    Prediction,
    Survey,
    Taking,
    UnderWay,
    fragmentation,
    memory_map,
    runs_of,
)
from janus_server.terminal import memory, models
from janus_server.terminal.client import plain, printable
from janus_server.terminal.lines import text_of
from janus_server.types import Owner, PageKind

PAGE = 1 << 16
W, K = PageKind.WEIGHTS, PageKind.KV
holders = st.one_of(st.none(), st.builds(Owner, st.sampled_from(["a", "b/c", "d"]), st.sampled_from(list(PageKind))))
pools = st.lists(holders, min_size=1, max_size=60)


def drawn(
    owners: list[Owner | None], kv: dict[str, KvUse] | None = None, weight_bytes: int = 3 * PAGE - 1000, **host: int
) -> MemoryMap:
    takings = [Taking(name, weight_bytes, 3, 14, 4000) for name in ("a", "b/c", "d")]
    return memory_map(Survey(tuple(owners), kv or {}), takings, PAGE, host, 1 << 22)


@given(pools)
def test_the_runs_cover_every_page_once_and_the_totals_add_up(owners: list[Owner | None]) -> None:
    found = drawn(owners, weight_bytes=1)
    pages: list[tuple[str | None, str]] = []
    for run in found.runs:
        assert run.first == len(pages)
        pages += [(run.model, run.kind)] * run.count
    assert pages == [(o.model, o.kind.value) if o is not None else (None, "free") for o in owners]
    assert all(a.model != b.model or a.kind != b.kind for a, b in zip(found.runs, found.runs[1:], strict=False))
    assert found.free_pages + sum(total.pages for total in found.totals) == found.pool_pages == len(owners)
    assert all(total.bytes == total.pages * PAGE for total in found.totals)
    assert found.fragmentation.external == 0.0
    assert msgspec.json.decode(msgspec.json.encode(found), type=MemoryMap) == found


def test_waste_is_what_pages_hold_that_nobody_wrote() -> None:
    owners = [Owner("a", W)] * 2 + [None] + [Owner("a", W)] + [None] * 2 + [Owner("a", K)] * 2
    found = drawn(owners, {"a": KvUse(empty_tokens=5, prefix_pages=1)}, a=2 << 20)
    one = found.models[0]
    assert (one.weight_extents, one.weight_waste_bytes, one.prefix_pages) == (2, 1000, 1)
    assert one.kv_waste_bytes == 2 * (PAGE - 14 * 4000) + 5 * 4000
    assert [(m.weight_extents, m.weight_waste_bytes, m.kv_waste_bytes) for m in found.models[1:]] == [(0, 0, 0)] * 2
    assert (found.host.held_bytes, found.host.budget_bytes) == (2 << 20, 1 << 22)
    # The largest that is not on the device needs three pages; free are runs of one and two.
    assert found.fragmentation.largest_request_pages == 3
    assert found.fragmentation.contiguous == pytest.approx(3 / 8)


def test_fragmentation_by_hand() -> None:
    runs = [PageRun(0, 2, None, "free"), PageRun(2, 3, "a", "kv"), PageRun(5, 5, None, "free")]
    found = fragmentation(runs, 10, 4)
    assert (found.external, found.contiguous, found.longest_free_run_pages) == (0.0, 0.2, 5)
    assert "one by one" in found.how


@given(pools, st.integers(1, 7))
def test_a_cell_shows_who_holds_most_of_its_pages(owners: list[Owner | None], per_cell: int) -> None:
    cells = memory.shown(list(runs_of(owners)), per_cell)
    assert len(cells) == -(-len(owners) // per_cell)
    for i, cell in enumerate(cells):
        part = [(o.model, o.kind.value) if o else (None, "free") for o in owners[i * per_cell : (i + 1) * per_cell]]
        assert cell.count == max(map(part.count, part)) == part.count((cell.model, cell.kind))


@given(pools, st.integers(8, 20))
def test_the_drawing_fits_and_counts(owners: list[Owner | None], columns: int) -> None:
    lines = text_of(memory.drawing(drawn(owners), columns)).split("\n")
    rows = lines[1 : lines.index("")]
    assert all(0 < len(row) <= columns for row in rows)
    assert len(rows) <= memory._ROWS
    shown = "".join(rows)
    assert set(shown) <= set(string.ascii_letters + "·#")
    if len(owners) <= columns * memory._ROWS:
        letters = {"a": "A", "b/c": "B", "d": "C"}
        for name, letter in letters.items():
            assert shown.count(letter) == owners.count(Owner(name, W))
            assert shown.count(letter.lower()) == owners.count(Owner(name, K))


def test_the_drawing_as_people_see_it() -> None:
    owners = [Owner("a", W)] * 4 + [Owner("b/c", W)] * 2 + [None] * 7 + [Owner("a", K)] * 3
    text = text_of(memory.drawing(drawn(owners, d=2 << 20), 8))
    assert text.splitlines()[:3] == [
        "1 MiB in 16 pages of 64 KiB, 448 KiB free; a cell is 1 page", "AAAABB··", "·····aaa",
    ]  # fmt: skip
    assert "Bb  b/c" in text
    assert "host copies 2 MiB of 4 MiB; d 2 MiB" in text
    assert "fragmentation 0.0%" in text


def predicted(says: str) -> Prediction:
    return Prediction(
        says=says, age_s=1.0, requests_per_s=1.0, tokens_per_s=9.0, target=0.99, attained=None, predicted=0.97,
        predicted_least=0.9, needs=0.4, needs_most=0.5, hbm=0.1, compute=0.2, bandwidth=0.4, busy_share=None, periods=3,
        fitted=False,
    )  # fmt: skip


def managed(**more: object) -> ManagedModel:
    plainly = {
        "model": "a", "stage": "cold", "goal": None, "under_way": None, "pinned": False, "draining": False,
        "running": 0, "held": 0, "idle_s": None, "weight_pages": 9, "weight_bytes": 534272, "held_pages": 0,
        "kv_pages": 0, "host_copy_bytes": 0, "load_s": 1.0, "wake_s": 0.1, "trouble": None,
        "prepared": False, "origin": None, "source": None,
    }  # fmt: skip
    return ManagedModel(**{**plainly, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ""),
        ({"goal": "active"}, "to be active"),
        ({"pinned": True, "draining": True}, "draining, pinned"),
        ({"stage": "active", "origin": "fork", "source": "n1", "prepared": True}, "from n1"),
        ({"prepared": True}, "prepared"),
        ({"trouble": "no\x1b[2J room"}, "no[2J room"),
        (
            {"under_way": UnderWay(order=1, verb="load", why="", for_s=1.0, done_bytes=45, total_bytes=100)},
            "load 45%",
        ),
        ({"under_way": UnderWay(order=1, verb="wake", why="", for_s=1.0, done_bytes=0, total_bytes=None)}, "wake"),
        ({"pinned": True, "prediction": predicted("in time\x1b[2J")}, "pinned, in time[2J"),
    ],
)
def test_what_is_out_of_the_ordinary_is_noted(more: dict[str, object], expected: str) -> None:
    assert models.note(managed(**more)) == expected


def test_a_row_says_where_a_model_stands() -> None:
    one = managed(stage="active", idle_s=1.25, kv_pages=3, running=2, held=1, host_copy_bytes=2 << 20)
    assert models.row(one) == ("a", "active", "522 KiB", "3", "2 MiB", "2", "1", "1.25 s", "")


def test_peers_are_shown_with_what_they_offer() -> None:
    offered = PeerModel(model="a", bytes=1, readers=0, why=None)
    other = PeerModel(model="b", bytes=1, readers=0, why="it is another checkpoint of that name")
    peers = PeerList(
        object="list", node="n0",
        data=[
            PeerNode(node="n1", models=[offered, other], trouble=None), PeerNode(node="n2", models=[], trouble=None),
            PeerNode(node="n3", models=[], trouble="the peer did not answer in time"),
        ],
    )  # fmt: skip
    assert models.peer_lines(peers) == [
        "this is node n0; its peers:", "  n1  has a; b: it is another checkpoint of that name",
        "  n2  has nothing to copy", "  n3  the peer did not answer in time",
    ]  # fmt: skip
    assert models.peer_lines(PeerList(object="list", node="n0", data=[])) == ["this is node n0; it sees no peer"]


def test_columns_are_aligned() -> None:
    assert plain([("a", "bb"), ("ccc", "1")], right=(1,)) == ["a    bb", "ccc   1"]
    assert printable("a\x00\x9b\nb") == "ab"


def test_the_command_knows_what_the_server_takes() -> None:
    assert cli_admin._MODEL_ACTIONS == (models.LIST, *(wish.value for wish in WISHES))
