"""Nodes of a real cluster are killed and stopped under load: every request ends once, only the lost node's suffer."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from real_cluster import Cluster, Load, complete, open_requests, stream

from janus_server.journal import replay


def under_load(cluster: Cluster, texts: dict[str, str]) -> Load:
    load = Load(cluster.urls, texts)
    cluster.until(lambda: all(load.done(node) > 3 for node in cluster.urls))
    return load


def goes_on(cluster: Cluster, load: Load, nodes: list[str]) -> None:
    """Every one of these nodes answers again, several times."""
    before = {node: load.done(node) for node in nodes}
    cluster.until(lambda: all(load.done(node) > before[node] + 5 for node in nodes))


def test_the_leader_is_killed(models: dict[str, Path], texts: dict[str, str], tmp_path: Path) -> None:
    """It runs all models too, at first: what it had begun to answer goes on elsewhere, word for word.

    The journals of both leaders are told apart by node and term, and each replays to the same decisions.
    """
    with Cluster(models, tmp_path, "--journal", str(tmp_path / "journal")) as cluster:
        load, leader = under_load(cluster, texts), cluster.leader
        others = [node for node in cluster.urls if node != leader]
        term = max(cluster.terms)
        killed_s = time.monotonic()
        cluster.kill(leader)
        cluster.until(lambda: max(cluster.terms) > term)
        goes_on(cluster, load, others)
        print(f"others answer again after {time.monotonic() - killed_s:.1f} s")
        cluster.until(lambda: cluster.log.count(f"{leader} | Janus is ready on") == 2)
        again = cluster.urls[leader]
        assert complete(again, "a", tokens=40) == texts["a"]
        ends = load.stop()
        terms = cluster.terms
    for node in others:
        assert set(ends[node]) == {"ok"}, (node, ends)
    assert set(ends[leader]) <= {"ok", "cut", "refused 503", "no connection"}
    journals = {f"journal.{node}.{number}" for number, node in terms.items()}
    assert {file.name for file in tmp_path.glob("journal.*")} == journals and len(journals) > 1
    for name in journals:
        replayed = replay(tmp_path / name)
        assert replayed.entries > 0 and replayed.difference is None, replayed


SAMPLED = {"temperature": 0.9, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 200}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 60, "maxItems": 60}
SHAPED = {
    "temperature": 0.9, "seed": 3, "ignore_eos": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}},
}  # fmt: skip


@pytest.mark.parametrize("more", [SAMPLED, SHAPED], ids=["sampled", "grammar"])
def test_a_stream_goes_on_elsewhere_as_if_nothing_had_happened(
    models: dict[str, Path], tmp_path: Path, more: dict[str, Any]
) -> None:
    """What it draws next depends on all that it drew before, on another node too."""
    with Cluster(models, tmp_path) as cluster:
        runs = cluster.leader  # which loaded all models
        url = next(url for node, url in cluster.urls.items() if node != runs)
        whole = stream(url, "a", tokens=450, **more)
        cut = stream(url, "a", tokens=450, at_event=(10, lambda: cluster.kill(runs)), **more)
        assert cut == whole and whole[1] == "ok" and len(whole[0]) > 100
        assert f"a request that ran on node {runs} goes on elsewhere" in cluster.log


def test_a_node_that_leads_nothing_is_killed(models: dict[str, Path], texts: dict[str, str], tmp_path: Path) -> None:
    with Cluster(models, tmp_path) as cluster:
        load = under_load(cluster, texts)
        lost = next(node for node in cluster.urls if node != cluster.leader)
        others = [node for node in cluster.urls if node != lost]
        cluster.kill(lost)
        goes_on(cluster, load, others)
        ends = load.stop()
        assert len(cluster.terms) == max(cluster.terms)  # one leader a term, and no election for this
        # What ran for the clients of the lost node is cancelled.
        cluster.until(lambda: all(open_requests(cluster.urls[node]) == 0 for node in others), 20)
    for node in others:
        assert set(ends[node]) == {"ok"}, (node, ends)


def test_a_leader_that_was_stopped_for_a_while_leads_no_more(
    models: dict[str, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    with Cluster(models, tmp_path) as cluster:
        load, leader = under_load(cluster, texts), cluster.leader
        others = [node for node in cluster.urls if node != leader]
        term = max(cluster.terms)
        cluster.kill(leader, signal.SIGSTOP)
        try:
            cluster.until(lambda: max(cluster.terms) > term)
            goes_on(cluster, load, others)
        finally:
            cluster.kill(leader, signal.SIGCONT)
        cluster.said(f"{leader} leads no more, term {term} is over")
        goes_on(cluster, load, [*others, leader])
        ends = load.stop()
    for node in others:
        assert set(ends[node]) == {"ok"}, (node, ends)
    assert set(ends[leader]) <= {"ok", "error"}


def test_each_node_is_restarted_in_its_turn_and_no_other_nodes_client_notices(
    models: dict[str, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    with Cluster(models, tmp_path) as cluster:
        names = list(cluster.urls)
        first = cluster.leader
        for node in sorted(names, key=lambda name: name != first):  # the leader, which runs all models, at first
            others = {name: url for name, url in cluster.urls.items() if name != node}
            load = Load(others, texts)
            goes_on(cluster, load, list(others))
            starts = cluster.log.count(f"{node} | Janus is ready on")
            cluster.kill(node, signal.SIGINT)
            cluster.until(lambda: cluster.log.count(f"{node} | Janus is ready on") > starts)  # noqa: B023
            goes_on(cluster, load, list(others))
            for name, end in load.stop().items():
                assert set(end) == {"ok"}, (node, name, end, cluster.log)
            assert complete(cluster.urls[node], "b", tokens=40) == texts["b"]
        assert f"{names[0]} | it ended with 0" in cluster.log


def test_a_node_that_may_not_wait_hands_over_what_it_runs(models: dict[str, Path], tmp_path: Path) -> None:
    """A stream that is longer than the shutdown may take goes on elsewhere too."""
    with Cluster(models, tmp_path, "--shutdown-timeout", "0.02s") as cluster:
        runs = cluster.leader
        url = next(url for node, url in cluster.urls.items() if node != runs)
        whole = stream(url, "a", tokens=480)
        cut = stream(url, "a", tokens=480, at_event=(5, lambda: cluster.kill(runs, signal.SIGINT)))
        assert cut == whole and whole[1] == "ok"
        assert f"a request that ran on node {runs} goes on elsewhere" in cluster.log
