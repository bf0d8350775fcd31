"""`janus status` as text: what came in the last minute, quantiles of counts, bars that fill their width."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server.api.admin import ManagedModel
from janus_server.api.cluster import (
    ApplicationView,
    ClusterView,
    Come,
    Decision,
    LeaderView,
    ModelView,
    NodeView,
    Spread,
    Stretch,
)
from janus_server.terminal.cluster_picture import cells, drawing, promised
from janus_server.terminal.course import Course, quantile, since, total
from janus_server.terminal.lines import text_of
from janus_server.terminal.models import table
from janus_server.terminal.status import other_url

BOUNDS = [0.1, 0.5, 1.0, 4.0]


def spread_of(values: list[float]) -> Spread:
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[next((i for i, bound in enumerate(BOUNDS) if value <= bound), len(BOUNDS))] += 1
    return Spread(bounds_s=BOUNDS, counts=counts)


def application(requests: int, ttft: list[float], name: str = "app", ended: int = 0, met: int = 0) -> ApplicationView:
    return ApplicationView(
        application=name, model="a", requests=requests, ended=ended, attained=met, ttft_s=0.3, attain=0.95,
        ttft=spread_of(ttft), tpot=spread_of([]),
    )  # fmt: skip


def node(name: str, up_s: float, *applications: ApplicationView, **more: object) -> NodeView:
    return msgspec.structs.replace(NodeView(node=name, up_s=up_s, applications=list(applications)), **more)


def sight(time: float, *nodes: NodeView) -> ClusterView:
    return ClusterView(asked="n0", leader="n0", term=1, time=time, nodes=list(nodes))


# Counts


@given(st.lists(st.floats(0.0, 3.99), min_size=1, max_size=60), st.floats(0.0, 1.0))
def test_a_quantile_lies_between_the_bounds_of_the_true_one(values: list[float], share: float) -> None:
    found = quantile(spread_of(values), share)
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert found is not None
    low = max((bound for bound in [0.0, *BOUNDS] if bound < true), default=0.0)
    high = min(bound for bound in BOUNDS if bound >= true)
    assert low - 1e-9 <= found <= high + 1e-9


def test_quantiles_of_nothing_and_of_what_is_beyond_all_bounds() -> None:
    assert quantile(None, 0.5) is None
    assert quantile(spread_of([]), 0.5) is None
    assert quantile(spread_of([9.0, 9.0]), 0.5) == BOUNDS[-1]
    two = Spread(bounds_s=[1.0, 2.0], counts=[2, 2, 0])
    assert quantile(two, 0.5) == 1.0 and quantile(two, 0.75) == 1.5
    assert quantile(Spread(bounds_s=[1.0, 2.0], counts=[0, 4, 0]), 0.0) == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_the_last_minute_is_what_came_in_it_whatever_restarts(seed: int) -> None:
    """Against a plain list of arrivals: nodes come, begin anew, are silent for a while."""
    rng, course = random.Random(seed), Course(span_s=10.0)
    counts, up_s, arrivals = {"n0": 0, "n1": 0}, {"n0": 5.0, "n1": 5.0}, list[tuple[float, int]]()
    silent: dict[str, int] = {}
    course.add(sight(0.0, *(node(name, 5.0, application(0, [])) for name in counts)))
    for now in range(1, 40):
        nodes = []
        for name in counts:
            if rng.random() < 0.1 and not silent.get(name) and up_s[name] > 1.0:
                counts[name], up_s[name] = 0, 0.0
            new = rng.randint(0, 5)
            counts[name] += new
            up_s[name] += 0.9
            if up_s[name] > 1.0 and rng.random() < 0.2:
                nodes.append(NodeView(node=name, trouble="it does not answer"))
                silent[name] = silent.get(name, 0) + new
            else:  # what came while it was silent is seen now, unless its process is gone
                nodes.append(node(name, up_s[name], application(counts[name], [0.2] * counts[name])))
                arrivals.append((float(now), new + silent.pop(name, 0)))
        course.add(sight(float(now), *nodes))
        wanted = sum(count for at, count in arrivals if at > now - 10.0)
        sums = course.sums()
        assert (sums["app"].requests if sums else 0) == wanted
        assert sum(sums["app"].ttft.counts if sums and sums["app"].ttft else [0]) == wanted
        assert course.over_s == min(float(now), 10.0)


def test_a_node_that_is_new_and_one_whose_application_is_new() -> None:
    course = Course()
    course.add(sight(0.0, node("n0", 1.0)))
    course.add(sight(1.0, node("n0", 2.0, application(3, [0.2] * 3)), node("n1", 900.0, application(500, [0.2]))))
    assert course.sums()["app"].requests == 3
    course.add(sight(1.0, node("n0", 2.0, application(3, [0.2] * 3))))  # the same sight once more
    assert course.sums()["app"].requests == 3 and course.over_s == 1.0


def test_a_course_begins_with_what_nodes_recall_and_forgets_it_in_time() -> None:
    def past(*counts: int, rest_s: float) -> list[Stretch]:
        """Ten seconds each, the oldest first, and a rest of nothing."""
        last = len(counts) - 1
        found = [
            Stretch(ago_s=10.0 * (last - i) + rest_s, over_s=10.0, came=[
                Come(application="app", requests=count, ended=count, attained=1, ttft=[0, count, 0, 0, 0], tpot=[0] * 5)
            ]) for i, count in enumerate(counts)
        ]  # fmt: skip
        return [*found, Stretch(ago_s=0.0, over_s=rest_s, came=[])]

    course = Course()
    app = application(1000, [0.2] * 1000)
    nodes = (
        node("n0", 900.0, app, past=past(50, 50, *[1] * 6, rest_s=4.0)),
        node("n1", 900.0, app, past=past(10, 20, rest_s=7.0)),
    )
    course.recall(sight(100.0, *nodes))
    course.add(sight(100.0, *nodes))
    sums = course.sums()
    assert sums["app"].requests == 6 + 30 and course.over_s == 60.0
    assert sums["app"].attained == 6 + 2 and quantile(sums["app"].ttft, 0.5) == pytest.approx(0.3)
    more = application(1007, [0.2] * 1007)
    course.add(sight(145.0, node("n0", 945.0, more), node("n1", 945.0, app)))
    assert course.sums()["app"].requests == 7 + 2 + 30
    course.add(sight(165.0, node("n0", 965.0, more), node("n1", 965.0, app)))
    assert course.sums()["app"].requests == 7


def test_where_a_count_fell_none_counts() -> None:
    """Another process was there before it was seen again: more requests, of which fewer kept what was promised."""
    before = application(10, [0.2] * 10, ended=10, met=10)
    now = application(12, [0.2] * 12, ended=12, met=5)
    (found,) = since(node("n0", 30.0, before), node("n0", 60.0, now))
    assert found == application(0, [])
    (found,) = since(node("n0", 30.0, before), node("n0", 60.0, application(12, [0.7] * 12, ended=12, met=12)))
    assert found == application(0, [])
    (found,) = since(node("n0", 30.0, before), node("n0", 60.0, application(12, [0.2] * 12, ended=12, met=11)))
    assert found == application(2, [0.2] * 2, ended=2, met=1)


def test_counts_with_other_bounds_are_not_mixed() -> None:
    other = Spread(bounds_s=[1.0], counts=[1, 1])
    strange = msgspec.structs.replace(application(2, []), ttft=other)
    (none,) = since(node("n0", 1.0, application(1, [0.2])), node("n0", 2.0, strange))
    assert none.requests == 0 and none.ttft == Spread(bounds_s=[1.0], counts=[0, 0])
    assert total([application(1, [0.2]), strange])["app"].ttft == spread_of([0.2])


# Bars


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30), st.integers(1, 80))
def test_a_bar_fills_its_width_and_shows_whatever_is_there(parts: list[int], width: int) -> None:
    counts = cells(parts, width)
    there = sum(part > 0 for part in parts)
    assert sum(counts) == (max(width, there) if there else 0)
    assert all((count > 0) == (part > 0) for count, part in zip(counts, parts, strict=True))


def test_cells_are_as_many_as_a_part_is_large() -> None:
    assert cells([1, 99, 0], 10) == [1, 9, 0]
    assert cells([50, 50], 10) == [5, 5]
    assert cells([47, 47, 17, 1254], 40) == [2, 1, 1, 36] or sum(cells([47, 47, 17, 1254], 40)) == 40


# The picture


def model(name: str, stage: str = "cold", **more: object) -> ModelView:
    return msgspec.structs.replace(msgspec.convert({"model": name, "stage": stage}, ModelView), **more)


def picture(view: ClusterView, course: Course | None = None, **more: object) -> str:
    return text_of(drawing(view, course or Course(), 120, 10, **more))  # type: ignore[arg-type]


def whole() -> ClusterView:
    leads = LeaderView(
        served={"a": ["n0"], "b": ["n0", "n1"]}, predictions={}, draining=["n1"], waiting={"a": 3},
        decisions=[Decision(time=0.0, term=1, kind="order", model="a", node="n0", verb="load", why="a: wanted")],
    )  # fmt: skip
    first = node(
        "n0", 10.0, application(4, [0.2] * 4, ended=4, met=3), url="http://127.0.0.1:1", pool_pages=100, free_pages=60,
        scratch_pages=10, leads=leads,
        models=[model("a", "active", weight_pages=20, running=2), model("b", "active", weight_pages=5, kv_pages=5)],
    )  # fmt: skip
    second = node(
        "n1", 10.0, pool_pages=50, free_pages=50, models=[model("a", "warm"), model("b", trouble="it is ill")]
    )
    return sight(0.0, first, second, NodeView(node="n2", trouble="it does not answer"))


def test_the_picture_shows_nodes_models_applications_and_sentences() -> None:
    text = picture(whole())
    assert "n0 leads, term 1; 2 of 3 nodes answer" in text
    lines = text.splitlines()
    assert any(line.startswith("n2") and line.endswith("it does not answer") for line in lines)
    assert any(line.startswith("n1") and "being emptied" in line for line in lines)
    assert any(line.startswith("n0") and "#" * 4 + "A" * 8 + "B" * 2 + "b" * 2 + "·" * 24 in line for line in lines)
    a = next(line.split() for line in lines if line.startswith("Aa"))
    assert a == ["Aa", "a", "n0", "n1", "2", "3"]
    b = next(line for line in lines if line.startswith("Bb"))
    assert "n0 n1" in b and b.endswith("n1: it is ill")
    assert "SINCE THE NODES STARTED" in text
    app = next(line for line in lines if line.startswith("app"))
    assert app.split()[:5] == ["app", "a", "4", "0", "75.0%"] and app.endswith("95 % in TTFT 300 ms")
    assert any(line.endswith("n0     load    a: wanted") for line in lines)


def test_the_picture_shows_what_a_leader_before_this_one_decided() -> None:
    early = Decision(time=5.0, term=1, kind="leads", node="n1", why="n1 leads, term 1")
    late = Decision(time=9.0, term=2, kind="leads", node="n0", why="n0 leads, term 2; n2 is gone")
    leads = LeaderView(served={}, predictions={}, decisions=[late])
    nodes = node("n0", 9.0, leads=leads), node("n1", 9.0, decided=[early])
    text = text_of(drawing(sight(10.0, *nodes), Course(), 100, 5))
    assert text.index("n1 leads, term 1") < text.index("n0 leads, term 2; n2 is gone")


def test_a_course_tells_of_the_last_minute_alone() -> None:
    course, view = Course(), whole()
    course.add(view)
    later = whole()
    later.time = 30.0
    later.nodes[0].up_s = 40.0
    later.nodes[0].applications = [application(10, [0.2] * 4 + [0.7] * 6, ended=10, met=3)]
    course.add(later)
    text = picture(later, course)
    assert "0.2 requests/s" in text and "OVER THE LAST 30 S" in text
    app = next(line for line in text.splitlines() if line.startswith("app"))
    assert app.split()[:5] == ["app", "a", "6", "0", "0.0%"]


def test_nothing_that_a_server_says_moves_the_cursor() -> None:
    view = whole()
    view.asked = view.leader = view.nodes[0].node = "n\x1b[2J0"
    view.nodes[0].url = "http://\x1b]0;x\x07"
    view.nodes[0].models[0].model = "\x1b[31ma\r\n"
    view.nodes[2].trouble = "\x1b[31mno"
    leads = view.nodes[0].leads
    assert leads is not None
    leads.served = {"\x1b[31ma\r\n": ["n\x1b0"]}
    leads.decisions[0].why = "\x1b[5m\nb"
    leads.decisions[0].node = "\x1b"
    view.nodes[0].applications[0].application = "\x9bapp"
    assert all(char == "\n" or char.isprintable() for char in picture(view, stale="old"))


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_picture_of_one_lone_node_and_of_none_that_leads(columns: int) -> None:
    view = sight(0.0, node("n0", 1.0, pool_pages=10, free_pages=10))
    view.leader = None
    assert "nobody leads" in text_of(drawing(view, Course(), columns, 5))


def test_a_model_that_only_the_leader_names_is_shown() -> None:
    view = whole()
    leads = view.nodes[0].leads
    assert leads is not None
    leads.served["elsewhere"] = ["n2"]
    assert any(line.split()[:3] == ["Cc", "elsewhere", "n2"] for line in picture(view).splitlines())


def test_a_promise_is_said_in_words() -> None:
    assert promised(application(0, [])) == "95 % in TTFT 300 ms"
    assert promised(msgspec.structs.replace(application(0, []), attain=0.9995)) == "99.95 % in TTFT 300 ms"
    assert promised(msgspec.structs.replace(application(0, []), ttft_s=None, attain=None)) == "-"


# The list of models in a cluster


def managed(name: str) -> ManagedModel:
    return msgspec.convert(
        {
            "model": name, "stage": "cold", "goal": None, "under_way": None, "pinned": False, "draining": False,
            "running": 0, "held": 0, "idle_s": None, "weight_pages": 9, "weight_bytes": 900, "held_pages": 0,
            "kv_pages": 0, "host_copy_bytes": 0, "load_s": 1.0, "wake_s": 1.0, "trouble": None, "prepared": False,
            "origin": None, "source": None,
        },
        ManagedModel,
    )  # fmt: skip


def test_models_are_listed_with_who_serves_them_where_there_are_several_nodes() -> None:
    view = whole()
    view.asked = "n1"
    view.nodes[1].models[0].pinned = True
    head, a, b = table([managed("a"), managed("b")], view)
    assert head[:4] == ("MODEL", "ON n1", "SERVED BY", "WEIGHTS")
    assert a[:3] == ("a", "cold", "n0") and "pinned" in a[-1]
    assert b[:3] == ("b", "cold", "n0 n1")
    alone = sight(0.0, node("n0", 1.0))
    assert table([managed("a")], alone)[0][:3] == ("MODEL", "STAGE", "WEIGHTS")


def test_another_node_is_asked_only_at_the_same_address() -> None:
    def reached(*urls: str) -> ClusterView:
        return sight(0.0, *(node(f"n{i}", 1.0, url=url) for i, url in enumerate(urls)))

    view = reached("http://127.0.0.1:1", "http://127.0.0.1:2", "http://10.0.0.1:3", "https://127.0.0.1:4", "")
    assert other_url(view, "http://127.0.0.1:1") == "http://127.0.0.1:2"
    assert other_url(view, "127.0.0.1:2") == "http://127.0.0.1:1"
    assert other_url(view, "http://10.0.0.1:3") == "http://10.0.0.1:3"
    assert other_url(view, "http://elsewhere:9") == "http://elsewhere:9"
