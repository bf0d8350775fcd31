"""The etcd that a cluster meets in goes away and comes back, loses a server, and gives the lead to another node."""

from __future__ import annotations

import pytest
from struck import holds, journals_hold, strike

from bench.chaos_run import Found

FAULTS = {"etcd": True, "member": False, "etcd-leader": True}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return strike(list(FAULTS), tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize("name", FAULTS)
def test_no_request_fails_for_it(found: Found, name: str) -> None:
    holds(found, name, elects=FAULTS[name])


def test_the_journals_say_that_one_led_at_a_time(found: Found) -> None:
    journals_hold(found)
