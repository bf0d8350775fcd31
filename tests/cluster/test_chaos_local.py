"""Nodes of one host are killed and stopped under load, their disk fills up, their wall clocks jump."""

from __future__ import annotations

import pytest
from struck import holds, journals_hold, strike

from bench.chaos_run import Found

FAULTS = {"executing": False, "stop3": True, "clock": False, "disk": True}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return strike(list(FAULTS), tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize("name", FAULTS)
def test_no_other_nodes_client_notices(found: Found, name: str) -> None:
    holds(found, name, elects=FAULTS[name])


def test_the_journals_say_that_one_led_at_a_time(found: Found) -> None:
    journals_hold(found)
