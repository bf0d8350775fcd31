"""What the chaos bench counts: how requests ended, how long nobody led, what journals say that must not be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.chaos import table
from bench.chaos_faults import faults
from bench.chaos_journals import Term, read, troubles
from bench.chaos_load import Tally, together
from bench.chaos_run import Found, Row, recovery_s
from bench.chaos_scene import Strike
from bench.records import Application, Outcome, Plan, Written
from janus_server.coordinator.names import free


def outcome(text: str, failure: str | None = None) -> Outcome:
    plan = Plan(0.0, Application("a", "a"), Written((1, 2)), 4)
    return Outcome(plan, 0.0, 0.0, 1.5, failure=failure, text=text)


def test_only_the_whole_text_is_right() -> None:
    tally = Tally()
    for ended in (
        outcome("abcd"), outcome("abc"), outcome("abbcd"),  # a token missing, a token twice
        outcome("ab", "closed"), outcome("", "connect"), outcome("abb", "closed"), outcome("ab", "timeout"),
    ):  # fmt: skip
        tally.add(ended, "abcd")
    assert (tally.begun, tally.right, tally.failed, tally.other, tally.never) == (7, 1, 2, 3, 1)
    assert tally.not_right == 6 and tally.slowest_s == 1.5
    whole = together({"n0": tally, "n1": tally, "n2": Tally()}, ["n0", "n1"])
    assert (whole.begun, whole.right, whole.other) == (14, 2, 6) and whole.reasons["another text"] == 6


def term(number: int, node: str, first_s: float, *, replays: bool = True) -> Term:
    return Term(number, node, first_s, first_s + 1.0, 5, replays)


def test_recovery_counts_from_the_strike_to_the_first_decision_of_its_own_election() -> None:
    terms = [term(1, "n0", 1.0), term(2, "n1", 12.5), term(3, "n2", 31.0)]
    led = {1: ("n0", 0.9), 2: ("n1", 12.0), 3: ("n2", 30.5), 4: ("n0", 60.0)}
    strike, other = Strike(10.0, 1, frozenset({"n0"})), Strike(30.0, 2, frozenset())
    assert recovery_s([strike], 2, terms, led) == 2.5
    assert recovery_s([strike, other], 3, terms, led) == 2.5  # the longest of both
    assert recovery_s([other], 2, terms, led) is None  # what was elected later has another cause
    assert recovery_s([Strike(55.0, 3, frozenset())], 4, terms, led) == 5.0  # a term that has no journal


def test_journals_tell_of_two_leaders_in_a_term_and_of_terms_that_go_back() -> None:
    assert troubles([term(1, "n0", 1.0), term(3, "n1", 5.0)]) == []
    assert troubles([term(1, "n0", 1.0), term(1, "n1", 2.0)]) == ["term 1 was led by n0 and n1"]
    assert troubles([term(1, "n0", 5.0), term(2, "n1", 2.0)]) == ["term 2 began before term 1"]
    assert "other decisions" in troubles([term(1, "n0", 1.0, replays=False)])[0]


def test_a_journal_that_a_full_disk_left_empty_is_of_a_term_without_entries(tmp_path: Path) -> None:
    (tmp_path / "journal.n1.7").write_bytes(b"")
    (tmp_path / "journal.n0.2").write_text(json.dumps({"type": "heading"}) + '\n{"type":"entry","now":')
    assert read(tmp_path, "journal", {}) == [Term(2, "n0", 0.0, 0.0, 0, True), Term(7, "n1", 0.0, 0.0, 0, True)]


def test_times_of_a_node_whose_clock_is_ahead_are_told_on_this_one(tmp_path: Path) -> None:
    entries = [{"type": "heading"}, {"type": "entry", "now": 100.0}, {"type": "entry", "now": 102.5}]
    (tmp_path / "journal.n2.9").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert read(tmp_path, "journal", {"n2": 90.0}) == [Term(9, "n2", 10.0, 12.5, 2, False)]  # nothing to replay there


def test_a_row_holds_unless_somebody_else_noticed_or_a_text_was_wrong() -> None:
    fault = faults()["leader"]
    good = Tally(begun=3, right=3)
    row = Row(fault, lost=("n0",), own=Tally(begun=4, right=1, failed=3), elsewhere=good, recovered_s=2.0)
    assert row.held and Found([row], [], []).held
    assert not Row(fault, elsewhere=Tally(begun=3, right=2, failed=1)).held
    assert not Row(fault, own=Tally(begun=1, other=1), elsewhere=good).held
    assert not Row(fault, own=Tally(begun=1, never=1), elsewhere=good).held
    assert not Row(fault, trouble="it did not come back").held
    shown = table([Found([row, Row(faults()["slow"], skipped="no rights")], [], [])])
    assert "| 2.00 s" in shown and "skipped: no rights" in shown


@pytest.mark.parametrize(
    ("used", "expected"), [((), ["n0", "n1"]), (("n0", "n2"), ["n1", "n3"]), (("x", "n1"), ["n0", "n2"])]
)
def test_free_names_are_the_first_that_nobody_has(used: tuple[str, ...], expected: list[str]) -> None:
    assert free(2, frozenset(used)) == expected
