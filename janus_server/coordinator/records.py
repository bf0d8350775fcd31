"""Who belongs to a cluster and who leads it, as frozen records, and how two such views differ.

Both coordinators make these, the shells of the cluster read them. Pure: no clock, no input, no state.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from janus_server.errors import BadConfig

_NAME: Final = re.compile(r"[a-z0-9-]{1,64}", re.ASCII)
_INCARNATION: Final = re.compile(r"[a-z0-9]{1,48}(?:\.[0-9]{1,9})?", re.ASCII)

MOST_MEMBERS: Final = 1024
"""A view is read whole and sent nowhere; beyond this many nodes something is wrong with whoever writes them."""
MOST_MEMBER_BYTES: Final = 4096


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node as it presents itself. url: where its peers reach it, pages: where those of other hosts read its memory;
    domain: nodes of one domain are close to each other.

    incarnation names one registration. A node that was thought gone comes back with another one, "a1b2.1" after "a1b2":
    what was promised to the former is void.
    """

    name: str
    incarnation: str
    url: str
    host: str = ""
    domain: str = ""
    version: str = ""
    pages: str = ""

    @property
    def process(self) -> str:
        """What all incarnations of one process have in common."""
        return self.incarnation.partition(".")[0]

    def reborn(self) -> Member:
        """The same node in its next incarnation."""
        process, _, times = self.incarnation.partition(".")
        return msgspec.structs.replace(self, incarnation=f"{process}.{int(times or 0) + 1}")


class Leader(msgspec.Struct, frozen=True):
    """Who holds the highest term."""

    name: str
    incarnation: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a member knows of its cluster; while the coordinator does not answer, what it knew last.

    term is the leader's. Without a leader every term up to this one is over. members are ordered by name. leading is
    the term in which this very member leads, by its own account; before it acts it asks its session. cut: why the
    coordinator cannot be used at the moment.
    """

    term: int = 0
    leader: Leader | None = None
    members: tuple[Member, ...] = ()
    leading: int | None = None
    cut: str | None = None

    def is_stale(self, term: int) -> bool:
        """Whether orders of this term are to be refused."""
        return term < self.term or (term == self.term and self.leader is None)

    def member(self, name: str) -> Member | None:
        return next((member for member in self.members if member.name == name), None)


class Leadership(msgspec.Struct, frozen=True):
    """The right to lead: in this term, until until_s on the clock of the session that gave it."""

    term: int
    until_s: float


class Led(msgspec.Struct, frozen=True):
    """A term has begun, under this leader."""

    term: int
    leader: Leader


class Vacant(msgspec.Struct, frozen=True):
    """There is no leader: all terms up to this one are over."""

    term: int


class Came(msgspec.Struct, frozen=True):
    member: Member


class Went(msgspec.Struct, frozen=True):
    member: Member


class Altered(msgspec.Struct, frozen=True):
    """The same registration with another url, host, domain or version."""

    member: Member


class Elected(msgspec.Struct, frozen=True):
    """This member leads from now on, for as long as its session says so."""

    term: int


class Deposed(msgspec.Struct, frozen=True):
    """This member does not lead any more; it will never lead in this term again."""

    term: int


class Cut(msgspec.Struct, frozen=True):
    """The coordinator cannot be used; what was last known stays."""

    why: str


class Back(msgspec.Struct, frozen=True):
    """The coordinator can be used again."""


Change = Led | Vacant | Came | Went | Altered | Elected | Deposed | Cut | Back


def changes(before: View, after: View) -> tuple[Change, ...]:
    """What happened between two views, in the order in which it should be acted upon: first of all, stop leading.

    Whatever came and went in between is left out, except that a term never goes by unseen if it still lasts.
    """
    found: list[Change] = []
    if before.leading is not None and before.leading != after.leading:
        found.append(Deposed(before.leading))
    if before.cut is not None and after.cut is None:
        found.append(Back())
    found += _moves(before, after)
    if after.leader is None:
        if before.leader is not None:
            found.append(Vacant(after.term))
    elif (before.term, before.leader) != (after.term, after.leader):
        found.append(Led(after.term, after.leader))
    if after.leading is not None and before.leading != after.leading:
        found.append(Elected(after.leading))
    if after.cut is not None and before.cut != after.cut:
        found.append(Cut(after.cut))
    return tuple(found)


def _moves(before: View, after: View) -> list[Change]:
    had = {member.name: member for member in before.members}
    has = {member.name: member for member in after.members}
    found: list[Change] = []
    for name in sorted(had.keys() | has.keys()):
        old, new = had.get(name), has.get(name)
        if old is not None and new is not None and old.incarnation == new.incarnation:
            found += [Altered(new)] if old != new else []
            continue
        found += [Went(old)] if old is not None else []
        found += [Came(new)] if new is not None else []
    return found


def overdue(before: tuple[Member, ...], now: tuple[Member, ...]) -> tuple[Member, ...]:
    """Those of now, and those of before that are not yet back under their name; ordered by name."""
    names = {member.name for member in now}
    kept = [member for member in before if member.name not in names]
    return tuple(sorted((*now, *kept), key=lambda member: member.name)) if kept else now


def check_member(member: Member) -> Member:
    """The member itself; BadConfig where a cluster could not take it."""
    check_name("the name of a node", member.name)
    if _INCARNATION.fullmatch(member.incarnation) is None:
        raise BadConfig("the incarnation of a node has 1 to 48 of a-z and 0-9")
    if len(write_member(member)) > MOST_MEMBER_BYTES:
        raise BadConfig(f"what node {member.name} tells of itself exceeds {MOST_MEMBER_BYTES} bytes")
    return member


def check_name(what: str, name: str) -> str:
    """The name itself; BadConfig unless it is made of a-z, 0-9 and hyphens."""
    if _NAME.fullmatch(name) is None:
        raise BadConfig(f"{what} must have 1 to 64 of a-z, 0-9 and -")
    return name


def write_member(member: Member) -> bytes:
    return msgspec.json.encode(member)


def read_member(text: bytes, name: str) -> Member | None:
    """What write_member wrote for the node of this name; None for anything else."""
    if len(text) > MOST_MEMBER_BYTES:
        return None
    try:
        member = msgspec.json.decode(text, type=Member)
        return check_member(member) if member.name == name else None
    except (msgspec.MsgspecError, UnicodeDecodeError, BadConfig):
        return None
