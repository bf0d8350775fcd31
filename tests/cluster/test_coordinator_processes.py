"""Leaders that are killed or stopped, nodes that come back: real processes, with a run directory and with a real etcd.

Terms are checked from what the processes did, on one clock. Recovery times are printed (`-s`), never asserted tighter
than the machine's mood allows.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import etcd_servers
from node_process import NodeProcess, check_terms, leader_of, nodes, wait_for

LEASE_S = 2.0
STORM_S = 8.0


@pytest.fixture(params=["local", "etcd"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run")
        return
    with etcd_servers(tmp_path) as servers:
        yield f"etcd://{servers[0].endpoint}/tests"


def test_a_killed_leader_is_followed_by_another_in_a_higher_term(where: str) -> None:
    with nodes(where, "a", "b", "c", lease_s=LEASE_S) as running:
        for death in range(2):
            replace_the_leader(where, running, f"dead-{death}")
        assert len(check_terms(running)) == 3


def replace_the_leader(where: str, running: dict[str, NodeProcess], dead: str) -> None:
    """Kill the leader, see another lead, and start it again under its name; what the dead one said stays as `dead`."""
    first = leader_of(running)
    running[dead] = running.pop(first.name)
    others = [node for name, node in running.items() if not name.startswith("dead")]
    seen = [len(node.changes("Came")) for node in others]
    led = [len(node.acts()) for node in others]
    first.kill()
    took_s = wait_for("another leads", lambda: any(len(n.acts()) > n_led for n, n_led in zip(others, led, strict=True)))
    print(f"{kind(where)}: leader killed, another led {took_s:.2f} s later (lease {LEASE_S} s)")
    assert leader_of(running).acts()[-1]["acts"] > first.acts()[-1]["acts"]
    wait_for("it is missed", lambda: all(node.changes("Went") for node in others))
    running[first.name] = NodeProcess(where, first.name, LEASE_S)
    wait_for("all see it back", lambda: all(len(n.changes("Came")) > had for n, had in zip(others, seen, strict=True)))


@pytest.mark.parametrize("stopped_s", [0.4, LEASE_S + 2.0])
def test_a_leader_that_was_stopped_knows_on_waking_whether_it_leads(where: str, stopped_s: float) -> None:
    with nodes(where, "a", "b", "c", lease_s=LEASE_S) as running:
        first = leader_of(running)
        term = first.acts()[-1]["acts"]
        first.send(signal.SIGSTOP)
        time.sleep(0.1)
        before = len(first.acts())
        time.sleep(stopped_s - 0.1)
        if stopped_s > LEASE_S:
            wait_for("another leads", lambda: any(n.acts() for n in running.values() if n is not first))
        woken_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        first.send(signal.SIGCONT)
        if stopped_s > LEASE_S:
            wait_for("it knows", lambda: bool(first.changes("Deposed")))
            wait_for("it is back in another incarnation", lambda: any(".1" in c["what"] for c in first.changes("Came")))
            # What it says with an older time it had asked before it was stopped.
            late = [act for act in first.acts()[before:] if act["asked"] > woken_s]
            assert not [act for act in late if act["acts"] == term]
        else:
            wait_for("it goes on", lambda: len(first.acts()) > before)
        time.sleep(0.5)
        terms = check_terms(running)
        print(f"{kind(where)}: stopped for {stopped_s} s, terms {terms}")
        assert len(terms) > 1 or stopped_s < LEASE_S


def test_a_name_belongs_to_one_living_process(where: str) -> None:
    with nodes(where, "a", "b", lease_s=LEASE_S) as running:
        second = running["second"] = NodeProcess(where, "a", LEASE_S)
        assert "a node named a" in second.refused()
        assert "another name" in second.refused()
        assert not running["b"].changes("Went")
        running.pop("second").kill()
        check_terms(running)


def test_nodes_that_begin_at_once_agree_on_one_leader(where: str) -> None:
    with nodes(where, *(f"n{i}" for i in range(6)), lease_s=LEASE_S) as running:
        wait_for("all see each other", lambda: all(len(n.changes("Came")) >= 6 for n in running.values()))
        wait_for("all see the leader", lambda: all(n.changes("Led") for n in running.values()))
        assert len({n.changes("Led")[-1]["what"] for n in running.values()}) == 1
        assert len(check_terms(running)) == 1


@pytest.mark.parametrize("seed", [1])
def test_a_storm_of_stops_and_deaths_never_makes_two_leaders(where: str, seed: int) -> None:
    """For a longer one see STORM_S."""
    draw = random.Random(seed)
    with nodes(where, "a", "b", "c", "d", lease_s=LEASE_S) as running:
        ends_s = time.monotonic() + STORM_S
        dead = 0
        while time.monotonic() < ends_s:
            name = draw.choice("abcd")
            node = leader_of(running) if draw.random() < 0.5 else running[name]
            if node.name not in running or running[node.name] is not node:
                continue
            if draw.random() < 0.2:
                dead += 1
                node.kill()
                running[f"dead-{dead}"] = node
                running[node.name] = NodeProcess(where, node.name, LEASE_S)
                wait_for("it is back", lambda: any("joined" in s for s in running[node.name].said))  # noqa: B023
            else:
                node.send(signal.SIGSTOP)
                time.sleep(draw.choice([0.01, 0.3, LEASE_S - 0.2, LEASE_S, LEASE_S + 0.5]))
                node.send(signal.SIGCONT)
            time.sleep(draw.choice([0.0, 0.1, 1.0]))
        living = [running[name] for name in "abcd"]
        calm_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        wait_for("one leads", lambda: any(n.acts() and n.acts()[-1]["asked"] > calm_s for n in living))
        terms = check_terms(running)
        print(f"{kind(where)}: {len(terms)} terms and {dead} deaths in {STORM_S:.0f} s")
        assert len(terms) > 1


def kind(where: str) -> str:
    return "etcd" if "://" in where else "run directory"
