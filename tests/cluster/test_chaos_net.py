"""Nodes on hosts of their own, as network namespaces are: cut off from each other, from etcd, and far apart."""

from __future__ import annotations

import pytest
from struck import holds, journals_hold, strike

from bench.chaos_run import Found

FAULTS = {"cut-follower": False, "cut-leader": True, "cut-etcd": True, "slow": False}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return strike(list(FAULTS), tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize("name", FAULTS)
def test_those_that_reach_each_other_serve_on(found: Found, name: str) -> None:
    holds(found, name, elects=FAULTS[name])


def test_the_journals_say_that_one_led_at_a_time(found: Found) -> None:
    journals_hold(found)
