"""Faults of the chaos bench in short form, on real clusters under load: what the tests of `test_chaos_*` look at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.chaos import FLAGS, small_models
from bench.chaos_faults import faults
from bench.chaos_places import Settings
from bench.chaos_run import Found, Pace, strike_all

PACE = Pace(rate=3.0, tokens=120, settle_s=0.5)
SCALE = 0.1


def strike(names: Sequence[str], folder: Path) -> Found:
    """One cluster of three nodes, on which these faults are struck one after the other."""
    folder.chmod(0o700)
    known = faults(SCALE)
    settings = Settings(small_models(folder / "models"), FLAGS, 3, folder)
    return asyncio.run(strike_all([known[name] for name in names], settings, PACE, lambda fault, scene: None))


def holds(found: Found, name: str, *, elects: bool) -> None:
    """Whatever was struck, no request elsewhere noticed, and none of its own was answered wrongly or never.

    elects: somebody else had to lead, and did.
    """
    row = next(row for row in found.rows if row.fault.name == name)
    if row.skipped:
        pytest.skip(row.skipped)
    assert not row.trouble, row.trouble
    assert row.elsewhere.right == row.elsewhere.begun > 0, (row.elsewhere.reasons, found.log)
    assert (row.own.other, row.own.never) == (0, 0), row.own.reasons
    assert bool(row.lost) == (row.own.begun > 0)
    if elects:
        assert row.recovered_s is not None
        print(f"{row.fault.what}: the next leader decided after {row.recovered_s:.2f} s")


def journals_hold(found: Found) -> None:
    """One leader a term, terms that only grow, the same decisions when they are replayed."""
    if all(row.skipped for row in found.rows):
        pytest.skip(found.rows[0].skipped)
    assert found.troubles == []
    numbers = [term.number for term in found.terms]
    assert numbers == sorted(set(numbers)) and sum(term.entries for term in found.terms) > 0
