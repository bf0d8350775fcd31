"""Leases and terms under every pause: candidates that stop anywhere, replies that come late or never, and clocks that
only go forwards. What must hold: no term has two leaders, and nobody acts while another may.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server.coordinator.lease import (
    LeaseRecord,
    Seat,
    Step,
    deadline_s,
    extended_s,
    margin_s,
    next_step,
    renew_s,
    take_turn,
)
from janus_server.coordinator.records import (
    Altered,
    Back,
    Came,
    Change,
    Cut,
    Deposed,
    Elected,
    Leader,
    Leadership,
    Led,
    Member,
    Vacant,
    View,
    Went,
    changes,
    check_member,
    overdue,
    read_member,
    write_member,
)
from janus_server.errors import BadConfig

LEASE_S = 2.0
BOOT = "boot"
EMPTY = Seat()


@pytest.mark.parametrize("lease_s", [0.5, 1.0, 2.0, 5.0, 60.0])
def test_a_deadline_leaves_a_margin_and_time_for_several_renewals(lease_s: float) -> None:
    assert 0.1 <= margin_s(lease_s) <= lease_s / 2
    assert deadline_s(100.0, lease_s) == pytest.approx(100.0 + lease_s - margin_s(lease_s))
    assert deadline_s(0.0, lease_s) > 2 * renew_s(lease_s) or lease_s < 1.0


@given(
    until_s=st.floats(0, 100),
    now_s=st.floats(0, 100),
    late_s=st.floats(0, 100),
    lease_s=st.floats(0.5, 60),
)
def test_a_renewal_never_revives_what_has_ended(until_s: float, now_s: float, late_s: float, lease_s: float) -> None:
    after_s = extended_s(until_s, now_s, now_s - late_s, lease_s)
    assert (after_s is None) == (now_s >= until_s)
    if after_s is not None:
        assert after_s >= until_s
        assert after_s == until_s or after_s < now_s - late_s + lease_s


# One host: candidates who read and write one record, and stop for any time before and after.


@dataclass
class Candidate:
    own: Leader
    held: Leadership | None = None
    acts: list[tuple[int, float]] = field(default_factory=list)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 3), st.floats(0, 3), st.booleans(), st.booleans()), max_size=60
    )
)
def test_candidates_of_one_host_never_lead_together(steps: list[tuple[int, float, float, bool, bool]]) -> None:
    """A step: who, how long until it reads the clock, how long it then stops before it acts, whether it stands, and
    whether it dies (and comes back as another incarnation)."""
    nodes = [Candidate(Leader(f"n{i}", f"i{i}")) for i in range(3)]
    record, now_s = LeaseRecord(), 0.0
    for at, (who, wait_s, stop_s, stands, dies) in enumerate(steps):
        node = nodes[who]
        now_s += wait_s
        turn = take_turn(record, node.own, node.held, stands=stands, now_s=now_s, boot=BOOT, lease_s=LEASE_S)
        assert turn.record.term >= record.term
        record, node.held = turn.record, turn.held
        now_s += stop_s
        for each in nodes:
            if each.held is not None and now_s < each.held.until_s:
                each.acts.append((each.held.term, now_s))
        if dies:
            node.own, node.held = Leader(node.own.name, f"i{who}-{at}"), None
    check_acts([(term, at_s, f"n{i}") for i, node in enumerate(nodes) for term, at_s in node.acts])


@given(now_s=st.floats(0, 10), until_s=st.floats(0, 10), term=st.integers(0, 9), boot=st.sampled_from([BOOT, "before"]))
def test_a_lease_of_somebody_else_is_taken_when_it_is_over_and_not_before(
    now_s: float, until_s: float, term: int, boot: str
) -> None:
    record = LeaseRecord(term=term, name="other", incarnation="o", until_s=until_s, boot=boot)
    turn = take_turn(record, Leader("me", "m"), None, stands=True, now_s=now_s, boot=BOOT, lease_s=LEASE_S)
    if boot == BOOT and now_s < until_s:
        assert turn.record is record
        assert turn.held is None
    else:
        assert turn.held == Leadership(term + 1, deadline_s(now_s, LEASE_S))
        assert turn.record.until_s == now_s + LEASE_S > turn.held.until_s


def test_a_leader_that_resigns_leaves_its_term_behind() -> None:
    own = Leader("me", "m")
    led = take_turn(LeaseRecord(), own, None, stands=True, now_s=0.0, boot=BOOT, lease_s=LEASE_S)
    left = take_turn(led.record, own, led.held, stands=False, now_s=0.1, boot=BOOT, lease_s=LEASE_S)
    assert left.held is None
    assert left.record == LeaseRecord(term=1)
    assert not left.record.is_held(0.1, BOOT)


def test_whoever_missed_its_deadline_goes_on_in_a_new_term() -> None:
    own = Leader("me", "m")
    led = take_turn(LeaseRecord(), own, None, stands=True, now_s=0.0, boot=BOOT, lease_s=LEASE_S)
    assert led.held is not None
    late_s = led.held.until_s
    again = take_turn(led.record, own, led.held, stands=True, now_s=late_s, boot=BOOT, lease_s=LEASE_S)
    assert again.held is not None
    assert again.held.term == again.record.term == 2


# Several hosts: a server that keeps leases, and messages that are late or lost.


@dataclass
class Server:
    """What etcd does, as far as it matters here: leases end some time after their length, never before."""

    slow_s: float
    revision: int = 1
    leases: dict[str, float] = field(default_factory=dict)
    seat: Seat = EMPTY

    def at(self, now_s: float) -> None:
        for who in [who for who, until_s in self.leases.items() if now_s >= until_s + self.slow_s]:
            del self.leases[who]
            if self.seat.holder is not None and self.seat.holder.incarnation == who:
                self.revision, self.seat = self.revision + 1, Seat()


@dataclass
class Remote:
    name: str
    incarnation: str
    until_s: float = -1.0
    leading: int | None = None
    spent: int = 0
    seen: Seat = EMPTY
    lives: int = 0
    acts: list[tuple[int, float]] = field(default_factory=list)

    @property
    def own(self) -> Leader:
        return Leader(self.name, self.incarnation)


DELAY_S = st.one_of(st.just(0.0), st.floats(0, 0.3), st.floats(0, 5))


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("rrraawx"), DELAY_S, DELAY_S, st.booleans()), max_size=80
    ),
    slow_s=st.floats(0, 1),
)
def test_nodes_of_several_hosts_never_lead_together(
    steps: list[tuple[int, str, float, float, bool]], slow_s: float
) -> None:
    """A step: who, what it does (renew, act on what it saw, watch, resign), how long its request and the reply take,
    and whether the reply is lost."""
    server, now_s = Server(slow_s), 0.0
    nodes = [Remote(f"n{i}", f"i{i}") for i in range(3)]
    for who, does, there_s, back_s, lost in steps:
        node = nodes[who]
        asked_s, now_s = now_s, now_s + there_s
        server.at(now_s)
        act(server, node, does, asked_s, now_s, now_s + back_s, lost)
        now_s += back_s
        server.at(now_s)
        for each in nodes:
            if each.leading is not None and now_s < each.until_s:
                each.acts.append((each.leading, now_s))
    check_acts([(term, at_s, node.name) for node in nodes for term, at_s in node.acts])


def act(server: Server, node: Remote, does: str, asked_s: float, there_s: float, now_s: float, lost: bool) -> None:
    """One request, which the server gets at there_s and whose reply is read at now_s."""
    if does == "r":
        if node.incarnation in server.leases:
            server.leases[node.incarnation] = there_s + LEASE_S
            if not lost:
                until_s = extended_s(node.until_s, now_s, asked_s, LEASE_S)
                node.leading = None if until_s is None else node.leading
                node.until_s = deadline_s(asked_s, LEASE_S) if until_s is None else until_s
        elif not lost:
            node.lives += 1
            node.incarnation, node.leading = f"{node.name}.{node.lives}", None
            server.leases[node.incarnation] = there_s + LEASE_S
            node.until_s = deadline_s(asked_s, LEASE_S)
        return
    if does == "w":
        node.seen = server.seat if not lost else node.seen
    step = next_step(node.seen, node.own, node.leading, node.spent, does != "x")
    if step is Step.STOP and not (node.leading is not None and node.seen.term < node.leading and not does == "w"):
        node.leading = None
    elif step is Step.LEAVE and server.seat.holder == node.own:
        server.revision, server.seat = server.revision + 1, Seat()
    elif step is Step.TAKE and server.seat.holder is None and node.incarnation in server.leases:
        server.revision += 1
        server.seat = Seat(server.revision, node.own)
        if not lost:
            lead(node, server.revision, now_s)
    elif step is Step.LEAD:
        lead(node, node.seen.term, now_s)


def lead(node: Remote, term: int, now_s: float) -> None:
    if term > node.spent and now_s < node.until_s:
        node.leading = node.spent = term


def check_acts(acts: list[tuple[int, float, str]]) -> None:
    """(term, time, who): each term is one node's, and over before the next begins."""
    terms: dict[int, list[tuple[float, str]]] = {}
    for term, at_s, who in acts:
        terms.setdefault(term, []).append((at_s, who))
    last_s = -1.0
    for _, led in sorted(terms.items()):
        assert len({who for _, who in led}) == 1
        assert min(at_s for at_s, _ in led) > last_s
        last_s = max(at_s for at_s, _ in led)


@pytest.mark.parametrize(
    ("seat", "leading", "spent", "stands", "step"),
    [
        (Seat(), None, 0, True, Step.TAKE),
        (Seat(), None, 0, False, Step.WAIT),
        (Seat(3, Leader("b", "b")), None, 0, True, Step.WAIT),
        (Seat(3, Leader("a", "a")), None, 0, True, Step.LEAD),
        (Seat(3, Leader("a", "a")), None, 3, True, Step.LEAVE),
        (Seat(3, Leader("a", "a")), None, 0, False, Step.LEAVE),
        (Seat(3, Leader("a", "a.1")), None, 0, True, Step.WAIT),
        (Seat(3, Leader("a", "a")), 3, 3, True, Step.GO_ON),
        (Seat(4, Leader("a", "a")), 3, 3, True, Step.STOP),
        (Seat(4, Leader("b", "b")), 3, 3, True, Step.STOP),
        (Seat(), 3, 3, True, Step.STOP),
    ],
)
def test_what_a_candidate_does_next(seat: Seat, leading: int | None, spent: int, stands: bool, step: Step) -> None:
    assert next_step(seat, Leader("a", "a"), leading, spent, stands) is step


# Views.


def member(name: str, incarnation: str = "i", **parts: str) -> Member:
    return Member(name=name, incarnation=incarnation, url="ws://h", **parts)


MEMBERS = st.dictionaries(st.sampled_from("abc"), st.tuples(st.sampled_from(["i", "i.1"]), st.sampled_from("xy"))).map(
    lambda found: tuple(member(name, inc, host=host) for name, (inc, host) in sorted(found.items()))
)
VIEWS = st.builds(
    View,
    term=st.integers(0, 3),
    leader=st.sampled_from([None, Leader("a", "i"), Leader("b", "i")]),
    members=MEMBERS,
    leading=st.sampled_from([None, 1, 2]),
    cut=st.sampled_from([None, "away", "gone"]),
)


@given(before=VIEWS, after=VIEWS)
def test_changes_tell_all_that_is_different(before: View, after: View) -> None:
    told = before
    for change in changes(before, after):
        told = applied(told, change)
    assert told.members == after.members
    assert told.leader == after.leader
    assert told.term == after.term or after.leader is None
    assert (told.leading, told.cut) == (after.leading, after.cut)
    assert changes(after, after) == ()


def applied(view: View, change: Change) -> View:
    parts = {name: getattr(view, name) for name in view.__struct_fields__}
    members = {member.name: member for member in view.members}
    match change:
        case Led(term, leader):
            parts |= {"term": term, "leader": leader}
        case Vacant(term):
            parts |= {"term": term, "leader": None}
        case Came(found) | Altered(found):
            members[found.name] = found
        case Went(found):
            assert members.pop(found.name) == found
        case Elected(term):
            parts["leading"] = term
        case Deposed():
            parts["leading"] = None
        case Cut(why):
            parts["cut"] = why
        case Back():
            parts["cut"] = None
    return View(**parts | {"members": tuple(member for _, member in sorted(members.items()))})


@given(before=MEMBERS, now=MEMBERS)
def test_those_who_are_overdue_stay_until_they_are_back(before: tuple[Member, ...], now: tuple[Member, ...]) -> None:
    kept = overdue(before, now)
    assert [m.name for m in kept] == sorted({m.name for m in (*before, *now)})
    assert set(now) <= set(kept)
    assert all(m in now or m in before for m in kept)


def test_the_first_thing_told_is_that_one_must_stop() -> None:
    before = View(term=3, leader=Leader("a", "i"), members=(member("a"),), leading=3)
    after = View(term=9, leader=Leader("b", "i"), members=(member("b"),), cut="away")
    assert changes(before, after)[0] == Deposed(3)


@pytest.mark.parametrize(
    ("view", "stale", "fresh"),
    [
        (View(term=5, leader=Leader("a", "i")), [0, 4], [5, 6]),
        (View(term=5), [4, 5], [6]),
    ],
)
def test_orders_of_terms_that_are_over_are_stale(view: View, stale: list[int], fresh: list[int]) -> None:
    assert all(view.is_stale(term) for term in stale)
    assert not any(view.is_stale(term) for term in fresh)


def test_a_node_that_comes_back_has_another_incarnation_of_the_same_process() -> None:
    first = member("a", "a1b2")
    second = first.reborn()
    third = second.reborn()
    assert [m.incarnation for m in (first, second, third)] == ["a1b2", "a1b2.1", "a1b2.2"]
    assert first.process == third.process == "a1b2"
    assert check_member(third) is third


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "ä", "a" * 65, "a\n", "..", "a_b"])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(BadConfig, match="a-z, 0-9 and -"):
        check_member(member(name))
    with pytest.raises(BadConfig, match="incarnation"):
        check_member(member("a", incarnation="!" + name))
    with pytest.raises(BadConfig, match="4096 bytes"):
        check_member(member("a", host="x" * 5000))


@given(st.one_of(st.binary(max_size=200), st.just(write_member(member("a")))))
def test_what_others_wrote_never_raises(text: bytes) -> None:
    found = read_member(text, "a")
    assert found is None or found.name == "a"
    assert read_member(text, "b") is None or read_member(text, "b") != found
    assert read_member(b" " * 5000 + write_member(member("a")), "a") is None
